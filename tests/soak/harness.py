"""Shared by the programs in this folder: a worker process, a listening connection, and the oracle.

The oracle (`judge`) reads the log directly, and compares it with what clients have sent and received. Which
tokens a fork or a turn begins with, `tests/simulation/checks.py` watches.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "protocol"), str(ROOT / "tests")]

from worker.models.blas import preload  # noqa: E402

preload()  # as a worker does, before anything imports MLX

import anyio  # noqa: E402
import msgspec  # noqa: E402
import nats.errors  # noqa: E402
import psutil  # noqa: E402
from parts import WorkerProcess, free_port, make_endless_model, make_tiny_model  # noqa: E402

from turnkeep_client.checkpoints import CheckpointMessage, Link  # noqa: E402
from turnkeep_client.client import connect  # noqa: E402
from turnkeep_client.errors import InvalidMessageError, TurnkeepError  # noqa: E402
from turnkeep_client.log import MODEL_HEADER, PARTS_HEADER  # noqa: E402
from turnkeep_client.messages import (  # noqa: E402
    Asked,
    Close,
    Closed,
    Failed,
    Generated,
    Opened,
    decode_asked,
    decode_chunk,
    decode_linked,
    decode_request,
    decode_result,
)
from turnkeep_client.nats_client import Nats  # noqa: E402
from turnkeep_client.session_log import decoded  # noqa: E402
from turnkeep_client.stream import LogStream  # noqa: E402
from turnkeep_client.subjects import SessionKey, Subjects  # noqa: E402
from worker.models.tokenizer import Tokenizer  # noqa: E402
from worker.process.constants import CONSTANTS  # noqa: E402
from worker.sessions.attachments import Checkpoint  # noqa: E402
from worker.sessions.fold import Fold  # noqa: E402
from worker.sessions.history import TokenHistory  # noqa: E402
from worker.sessions.record import Record, ResultParts  # noqa: E402
from worker.wire.connection import confirm_subscriptions  # noqa: E402
from worker.wire.consistent_reads import StoredMessage  # noqa: E402

SUBJECTS = Subjects()
#: Enough time for any answer on a busy machine. A request that takes longer counts as unanswered.
PATIENCE_S = 120.0
#: How the message of a request that three crashes ended goes on.
GIVEN_UP = f"({CONSTANTS.max_attempts} attempts)"


@asynccontextmanager
async def folder() -> AsyncIterator[Path]:
    """Yield a temporary folder for one run. It is kept if the run fails, and removed otherwise.

    SIGTERM ends the run, and so its workers, with code 143.
    """
    with anyio.CancelScope() as run:  # it cancels again where nats-py swallows a cancel
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, run.cancel)
        path = Path(tempfile.mkdtemp(prefix="turnkeep-soak-"))
        try:
            yield path
        except BaseException:
            print(f"what is left of the run is in {path}", file=sys.stderr)
            raise
        shutil.rmtree(path)
    if run.cancelled_caught:
        sys.exit(128 + signal.SIGTERM)


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser for a program's command line, with the module's docstring `about` as its help."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)


def size_bytes(where: Path) -> int:
    """Return the size of all files in a folder in which a worker runs."""
    num_bytes = 0
    for path in where.rglob("*"):
        with contextlib.suppress(OSError):
            num_bytes += path.stat().st_size
    return num_bytes


def tiny_model(where: Path, **changes: int) -> Path:
    """Make in a folder a tiny model that never ends an answer; return the model's folder."""
    return make_endless_model(make_tiny_model(where / "tiny", **changes), where / "endless")


class Target:
    """A worker process with its own NATS server, into which the programs inject faults."""

    def __init__(self, data_dir: Path, model: Path | None, *options: str) -> None:
        self.process = WorkerProcess(data_dir, model, free_port(), "--log-level", "info", *options)
        self._log_start = 0

    @property
    def url(self) -> str:
        return self.process.url

    def start(self) -> None:
        self._forget_log()
        self.process.start()

    def kill_worker(self) -> None:
        """`kill -9` only the worker; `turnkeep serve` starts it again."""
        pid = self.process.worker_pid
        self._forget_log()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _forget_log(self) -> None:
        log = self.process.log_path
        self._log_start = log.stat().st_size if log.exists() else 0

    @property
    def is_ready(self) -> bool:
        with self.process.log_path.open("rb") as log:
            log.seek(self._log_start)
            return b'"event": "ready"' in log.read()

    async def ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the worker logs that it is ready. Raises `RuntimeError` if the worker ends first."""
        async with asyncio.timeout(timeout_s):
            while not self.is_ready:
                if not self.process.running:
                    raise RuntimeError(f"the worker ended by itself:\n{self.process.log[-4000:]}")
                await asyncio.sleep(0.02)

    def server(self) -> psutil.Process | None:
        """Find the worker's NATS server by the pid in the worker's directory; None if it is not running."""
        with contextlib.suppress(OSError, ValueError, LookupError, psutil.Error):
            process = psutil.Process(self.process.server_pid)
            if str(self.process.data_dir) in " ".join(process.cmdline()):
                return process
        return None

    def kill_server(self) -> bool:
        """`kill -9` the NATS server; False if none is running."""
        server = self.server()
        with contextlib.suppress(psutil.Error):
            if server is not None:
                server.kill()
                return True
        return False

    def stop(self) -> None:
        """Stop the worker, and kill its NATS server; either may have ended already."""
        if self.process.running:
            self.process.stop()
        self.kill_server()


@dataclass
class Heard:
    """A connection that publishes requests and records what it receives.

    Results are recorded by session and request sequence, chunks by session and request id.
    """

    nc: Nats = field(default_factory=Nats)
    results: dict[tuple[SessionKey, int], list[bytes]] = field(default_factory=lambda: defaultdict(list))
    chunks: dict[tuple[SessionKey, str], list[Any]] = field(default_factory=lambda: defaultdict(list))
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    async def on(cls, url: str) -> Heard:
        """Connect, and subscribe to all results and chunks. Raises `TimeoutError`."""
        heard = cls()
        async with asyncio.timeout(PATIENCE_S):
            await heard.nc.connect(
                url.split(","), max_reconnect_attempts=-1, reconnect_time_wait=0.1, error_cb=heard._expected
            )
        await heard.nc.subscribe(SUBJECTS.every("out"), cb=heard._result)
        await heard.nc.subscribe(SUBJECTS.every_token(), cb=heard._chunk)
        await confirm_subscriptions(heard.nc)
        return heard

    async def _expected(self, error: Exception) -> None:
        """Ignore connection errors, since the server is killed on purpose."""

    async def _result(self, message: Any) -> None:
        with contextlib.suppress(InvalidMessageError):
            key, _, _ = SUBJECTS.parse(message.subject)
            self.results[key, decode_result(message.data).seq or 0].append(message.data)
            self._news.set()

    async def _chunk(self, message: Any) -> None:
        with contextlib.suppress(InvalidMessageError):
            key, _, request_id = SUBJECTS.parse(message.subject)
            if message.data:
                self.chunks[key, request_id or ""].append(decode_chunk(message.data))

    async def publish(self, key: SessionKey, body: bytes, timeout_s: float = 2.0) -> int:
        """Publish a request, repeatedly until the log acknowledges it; return its stream sequence."""
        while True:
            try:
                js = self.nc.jetstream()
                return (await js.publish(SUBJECTS.of(key, "in"), body, timeout=timeout_s)).seq
            except (nats.errors.Error, OSError):
                await asyncio.sleep(0.1)

    async def result(self, key: SessionKey, seq: int, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for the result of the request at `seq`, and return it. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while (key, seq) not in self.results:
                self._news.clear()
                await self._news.wait()
        found: dict[str, Any] = json.loads(self.results[key, seq][0])
        return found

    async def send(self, key: SessionKey, request: dict[str, Any]) -> dict[str, Any]:
        """Publish a request, and return its result."""
        seq = await self.publish(key, json.dumps(request).encode(), timeout_s=PATIENCE_S)
        return await self.result(key, seq)


async def read_log(url: str) -> list[Any]:
    """Read all entries of the log; try again for 10 s or more while the server is down."""
    for left in itertools.count(20, -1):
        try:
            async with connect(url, connect_timeout_s=10) as client:
                log = LogStream(client._wire)
                return [one async for one in log._all(SUBJECTS.log_stream, "turnkeep.>")]
        except TurnkeepError:
            if not left:
                raise
            await asyncio.sleep(0.5)
    raise AssertionError


@dataclass
class Verdict:
    """What the oracle has found. All counts in `faults` should be 0; `notes` has a line for each fault."""

    requests: int = 0
    answered: int = 0
    faults: Counter[str] = field(
        default_factory=lambda: Counter(
            dict.fromkeys(("lost", "doubled", "contradicting", "unanswered", "internal"), 0)
        )
    )
    outcomes: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def blame(self, what: str, note: str) -> None:
        self.faults[what] += 1
        self.notes.append(f"{what}: {note}")


def judge(
    stored: Iterable[Any],
    acked: dict[int, tuple[SessionKey, bytes]] | None = None,
    heard: Heard | None = None,
    model: Path | None = None,
) -> Verdict:
    """Compare the log with acknowledged requests and received messages; fold each session as a worker does.

    Skips `out` entries without a worker's header, which the harness has forged.
    """
    verdict = Verdict()
    asked: dict[SessionKey, dict[int, StoredMessage]] = defaultdict(dict)
    told: dict[SessionKey, list[StoredMessage]] = defaultdict(list)
    checkpoints: dict[int, bytes] = {}
    for one in stored:
        try:
            key, kind, _ = SUBJECTS.parse(one.headers["Nats-Subject"])
        except InvalidMessageError:
            continue
        if kind == "in":
            asked[key][one.seq] = _entry(one)
        elif kind == "out" and MODEL_HEADER in one.headers:
            told[key].append(_entry(one))
        elif kind == "checkpoint":
            checkpoints[one.seq] = one.body
    linked = {entry.seq: _asked(entry, checkpoints) for entries in told.values() for entry in entries}
    for key, entries in told.items():
        _add_answered(verdict, key, asked[key], entries, linked)
    queues = {key: [entries[seq] for seq in sorted(entries)] for key, entries in asked.items()}
    forgotten = {key: _forgotten(queue, told[key]) for key, queue in queues.items()}
    for seq, (key, body) in (acked or {}).items():
        request = asked[key].get(seq)
        if (request is None or not _is_same(request.body, body)) and seq >= forgotten.get(key, 0):
            verdict.blame("lost", f"{key} {seq} was acknowledged")
    tokenizer = Tokenizer.from_folder(model) if model else None
    fold = Fold(tokenizer) if tokenizer else None
    for key, before in forgotten.items():
        _judge_session(verdict, key, queues[key], told[key], heard, before)
        if fold is not None and tokenizer is not None:
            values = {entry.seq: _value(entry, checkpoints, tokenizer) for entry in told[key]}
            record = Record(fold)
            for entry in told[key]:
                record.add_result(entry, ResultParts(values[entry.seq], linked[entry.seq]))
            record.end_fold()
            if record.diverged or record.num_foreign:
                verdict.blame(
                    "contradicting", f"{key} folds to {record.diverged}, {record.num_foreign} foreign"
                )
    return verdict


def _add_answered(
    verdict: Verdict,
    key: SessionKey,
    asked: dict[int, StoredMessage],
    told: Iterable[StoredMessage],
    linked: Mapping[int, Asked | None],
) -> None:
    """Add to the queue's requests those that have left it, as their results have them; compare the others."""
    for entry in told:
        seq, whole = decode_result(entry.body).seq or 0, linked[entry.seq]
        if whole is None or whole.request is msgspec.UNSET:
            continue
        body = bytes(whole.request)
        if seq not in asked:
            asked[seq] = StoredMessage(seq, whole.stored, body, whole.headers)
        elif not _is_same(asked[seq].body, body):
            verdict.blame("contradicting", f"{key} {entry.seq} has another request: {body[:200]!r}")


def _is_same(one: bytes, other: bytes) -> bool:
    """Whether two bodies are the same request; a result has a `close` in other bytes than were sent."""
    return one == other or decoded(decode_request, one) == decoded(decode_request, other) is not None


def _asked(entry: StoredMessage, checkpoints: Mapping[int, bytes]) -> Asked | None:
    """Return the request that a result has, as a whole; None if it has none, or the log has lost it."""
    asked = decode_asked(entry.body)
    return decode_linked(_linked(asked.link, checkpoints)) if asked and asked.link else asked


def _value(
    entry: StoredMessage, checkpoints: Mapping[int, bytes], tokenizer: Tokenizer
) -> TokenHistory | str | None:
    """Return what is stored besides a result: the state that a fork has copied, or a long input."""
    packed = _linked(entry.headers.get(PARTS_HEADER, ""), checkpoints)
    if packed is None:
        return None
    if not isinstance(decode_result(entry.body), Opened):
        return packed.decode()
    found = Checkpoint.unpack([packed], tokenizer)
    return found.history if found else None


def _linked(text: str, checkpoints: Mapping[int, bytes]) -> bytes | None:
    """Read a chain of checkpoints; None if there is none, or a part of it is gone or changed."""
    parts: list[bytes] = []
    link = Link.parse(text)
    while link is not None:
        message = CheckpointMessage.unpack(checkpoints.get(link.seq, b""), link)
        if message is None:
            return None
        parts.append(message.part)
        link = Link.parse(message.before)
    return b"".join(reversed(parts)) if parts else None


def _entry(one: Any) -> StoredMessage:
    from datetime import datetime

    return StoredMessage(
        one.seq, datetime.fromisoformat(one.headers["Nats-Time-Stamp"]), one.body, one.headers
    )


def _forgotten(asked: list[StoredMessage], told: list[StoredMessage]) -> int:
    """Return the sequence of the last successful close with `forget`: earlier entries may be gone. Or 0."""
    closed = {result.seq for result in map(decode_result, (one.body for one in told)) if _is(Closed, result)}
    for entry in reversed(asked):
        with contextlib.suppress(InvalidMessageError):
            request = decode_request(entry.body)
            if isinstance(request, Close) and request.forget and entry.seq in closed:
                return entry.seq
    return 0


def _is(kind: type, result: Any) -> bool:
    return isinstance(result, kind) and result.repeat_of is None


def _judge_session(
    verdict: Verdict,
    key: SessionKey,
    asked: list[StoredMessage],
    told: list[StoredMessage],
    heard: Heard | None,
    forgotten: int,
) -> None:
    asked = [entry for entry in asked if entry.seq >= forgotten]  # what is before it is being removed
    results: dict[int, list[StoredMessage]] = defaultdict(list)
    for entry in told:
        if (seq := decode_result(entry.body).seq or 0) >= forgotten:
            results[seq].append(entry)
    verdict.requests += len(asked)
    for seq in results.keys() - {entry.seq for entry in asked}:
        first_result = decode_result(results[seq][0].body)
        if isinstance(first_result, Failed) and first_result.code == "invalid_request":
            continue  # such a result does not have its request, which has left the queue
        verdict.blame("contradicting", f"{key} has a result for {seq}, which is no request of it")
    first: dict[str, tuple[Any, Any]] = {}
    for entry in asked:
        mine = results.get(entry.seq, [])
        if not mine:
            verdict.blame("unanswered", f"{key} {entry.seq}: {entry.body[:200]!r}")
            continue
        if len(mine) > 1:
            verdict.blame("doubled", f"{key} {entry.seq} at {[one.seq for one in mine]}")
        verdict.answered += 1
        result = decode_result(mine[0].body)
        code = result.code if isinstance(result, Failed) else "ok"
        verdict.outcomes[code] += 1
        if isinstance(result, Failed) and code == "internal" and GIVEN_UP not in result.message:
            verdict.blame("internal", f"{key} {entry.seq}: {mine[0].body[:300]!r}")
        if code == "history_diverged":
            verdict.blame("contradicting", f"{key} {entry.seq}: {mine[0].body[:300]!r}")
        if heard is not None:
            for body in heard.results.get((key, entry.seq), ()):
                if body != mine[0].body:
                    verdict.blame("contradicting", f"{key} {entry.seq} was heard otherwise: {body[:200]!r}")
        try:
            request = decode_request(entry.body)
        except InvalidMessageError:
            if code != "invalid_request":
                verdict.blame("contradicting", f"{key} {entry.seq} is no request, and was answered {code}")
            continue
        if result.repeat_of and result.repeat_of < forgotten:
            continue  # its first result was removed since
        if request.id in first:
            _judge_repeat(verdict, f"{key} {entry.seq}", first[request.id], request, result)
        else:
            first[request.id] = request, result
            if heard is not None:
                _judge_chunks(verdict, f"{key} {entry.seq}", result, heard.chunks[key, request.id], forgotten)


def _judge_repeat(verdict: Verdict, at: str, first: tuple[Any, Any], request: Any, result: Any) -> None:
    if request != first[0]:
        if not (isinstance(result, Failed) and result.code == "id_conflict"):
            verdict.blame("contradicting", f"{at} has the id of another request, and was answered {result}")
    elif msgspec.structs.replace(result, seq=first[1].seq, repeat_of=first[1].repeat_of) != first[1]:
        verdict.blame("contradicting", f"{at} repeats {first[1]}, and was answered {result}")


def _judge_chunks(verdict: Verdict, at: str, result: Any, chunks: list[Any], forgotten: int) -> None:
    tokens = result.tokens if isinstance(result, Generated) else ()
    for chunk in chunks:
        if chunk.seq < forgotten:
            continue
        if chunk.seq != result.seq:
            verdict.blame("contradicting", f"{at} has a chunk of {chunk.seq}")
        if tuple(chunk.tokens) != tuple(tokens[chunk.i : chunk.i + len(chunk.tokens)]):
            verdict.blame("contradicting", f"{at} streamed {chunk}, and its record has {tokens}")


def table(*rows: tuple[str, Any]) -> str:
    """Format rows of a name and a value in two aligned columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def report(verdict: Verdict, *rows: tuple[str, Any]) -> bool:
    """Print the rows, the verdict's counts and up to 40 faults; return whether there was no fault."""
    print(
        table(
            *rows,
            ("requests in the log", verdict.requests),
            ("answered", verdict.answered),
            ("outcomes", ", ".join(f"{code} {num}" for code, num in verdict.outcomes.most_common())),
            *verdict.faults.items(),
        ),
        flush=True,
    )
    for note in verdict.notes[:40]:
        print(note)
    return not verdict.faults.total()
