"""Connects to NATS, with clear errors if the first connection fails; then reconnects for ever.

Writes the log messages about the connection. Knows nothing of the server process, streams or sessions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import nats.errors
import nats.js.errors
import structlog
from anyio import current_time, fail_after, sleep
from nats.js.errors import ServiceUnavailableError

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.nats_client import Nats, is_clustered, refusal, unreachable
from turnkeep_client.redact import redact
from turnkeep_client.redact import shown as shown_urls
from worker.process.concurrency import shielded

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nats.aio.client import Client

T = TypeVar("T")

log = structlog.get_logger(__name__)

#: How long JetStream may take until it answers, and the pause between two requests to it.
PATIENCE_S: Final = 20.0
_RETRY_S: Final = 0.2

#: The first version that answers direct gets of several subjects, and stores entries with a time to live.
_MIN_VERSION: Final = (2, 11)
#: The first version of each release series of the NATS server that syncs compacted files (its issue 8475).
_SYNCS_COMPACTIONS: Final = ((2, 12, 16), (2, 14, 6), (2, 15, 0))


class BrokerError(TurnkeepError):
    """The NATS server cannot be used; the message is one line with the reason and the remedy."""


async def connect(
    urls: str,
    *,
    name: str,
    min_payload_bytes: int = 0,
    timeout_s: float = 5.0,
    on_reconnected: Callable[[], Awaitable[None]] | None = None,
    on_closed: Callable[[str], Awaitable[None]] | None = None,
    **options: Any,
) -> Nats:
    """Connect to one of `urls` (joined by commas), check its JetStream, and reconnect for ever.

    `timeout_s` limits the first connection only. After each reconnect, `on_reconnected` is called once the
    subscriptions are restored; outstanding pulls are lost. `on_closed` is called when the server has closed
    the connection for good, for example because it revoked a permission, and on `close`; never before
    `connect` has returned. `options` are those of nats-py for credentials and TLS. Raises `BrokerError` if no
    server answers, or if it refuses the credentials, has no JetStream, or limits messages to less than
    `min_payload_bytes`.
    """
    client = Nats()
    shown = shown_urls(urls)
    watch = _Watch(client, shown, on_reconnected, on_closed)
    try:
        with fail_after(timeout_s):
            await _open(client, urls, watch, timeout_s, name=name, **options)
        watch.is_connected = True
        await _check_server(client, shown, min_payload_bytes, timeout_s)
    except TimeoutError:
        await shielded(client.abandon)
        reason = ""
        if watch.failures:
            reason = f" ({unreachable(watch.failures[-1]) or _first_line(watch.failures[-1])})"
        raise BrokerError(
            f"no NATS server answers at {shown} within {timeout_s:g} s{reason}; start one there with"
            " JetStream (nats-server -js), or leave out --nats to run the worker's own"
        ) from None
    except BaseException:
        await shielded(client.abandon)
        raise
    return client


async def _open(client: Nats, urls: str, watch: _Watch, timeout_s: float, **options: Any) -> None:
    """Connect for the first time; later the client reconnects for ever. `watch` receives its events."""
    await client.connect(
        urls.split(","),
        error_cb=watch.error,
        disconnected_cb=watch.disconnected,
        reconnected_cb=watch.reconnected,
        closed_cb=watch.closed,
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.25,  # only passed to sleep, so a float works
        connect_timeout=timeout_s,  # only passed to asyncio.wait_for
        **options,
    )


class _Watch:
    """Receives one connection's events.

    Until `is_connected` is set, errors are collected in `failures`; later they are logged.
    """

    def __init__(
        self,
        client: Client,
        shown: str,
        on_reconnected: Callable[[], Awaitable[None]] | None,
        on_closed: Callable[[str], Awaitable[None]] | None,
    ) -> None:
        self.shown = shown
        self.is_connected = False
        self.failures: list[Exception] = []
        self._client = client
        self._on_reconnected = on_reconnected
        self._on_closed = on_closed

    async def error(self, error: Exception) -> None:
        if not self.is_connected:
            is_first = not any(map(refusal, self.failures))  # more may come while the connection closes
            self.failures.append(error)
            if is_first and (why := refusal(error)):  # the client would retry until the timeout
                raise BrokerError(f"the NATS server at {self.shown} {why}")
        elif isinstance(error, nats.errors.SlowConsumerError):
            log.error("the worker reads too slowly; NATS messages were skipped", subject=error.subject)
        elif (why := refusal(error)) is not None:
            log.warning("NATS error", error=f"the NATS server {why}")
        elif isinstance(error, OSError):
            log.debug("NATS is not back yet", error=_first_line(error))  # `disconnected` has logged it once
        else:
            log.warning("NATS error", error=_first_line(error))

    async def disconnected(self) -> None:
        if self.is_connected and not self._client.is_closed:
            log.warning("lost the connection to NATS; trying again", servers=self.shown)

    async def reconnected(self) -> None:
        log.info("connected to NATS again", servers=self.shown)
        if self._on_reconnected:
            await self._on_reconnected()

    async def closed(self) -> None:
        if self.is_connected and self._on_closed:
            error = self._client.last_error
            why = "has closed the connection; its log says why"
            await self._on_closed(f"the NATS server {(error and refusal(error)) or why}")


async def confirm_subscriptions(client: Client) -> None:
    """Wait until the server has all of the client's subscriptions; before, it may answer "no responders".

    nats-py's `flush` sends its ping at once, ahead of buffered commands: only a second ping comes after them.
    If the connection is lost, waits for the next one. Raises `BrokerError` if it is closed for good.
    """
    num_confirmed = 0
    while num_confirmed < 2:
        try:
            await client.flush()
            num_confirmed += 1
        except nats.errors.FlushTimeoutError:
            log.warning("the NATS server does not confirm the subscriptions yet; trying again")
        except nats.errors.ConnectionClosedError:
            raise BrokerError("the NATS server has closed the connection; its log says why") from None


async def ask_patiently(ask: Callable[[], Awaitable[T]], *, of_several: bool = True) -> T:
    """Call `ask`; if JetStream does not answer in time, as while it starts, try again for up to 20 s.

    Also tries again if one `of_several` servers refuses, as without a leader. Raises nats-py's errors.
    """
    until_s = current_time() + PATIENCE_S
    while True:
        try:
            return await ask()
        except (nats.errors.TimeoutError, ServiceUnavailableError) as error:
            is_late = isinstance(error, nats.errors.TimeoutError)
            if current_time() > until_s or not (is_late or of_several):
                raise
            log.info("waiting for JetStream to answer", error=_first_line(error))
            await sleep(_RETRY_S)


async def _check_server(client: Client, shown: str, min_payload_bytes: int, timeout_s: float) -> None:
    try:
        ask = client.jetstream(timeout=timeout_s).account_info
        await ask_patiently(ask, of_several=is_clustered(client))
    except (nats.js.errors.Error, nats.errors.Error) as error:
        raise BrokerError(
            f"JetStream does not answer at {shown} ({_first_line(error)}); enable it there (nats-server -js)"
            " and for the account, and let the user publish to $JS.API.>"
        ) from None
    version = server_version(client)
    if version and _numbers(version) < _MIN_VERSION:
        raise BrokerError(
            f"nats-server {version} at {shown} is too old, as it cannot read several subjects at once;"
            " install 2.15.0 or newer"
        )
    if why := small_payload(client, min_payload_bytes, shown):
        raise BrokerError(why)


def small_payload(client: Client, min_payload_bytes: int, shown: str) -> str | None:
    """Return why the connected server's limit for the size of messages is too low; None if it is not."""
    if client.max_payload >= min_payload_bytes:
        return None
    return (
        f"the NATS server at {shown} takes messages of at most {client.max_payload} bytes; set its"
        f" max_payload to {min_payload_bytes} or lower --max-message-bytes"
    )


def server_version(client: Client) -> str:
    """Return the version of the server that a client is connected with; empty if it cannot be parsed."""
    version = client.connected_server_version
    try:
        return f"{version.major}.{version.minor}.{version.patch}"
    except ValueError:
        return ""


def loses_entries(version: str) -> str:
    """Return which entries a NATS server of this version can lose, and the remedy; empty if none is known."""
    if not version:
        return ""
    number = _numbers(version)
    fixed = next((one for one in _SYNCS_COMPACTIONS if one[:2] == number[:2]), _SYNCS_COMPACTIONS[-1])
    if number >= fixed:
        return ""
    versions = ", ".join(".".join(map(str, one)) for one in _SYNCS_COMPACTIONS)
    return (
        "in a power cut this NATS server can lose entries that it has acknowledged, as it compacts its files,"
        f" also with sync_interval: always (nats-server #8475): install {versions} or newer, then run"
        " turnkeep sessions --verify"
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _first_line(error: Exception) -> str:
    return redact((str(error).splitlines() or [type(error).__name__])[0])
