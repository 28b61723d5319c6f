"""Streams an answer to the terminal: prints its text, shows why it is waiting, and handles Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Final, TypeVar

from turnkeep_client.errors import NoServerError, NoWorkerError, RequestFailedError, TurnkeepError
from turnkeep_client.messages import UNLOADED
from worker.process.installed import program

from .screen import Screen, complain, unechoed

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from turnkeep_client.client import Client
    from turnkeep_client.generation import Generation
    from turnkeep_client.session import Session

_POLL_S: Final = 0.3
#: A pause in an answer after which its state is queried; before an answer, the worker counts as missing then.
_SILENCE_S: Final = 1.5
#: How long a worker may take to reply with its state; then it counts as missing.
_PATIENCE_S: Final = 5.0
#: In a pipe, the pause between two lines about a request that waits.
_EVERY_S: Final = 5.0
#: How long the connection to NATS may be lost; then a wait for an answer fails. A server restarts in seconds.
_LOST_S: Final = 60.0

_T = TypeVar("_T")


async def while_reachable(session: Session, awaited: Awaitable[_T]) -> _T:
    """Await `awaited` and return its result.

    Cancel it and raise `NoServerError` if NATS cannot be reached for a minute.
    """
    waiting = asyncio.ensure_future(awaited)
    loop = asyncio.get_running_loop()
    reached_at = loop.time()
    try:
        while not (await asyncio.wait([waiting], timeout=_POLL_S))[0]:
            if session.connected:
                reached_at = loop.time()
            elif loop.time() - reached_at > _LOST_S:
                raise NoServerError(f"no connection to NATS for {_LOST_S:g} s")
    finally:
        if not waiting.done():
            waiting.cancel()
            await asyncio.wait([waiting])
    return await waiting


async def stream(
    client: Client,
    session: Session,
    generation: Generation,
    *,
    shown: bool = True,
    kept: bool = True,
    reasoning: str | None = None,
    screen: Screen | None = None,
) -> bool:
    """Print an answer as it arrives; return False if Ctrl-C ended the answer or the wait for it.

    `reasoning` is `show` or `hide`; None shows it on a terminal only, dimmed. Tool calls come last, one a
    line.

    Ctrl-C, SIGTERM and SIGHUP cancel the answer. If no worker runs, or at a second Ctrl-C, only the wait
    ends, and the request stays in the log. `kept` is false if the caller then closes the session. `screen`
    shows the text; without `shown` nothing is printed. Raises what the generation raises, and `NoServerError`
    if NATS stays away.
    """
    told = sys.stdout.isatty() if reasoning is None else reasoning == "show"
    screen = screen or Screen()
    return await _Stream(
        client, session, generation, screen, shown=shown, kept=kept, shows_reasoning=told
    ).run()


class _Stream:
    def __init__(
        self,
        client: Client,
        session: Session,
        generation: Generation,
        screen: Screen,
        *,
        shown: bool,
        kept: bool,
        shows_reasoning: bool,
    ) -> None:
        self._client = client
        self._session = session
        self._shows_reasoning = shows_reasoning
        self._generation = generation
        self._screen = screen
        self._shown = shown
        self._kept = kept
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._has_begun = False
        self._is_told = False  # whether a worker that is slow to reply was told to stop the answer
        self._stopping: asyncio.Task[None] | None = None

    async def run(self) -> bool:
        self._reading = asyncio.create_task(self._read())
        showing = asyncio.create_task(self._show_state())
        self._loop.add_signal_handler(signal.SIGINT, self._interrupt)
        try:
            with unechoed():
                await while_reachable(self._session, self._reading)
        except NoServerError as error:
            self._end()
            raise NoServerError(f"{error}, and the question {self._what_becomes_of_it()}") from None
        except asyncio.CancelledError:
            if self._stopping is None or not self._reading.cancelled():
                raise
            self._end()
            complain(f"not waiting any longer; the question {self._what_becomes_of_it()}")
        except TurnkeepError:
            if self._has_begun:
                self._end()
            raise
        finally:
            self._loop.remove_signal_handler(signal.SIGINT)
            asides = [task for task in (self._reading, showing, self._stopping) if task]
            for task in asides:
                task.cancel()
            await asyncio.gather(*asides, return_exceptions=True)
            self._screen.note("")
        return self._stopping is None

    def _what_becomes_of_it(self) -> str:
        """Return a phrase that says what happens to the question after the wait for its answer ended."""
        if not self._generation.seq:
            return "may be lost"
        if self._kept and self._is_told:
            return "is in the log, and the worker was told to stop its answer"
        if self._kept:
            return "is in the log and will be answered"
        if self._session.connected:
            return "will get no answer"
        closes = f"{program()} close --cancel {self._session.key.session}"
        return f"is in the log, and the next worker answers it; {closes} cancels it"

    async def _read(self) -> None:
        in_reasoning = False
        async with self._generation:  # cancels the answer if this task is cancelled
            async for chunk in self._generation:
                self._heard_at, self._has_begun = self._loop.time(), True
                if self._shown and chunk.reasoning and self._shows_reasoning:
                    in_reasoning = True
                    self._screen.write(chunk.reasoning, dim=True)
                if self._shown and chunk.text:
                    self._screen.write("\n\n" if in_reasoning else "")
                    in_reasoning = False
                    self._screen.write(chunk.text)
        if self._shown:
            result = self._generation.result
            for number, call in enumerate(result.tool_calls):
                self._screen.write("\n" if number or result.text else "")
                self._screen.write(f"{call.function.name}({call.function.arguments})")
        self._end()

    def _end(self) -> None:
        """End the answer's last line."""
        if self._shown:
            self._screen.end()

    def _interrupt(self) -> None:
        if self._stopping is None:
            self._screen.note("stopping; Ctrl-C again leaves")
            self._stopping = asyncio.create_task(self._stop())
        else:
            self._reading.cancel()

    async def _stop(self) -> None:
        """Cancel the answer. If no worker does so in time, stop waiting for the answer instead."""
        until = self._loop.time() + _PATIENCE_S
        while not self._reading.done():
            try:
                async with asyncio.timeout(_PATIENCE_S if self._session.connected else 0):
                    await self._generation.cancel()
            except RequestFailedError:  # the worker does not have the request yet, or has answered it
                await asyncio.sleep(_POLL_S)
                if self._loop.time() > until:
                    self._reading.cancel()
                    return
            except (NoWorkerError, TimeoutError) as error:
                self._is_told = isinstance(error, TimeoutError) and self._session.connected
                self._reading.cancel()
            else:
                return

    async def _show_state(self) -> None:
        """Show, while no text arrives, why the answer is waiting: for a worker, its turn or its prefill."""
        warned, told_s = "", self._loop.time()
        while True:
            await asyncio.sleep(_POLL_S)
            heard_at = self._heard_at
            if self._loop.time() - heard_at < (_SILENCE_S if self._has_begun else _POLL_S):
                continue
            state = await self._ask_state()
            if heard_at != self._heard_at or self._stopping is not None:
                continue
            if state is None and self._loop.time() - heard_at < _SILENCE_S:
                continue
            missing = await self._missing() if state is None else ""
            self._screen.note(f"{missing}; Ctrl-C leaves" if state is None else state)
            is_due = self._loop.time() - told_s >= _EVERY_S if state else missing not in ("", warned)
            if is_due and not self._screen.shows_notes:
                complain(state or missing)
                told_s = self._loop.time()
            warned = missing

    async def _missing(self) -> str:
        """Return what an answer waits for while no worker replies with its state."""
        if not self._session.connected:
            return "no connection to NATS"
        with contextlib.suppress(TurnkeepError):
            metrics = await self._client.worker_metrics()
            if metrics.device == UNLOADED and metrics.refusal:
                return metrics.refusal
        return "waiting for the worker"

    async def _ask_state(self) -> str | None:
        """Return the request's state as a text; empty if its answer has begun, None if no worker replies."""
        if not self._session.connected:
            return None
        if not self._generation.seq:  # the log has not stored it; if that lasts, `talk` says so
            return ""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                info = await self._session.info()
        except RequestFailedError as error:  # the worker does not know the session yet, or its model fails
            return error.message if error.code == "internal" else ""
        except (NoWorkerError, TimeoutError):
            return None
        progress = info.progress
        lacks_place = progress is not None and progress.cached_tokens == progress.context_tokens - 1
        if info.active != self._generation.id or progress is None or lacks_place:
            return "waiting for its turn"
        if progress.generated_tokens or self._has_begun:
            return ""
        return f"prefill: {progress.cached_tokens} of {progress.context_tokens} tokens"
