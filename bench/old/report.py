"""What every report holds, and how it reaches the disk: whole or not at all, and early enough.

Knows nothing of a particular bench: each one derives its own report from `Report`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from bench.corpus import Source  # noqa: TC001
from bench.environment import Environment  # noqa: TC001
from bench.faults import ReportError
from turnkeep_client.messages import Metrics  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Callable

#: Grows with every change that an older reader would misunderstand.
VERSION: Final = 2
CHECKPOINT_S: Final = 600.0

Setting = str | int | float | bool | None


class Check(Struct, frozen=True, kw_only=True):
    """One promise, held against what was measured; None where the run was too short to tell.

    `exact` checks count and cannot fail by chance; the others are timings.
    """

    name: str
    passed: bool | None
    detail: str
    exact: bool


class Series(Struct, frozen=True, kw_only=True):
    """One measure of a run, in the order of time: what `compare` compares."""

    unit: str
    better: Literal["lower", "higher"]
    values: tuple[float, ...]


class Report(Struct, frozen=True, kw_only=True):
    """What all reports have. Two are comparable where `schema` and `settings` are the same.

    `complete` is false while the bench runs and when it was ended early; `ending` says how it ended.
    `worker` is the worker's own account at the first measurement.
    """

    schema: str
    started_at: str
    elapsed_s: float
    complete: bool
    ending: str
    target: str
    environment: Environment
    worker: Metrics | None
    settings: dict[str, Setting]
    source: Source | None
    checks: tuple[Check, ...]
    series: dict[str, Series]


def schema_of(bench: str) -> str:
    """Name the schema of a bench's reports."""
    return f"turnkeep.bench.{bench}/{VERSION}"


def now_iso() -> str:
    """Return the time in UTC, to the second, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Recorder:
    """Writes one run's report into a folder: at the start, every ten minutes, at the end.

    The file's name holds the time of its start, so that no run overwrites another's. Without a folder
    nothing is written.
    """

    def __init__(
        self,
        folder: Path | None,
        bench: str,
        *,
        every_s: float = CHECKPOINT_S,
        clock: Callable[[], float] = time.monotonic,
        warn: Callable[[str], None],
    ) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self.path = folder / f"{bench}-{stamp}.json" if folder is not None else None
        self._every_s = every_s
        self._clock = clock
        self._warn = warn
        self._written_s = clock()

    @property
    def due(self) -> bool:
        """Say whether it is time for a checkpoint."""
        return self.path is not None and self._clock() - self._written_s >= self._every_s

    def start(self, report: Report) -> None:
        """Write the empty report, so that a folder that cannot take it is told before the run.

        Raises `ReportError`.
        """
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _refusal(self.path.parent, error) from None
            write(self.path, encode(report))

    def checkpoint(self, report: Report) -> None:
        """Write what there is so far. A disk that is full now may have room later: warns, never raises."""
        self._written_s = self._clock()
        if self.path is not None:
            try:
                write(self.path, encode(report))
            except ReportError as error:
                self._warn(f"checkpoint left out: {error}")

    def finish(self, report: Report, page: Callable[[], str | None]) -> None:
        """Write the report and, where there is one, its page beside it. Raises `ReportError`."""
        if self.path is not None:
            write(self.path, encode(report))
            if (text := page()) is not None:
                write(self.path.with_suffix(".html"), text.encode())


def encode(report: Report) -> bytes:
    """Return the report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def write(path: Path, content: bytes) -> None:
    """Replace a file durably: afterwards it is the old one or the new one. Raises `ReportError`."""
    draft = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            draft = Path(file.name)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o644)
        draft.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        if draft is not None:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        raise _refusal(path, error) from None


_R = TypeVar("_R", bound=Report)


def read(path: Path, kind: type[_R]) -> _R:
    """Read a report. Raises `ReportError` where it is none, or one of another schema version."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from None
    try:
        schema = msgspec.json.decode(content, type=_Schema).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ReportError(f"{path} is no bench report: it has no schema") from None
    if not schema.startswith("turnkeep.bench.") or not schema.endswith(f"/{VERSION}"):
        raise ReportError(
            f"{path} is of schema {schema!r}; this version reads turnkeep.bench.<name>/{VERSION}"
        )
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} is a broken report: {error}") from None


class _Schema(Struct):
    schema: str


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _refusal(path: Path, error: OSError) -> ReportError:
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
    return ReportError(f"the report cannot be written to {path}: {why}")
