"""`turnkeep replay`: sends recorded sessions again, in their order, and compares the answers with the record.

If a recorded request was sent after the previous answer, the replay waits for that answer too, and then for
the recorded pause. Other requests are sent without waiting for answers. So a slower worker gets the same
conversation later, not a burst of requests. Only entries of the log are compared and timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from turnkeep_client.errors import RequestFailedError, ResultTimeoutError, TurnkeepError
from turnkeep_client.messages import Close, Generated
from turnkeep_client.session import build
from turnkeep_client.session_log import read
from turnkeep_client.subjects import SessionKey

from .differences import Difference, first_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from turnkeep_client.calls import Call
    from turnkeep_client.client import Client
    from turnkeep_client.session_log import Exchange

    from .record import Recording

#: Most sessions at a time in a replay without pauses.
_AT_ONCE: Final = 256
#: How long to wait for the result of a session's close; the close is carried out in any case.
_CLOSE_S: Final = 30.0
#: How long to wait until a mirror of the log has the last result.
_LAG_S: Final = 10.0


class ReplayError(TurnkeepError):
    """A replay is not possible; the message says why."""


class ReplayTimes(Struct, frozen=True, kw_only=True):
    """The times of all requests of a record or a replay, in seconds."""

    #: Median and 99th percentile of the time from a request to its result.
    turnaround: tuple[float, float]
    #: Median and 99th percentile of the time to an answer's first token.
    first_token: tuple[float, float]
    #: From the first request to the last result.
    total: float


class ReplayReport(Struct, frozen=True, kw_only=True):
    """The result of a replay."""

    tenant: str
    sessions: int
    requests: int
    #: The recorded answers' tokens.
    tokens: int
    #: The recorded requests that were not replayed, by reason.
    left_out: dict[str, int]
    #: Whether no session differs.
    same: bool
    #: The requests behind a session's first difference.
    not_compared: int
    #: The first difference of each session that differs.
    differences: tuple[Difference, ...]
    recorded: ReplayTimes
    #: None if no replayed request has a result.
    replayed: ReplayTimes | None


@dataclass(slots=True)
class _Played:
    """One session's replay: exchanges by request id, and the errors of requests without a result."""

    name: str
    recorded: Sequence[Exchange]
    answers: dict[str, Exchange] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


class Replay:
    """Sends the requests of a record again, `speed` times as fast. Event loop only."""

    def __init__(
        self,
        client: Client,
        record: Recording,
        *,
        speed: float,
        timeout_s: float,
        keep: bool,
        rename: Callable[[str], str],
        progress: Callable[[int, int, str], None],
        images: Mapping[str, Mapping[str, bytes]] = MappingProxyType({}),
    ) -> None:
        """Unless `keep`, replayed sessions are closed and forgotten. An infinite `speed` omits all pauses.

        `rename` gives a recorded session's replay its name; `timeout_s` limits the wait for each result.
        `progress` is called with the numbers of results and of requests, and a word. `images` has the entries
        of recorded sessions' images by digest, by the session's name.
        """
        self._client, self._record, self._speed = client, record, speed
        self._timeout_s, self._keep, self._rename = timeout_s, keep, rename
        self._progress, self._num_done, self._images = progress, 0, images
        self._places = asyncio.Semaphore(_AT_ONCE if speed == math.inf else len(record.sessions))

    async def run(self) -> ReplayReport:
        """Replay all sessions; return the comparison with the record.

        Raises `ReplayError` if there is nothing to replay, `NoWorkerError` if no worker answers.
        """
        if not self._record.sessions:
            left_out = ", ".join(f"{num} {why}" for why, num in self._record.left_out.items())
            raise ReplayError(
                "there is nothing to replay: "
                + (
                    f"all requests are left out ({left_out})"
                    if left_out
                    else "the log holds no such session with answered requests"
                )
            )
        with contextlib.suppress(RequestFailedError):  # expected: there is no such session
            await self._client.session("any").info()
        self._began_s = self._now_s()
        played = [_Played(name, some) for name, some in self._record.sessions.items()]
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in played:
                    tasks.create_task(self._session(one))
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None
        return self._report(played)

    async def _session(self, played: _Played) -> None:
        key = SessionKey(self._client.tenant, self._rename(played.name))
        async with self._places:
            closing = None
            try:
                for digest, body in self._images.get(played.name, {}).items():
                    await self._client.stored.put_image_entry(key, digest, body)
                await self._play(key, played)
                played.answers = await self._answers(key, played)
            finally:  # also if interrupted, but then without waiting for the result
                if not self._keep:
                    close = build(Close, forget=True, cancel=True)
                    closing = await self._client.submit(key, close, timeout_s=_CLOSE_S)
            if closing is not None:
                with contextlib.suppress(ResultTimeoutError):
                    await closing

    async def _play(self, key: SessionKey, played: _Played) -> None:
        """Send the requests of one session, and wait for their results."""
        waiting: list[Call] = []
        then, then_s = self._record.begin, self._began_s  # the event before a request: recorded, replayed
        for before, one in zip((None, *played.recorded), played.recorded, strict=False):
            if before is not None and one.asked.seq > before.answered.seq:  # may depend on that answer
                await self._results(waiting, played)
                then, then_s = before.answered.first_stored, self._now_s()
            due_s = then_s + (one.asked.stored - then).total_seconds() / self._speed
            await asyncio.sleep(max(0.0, due_s - self._now_s()))
            then, then_s = one.asked.stored, self._now_s()
            waiting.append(await self._client.submit(key, one.request, timeout_s=self._timeout_s))
        await self._results(waiting, played)

    async def _results(self, waiting: list[Call], played: _Played) -> None:
        while waiting:
            call = waiting.pop(0)
            try:
                await call
            except ResultTimeoutError:
                played.faults[call.id] = f"no result within {self._timeout_s:g} s"
            self._num_done += 1
            self._progress(self._num_done, self._record.num_requests, "replaying")

    async def _answers(self, key: SessionKey, played: _Played) -> dict[str, Exchange]:
        """Read the replay's results from the log.

        A tenant's log may be a mirror that lags behind: waits for missing results, up to `_LAG_S`.
        """
        deadline_s = self._now_s() + _LAG_S
        while True:
            found = {one.request.id: one for one in (await read(self._client.stored, key)).exchanges}
            if len(found) + len(played.faults) >= len(played.recorded) or self._now_s() > deadline_s:
                return found
            await asyncio.sleep(0.1)

    def _report(self, played: Sequence[_Played]) -> ReplayReport:
        differences, num_apart = [], 0
        for one in played:
            found = first_difference(one.name, one.recorded, one.answers, one.faults)
            if found is not None:
                differences.append((one.recorded[found.number - 1].asked.seq, found))
                num_apart += len(one.recorded) - found.number
        recorded = [exchange for one in played for exchange in one.recorded]
        replayed = [exchange for one in played for exchange in one.answers.values()]
        return ReplayReport(
            tenant=self._client.tenant,
            sessions=len(played),
            requests=len(recorded),
            tokens=sum(len(one.result.tokens) for one in recorded if isinstance(one.result, Generated)),
            left_out=self._record.left_out,
            same=not differences,
            not_compared=num_apart,
            differences=tuple(found for _, found in sorted(differences, key=lambda pair: pair[0])),
            recorded=_times(recorded),
            replayed=_times(replayed) if replayed else None,
        )

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def _times(exchanges: Sequence[Exchange]) -> ReplayTimes:
    results = [one.result for one in exchanges]
    first = [result.seconds.first_token for result in results if isinstance(result, Generated)]
    begin = min(one.asked.stored for one in exchanges)
    end = max(one.answered.first_stored for one in exchanges)
    return ReplayTimes(
        turnaround=_typical([one.took_s for one in exchanges]),
        first_token=_typical(first),
        total=(end - begin).total_seconds(),
    )


def _typical(values_s: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile; zeros without values."""
    ordered = sorted(values_s) or [0.0]
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
