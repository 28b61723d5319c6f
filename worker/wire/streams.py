"""Creates and updates the JetStream streams and the consumer of a prefix.

Knows nothing of the messages' content.
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import nats.errors
import structlog
from anyio import move_on_after, sleep
from nats.js import api
from nats.js.errors import APIError, NotFoundError

from turnkeep_client.subjects import CONSUMER
from worker.process.constants import CONSTANTS
from worker.process.formatting import size

from .connection import BrokerError, ask_patiently
from .log_room import LIMIT_NOTE, open_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.js.client import JetStreamContext

    from turnkeep_client.subjects import SessionKind, Subjects
    from worker.process.constants import Constants
    from worker.process.settings import Settings

#: Returned messages count too: once this many wait to be delivered again, the server delivers nothing.
MAX_ACK_PENDING: Final = 1_000_000

#: Window for duplicates: the server's minimum (0 means two minutes). The server compares message ids across
#: the whole stream, so one tenant's id could make it drop another tenant's message.
DEDUPE_S: Final = 0.1

_NAME_IN_USE: Final = 10058
_SUBJECTS_OVERLAP: Final = 10065
_MORE_SPACE: Final = "raise its JetStream storage limit, or lower --log-max-bytes"
_NO_SPACE: Final = {10002, 10023, 10028, 10047}  # limits of the account and of the server

#: The kinds of subjects of the log stream, besides images; `commit` is stored as `out`.
_LOGGED: Final[tuple[SessionKind, ...]] = ("in", "commit", "checkpoint", "attempt", "dead", "closed")

#: Metadata of the log stream: the format of its entries. A log of another format is refused.
_FORMAT: Final = {"turnkeep-log": "3"}

#: The fields that the settings decide; all others are the operator's.
_OWNED: Final = frozenset(
    {"subjects", "discard", "max_bytes", "max_age", "max_msg_size", "allow_direct", "duplicate_window"}
    | {"subject_transform", "republish", "num_replicas"}
    | {"filter_subject", "deliver_policy", "ack_policy", "ack_wait", "max_deliver", "max_ack_pending"}
)

#: An `ack_wait` that makes the server redeliver all messages, and the pause for that, which takes 0.1 s.
_AT_ONCE_S: Final = 0.001
_TAKE_BACK_S: Final = 0.2

#: The longest wait for replicas of a stream, and the pause between two checks.
_COPY_S: Final = 60.0
_LOOK_S: Final = 0.1

#: Pause between two checks that the streams and the consumer exist.
_KEEP_S: Final = 5.0

log = structlog.get_logger(__name__)


async def ensure(
    js: JetStreamContext, subjects: Subjects, settings: Settings, constants: Constants = CONSTANTS
) -> None:
    """Create the log stream, the token stream and the consumer, or update them to these settings.

    Several workers may do this at the same time. Keeps an operator's other changes (placement; the number of
    replicas if the settings have none). Raises `BrokerError`, also if an existing stream cannot be updated to
    these settings.
    """
    is_copied = await ensure_stream(js, _log_stream(subjects, settings))
    await _ensure_others(js, subjects, settings, constants)
    if is_copied:  # wait for the consumer's copies, too: else it may be lost with its node
        await _copied(partial(js.consumer_info, subjects.log_stream, CONSUMER), settings.log_replicas)


async def _ensure_others(
    js: JetStreamContext, subjects: Subjects, settings: Settings, constants: Constants
) -> None:
    await ensure_stream(js, _token_stream(subjects, settings, constants))
    await _ensure_consumer(js, subjects.log_stream, _consumer(subjects, constants))


async def keep(
    js: JetStreamContext, subjects: Subjects, settings: Settings, constants: Constants = CONSTANTS
) -> None:
    """Create the token stream and the consumer again if they vanish, until cancelled.

    Raises `BrokerError` once the log is gone: the sessions in memory come from entries that no longer exist.
    """
    num_missed = 0
    while num_missed < 2:  # a cluster that starts may not know it at once
        await sleep(_KEEP_S)
        try:
            num_missed = 0 if await _finds(js.stream_info(subjects.log_stream)) else num_missed + 1
            if num_missed or (
                await _finds(js.consumer_info(subjects.log_stream, CONSUMER))
                and await _finds(js.stream_info(subjects.token_stream))
                and not await _is_ahead(js, subjects.log_stream)
            ):
                continue
            log.warning("the token stream or the consumer cannot be used, and is made again")
            await _ensure_others(js, subjects, settings, constants)
        except (APIError, nats.errors.Error, OSError, BrokerError):
            continue  # their state is unknown for now
    raise BrokerError(
        f"the stream {subjects.log_stream} has vanished: somebody has removed it, or its server has lost its"
        " files; the next start makes a new one"
    )


async def _is_ahead(js: JetStreamContext, stream: str) -> bool:
    """Whether the consumer's position is past the log's end: then it would not deliver the next requests.

    This happens if a server has lost the end of a damaged log file, but kept the state of its consumers.
    """
    consumer = await js.consumer_info(stream, CONSUMER)
    delivered = consumer.delivered.stream_seq if consumer.delivered else 0
    return delivered > (await js.stream_info(stream)).state.last_seq


async def _finds(asked: Awaitable[object]) -> bool:
    try:
        await asked
    except NotFoundError:
        return False
    return True


def _log_stream(subjects: Subjects, settings: Settings) -> api.StreamConfig:
    return api.StreamConfig(
        name=subjects.log_stream,
        subjects=[*map(subjects.every, _LOGGED), subjects.every_image, subjects.erased("*")],
        # Results are published on `commit`, stored under `out`, and republished there only then: subscribers
        # of a published subject get a message at once, even if the stream refuses it for a lost fence.
        subject_transform=api.SubjectTransform(src=subjects.every("commit"), dest=subjects.same("out")),
        republish=api.RePublish(src=subjects.every("out"), dest=subjects.same("out")),
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.NEW,  # a full log refuses requests, and never drops entries
        max_bytes=open_bytes(settings.log_max_bytes),
        max_msg_size=settings.max_message_bytes,
        num_replicas=settings.log_replicas,
        allow_direct=True,
        duplicate_window=DEDUPE_S,
        metadata={**_FORMAT, LIMIT_NOTE: str(settings.log_max_bytes)},
    )


def _token_stream(subjects: Subjects, settings: Settings, constants: Constants) -> api.StreamConfig:
    return api.StreamConfig(
        name=subjects.token_stream,
        subjects=[subjects.every_token("chunk")],
        # As for results: clients must not receive a chunk that a crash can lose.
        subject_transform=api.SubjectTransform(
            src=subjects.every_token("chunk"), dest=subjects.same_tokens("tok")
        ),
        republish=api.RePublish(src=subjects.every_token("tok"), dest=subjects.same_tokens("tok")),
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD,
        max_bytes=constants.token_max_bytes,
        max_age=constants.token_ttl_s,
        max_msg_size=settings.max_message_bytes,
        num_replicas=settings.log_replicas,
        allow_direct=True,
        duplicate_window=DEDUPE_S,
    )


def _consumer(subjects: Subjects, constants: Constants) -> api.ConsumerConfig:
    return api.ConsumerConfig(
        durable_name=CONSUMER,
        filter_subject=subjects.every("in"),
        deliver_policy=api.DeliverPolicy.ALL,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=constants.ack_wait_s,
        max_deliver=-1,  # every request is answered, however often it is redelivered
        max_ack_pending=MAX_ACK_PENDING,
    )


async def ensure_stream(js: JetStreamContext, wanted: api.StreamConfig) -> bool:
    """Create a stream, or update it to these settings; return whether its number of replicas changed.

    Raises `BrokerError`.
    """
    try:
        return await ask_patiently(partial(_bring_about, js, wanted))
    except (APIError, nats.errors.Error) as error:
        raise BrokerError(await _explain(js, wanted, error)) from None


async def _bring_about(js: JetStreamContext, wanted: api.StreamConfig) -> bool:
    name = str(wanted.name)
    try:
        info = await js.stream_info(name)
    except NotFoundError:
        try:
            await js.add_stream(wanted)
        except APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise
            info = await js.stream_info(name)  # another worker made it, with other settings
        else:
            log.info("created stream", stream=name)
            await ask_patiently(partial(js.stream_info, name))
            return False
    _check_identity(wanted, info)
    if changes := _differences(wanted, info.config):
        if info.state.bytes > int(changes.get("metadata", {}).get(LIMIT_NOTE, info.state.bytes)):
            raise BrokerError(
                f"the log has {size(info.state.bytes)}, more than log_max_bytes, so no close would fit;"
                " give a larger limit until sessions are closed"
            )
        await js.update_stream(info.config.evolve(**changes))
        log.info("updated stream", stream=name, **changes)
        if "num_replicas" in changes:
            await _copied(partial(js.stream_info, name), wanted.num_replicas)
    most = wanted.max_bytes if wanted.discard == api.DiscardPolicy.NEW else None
    if most and info.state.bytes > most * 0.9:
        log.warning("the log is nearly full", stream=name, bytes=info.state.bytes, max_bytes=wanted.max_bytes)
    return "num_replicas" in changes


async def _copied(look: Callable[[], Awaitable[Any]], num_replicas: int | None) -> None:
    """Wait up to 60 s until all replicas of a stream or consumer are current.

    Until then its leader may not answer. `look` reads the information on the stream or consumer.
    """
    with move_on_after(_COPY_S):
        while True:
            cluster = (await look()).cluster
            others = [one.current for one in cluster.replicas or ()] if cluster else []
            if others == [True] * ((num_replicas or 1) - 1):
                return
            await sleep(_LOOK_S)


def _check_identity(wanted: api.StreamConfig, info: api.StreamInfo) -> None:
    """Raise `BrokerError` if a stream is another program's, or this version cannot read or update it."""
    found = info.config
    is_log = wanted.metadata is not None
    if is_log and info.state.messages and not _FORMAT.items() <= (found.metadata or {}).items():
        raise BrokerError(
            f"the stream {wanted.name} was written by another version, whose results have no requests; serve"
            " it with that version, remove it, or choose another --prefix"
        )
    ours = {*(wanted.subjects or ()), wanted.republish.src if wanted.republish else ""}
    if not found.subjects or not set(found.subjects) <= ours:
        raise BrokerError(
            f"the stream {wanted.name} exists with the subjects {', '.join(found.subjects or ())} instead of"
            f" {', '.join(wanted.subjects or ())}; remove or rename it, or choose another --prefix"
        )
    for what in ("storage", "retention"):
        if getattr(found, what) != getattr(wanted, what):
            raise BrokerError(
                f"the stream {wanted.name} exists with {what} {getattr(found, what)} instead of"
                f" {getattr(wanted, what).value}, which is fixed; remove it, or choose another --prefix"
            )


async def _ensure_consumer(js: JetStreamContext, stream: str, wanted: api.ConsumerConfig) -> None:
    try:
        await ask_patiently(partial(_set_up, js, stream, wanted))
    except (APIError, nats.errors.Error) as error:
        raise BrokerError(
            f"the consumer {CONSUMER} of stream {stream} cannot be set up ({reason(error)}); if something"
            " else made it, remove it"
        ) from None


async def _set_up(js: JetStreamContext, stream: str, wanted: api.ConsumerConfig) -> None:
    try:
        found = (await js.consumer_info(stream, CONSUMER)).config
    except NotFoundError:
        found = None
    if found and await _is_ahead(js, stream):
        log.warning(
            "the log has lost its last entries; all of its requests are looked at again, and turnkeep"
            " sessions --verify says what else is lost",
            stream=stream,
        )
        await js.delete_consumer(stream, CONSUMER)
        found = None
    changes = _differences(wanted, found) if found else {}
    if found is None or changes:
        await js.add_consumer(stream, found.evolve(**changes) if found else wanted)
        log.info("set up consumer", stream=stream, consumer=CONSUMER, **changes)


async def take_back(js: JetStreamContext, subjects: Subjects) -> None:
    """Have the server redeliver at once the requests that a dead worker did not acknowledge.

    Only for a worker that is alone, before `ensure` and the first pull: nobody else holds deliveries then.
    If this fails, the requests come after `ack_wait`. If it is interrupted, `ensure` sets `ack_wait` again.
    """
    with contextlib.suppress(APIError, nats.errors.Error):
        found = await js.consumer_info(subjects.log_stream, CONSUMER)
        if found.num_ack_pending:
            await js.add_consumer(subjects.log_stream, found.config.evolve(ack_wait=_AT_ONCE_S))
            await sleep(_TAKE_BACK_S)
            await js.add_consumer(subjects.log_stream, found.config)


def _differences(wanted: Any, found: Any) -> dict[str, Any]:
    """Return the fields of `wanted` to change in `found`: those that Turnkeep owns, unless they are None."""
    asked = {field.name: getattr(wanted, field.name) for field in dataclasses.fields(wanted)}
    changes = {
        name: value
        for name, value in asked.items()
        if name in _OWNED and value is not None and value != getattr(found, name)
    }
    if (wanted_notes := asked.get("metadata")) and not wanted_notes.items() <= (found.metadata or {}).items():
        changes["metadata"] = {**(found.metadata or {}), **wanted_notes}
    return changes


async def _explain(js: JetStreamContext, wanted: api.StreamConfig, error: Exception) -> str:
    code = error.err_code if isinstance(error, APIError) else None
    if code == _SUBJECTS_OVERLAP:
        owners = {await js.find_stream_name_by_subject(subject) for subject in wanted.subjects or ()}
        return (
            f"the stream {wanted.name} cannot be created: its subjects belong to the stream"
            f" {', '.join(sorted(owners))}; remove that stream, or choose another --prefix"
        )
    if code in _NO_SPACE:
        in_memory = wanted.storage == api.StorageType.MEMORY
        mend = "raise its JetStream memory limit, and the account's" if in_memory else _MORE_SPACE
        return (
            f"the NATS server has no room for the stream {wanted.name}, of {size(wanted.max_bytes or 0)};"
            f" {mend}"
        )
    return f"the NATS server refuses the stream {wanted.name}: {reason(error)}"


def reason(error: Exception) -> str:
    """Return the reason that the NATS server gave for an error."""
    return str(getattr(error, "description", None) or error or type(error).__name__)
