"""Configures logging: structlog to standard error, for people or as JSON lines."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TextIO

import structlog

from turnkeep_client.redact import redact
from turnkeep_client.subjects import DEFAULT_TENANT
from worker.process import launchd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from structlog.typing import EventDict, Processor

#: Lines, and fields of lines, that a terminal shows only with a `--log-level`.
_OF_A_START: Final = frozenset({"created stream", "set up consumer", "nats-server is ready"})
_CLOCKS: Final = ("%H:%M:%S.%f", "%H:%M:%S")
_DETAILS: Final = frozenset(
    {
        *("cache_policy", "caches", "kv_bits", "kv_bounded_bytes", "kv_bytes_per_token"),
        *("features", "folder", "level", "pid", "protocol"),
    }
)


class _Lenient:
    """A file for log lines, which drops a line that it cannot write: no work fails for want of its log.

    The terminal may be closed, the program at the other end of the pipe gone, or the disk full.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except BrokenPipeError:  # what is in the buffer would else fail to be written at the program's exit
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._file.fileno())
            os.close(nothing)
        except OSError:
            pass
        return 0

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


class _Repeats:
    """Drops a warning that was logged in this minute already: what is tried again often fails alike."""

    def __init__(self) -> None:
        self._logged = set[str]()
        self._minute_ends_s = 0.0

    def __call__(self, _logger: object, method: str, event: EventDict) -> EventDict:
        if method == "warning":
            if monotonic() > self._minute_ends_s:
                self._logged.clear()
                self._minute_ends_s = monotonic() + 60
            if (said := repr(event)) in self._logged:
                raise structlog.DropEvent
            self._logged.add(said)
        return event


def configure(log_format: str, log_level: str, keep: Callable[[str], object] = lambda _: None) -> None:
    """Set up logging for the process. `log_format` auto is `console` on a terminal, otherwise `json`.

    The level auto is info, on a terminal without details. `keep` gets each line too, on any thread.
    """

    def told(_logger: object, _method: str, line: Any) -> Any:
        keep(line)
        return line

    is_auto = log_level == "auto"
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    is_brief = is_auto and console and sys.stderr.isatty()
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        _Repeats(),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt=_CLOCKS[is_brief] if console else "iso", utc=not console),
    ]
    rendered: list[Processor] = (
        # No rich tracebacks: they show the values of variables.
        [
            structlog.dev.ConsoleRenderer(
                pad_event_to=16 if is_brief else 36,
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *([_brief] if is_brief else []), *rendered, _redacted, told],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()["INFO" if is_auto else log_level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(_Lenient(launchd.log_file())),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )


@contextmanager
def logs_on_stderr(level: int = logging.WARNING) -> Iterator[None]:
    """In the block, log to standard error: a command prints its result on standard output."""
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


def _brief(_logger: object, method: str, event: EventDict) -> EventDict:
    """Drop what matters only to programs or for debugging, and write an answer in a short line."""
    if method != "info":
        return event
    if event["event"] in _OF_A_START:
        raise structlog.DropEvent
    event = {name: value for name, value in event.items() if name not in _DETAILS}
    return _short(event) if event["event"] == "answered" else event


def _short(event: EventDict) -> EventDict:
    session = str(event.get("session", "")).removeprefix(f"{DEFAULT_TENANT}/")
    what = f"{event['tokens']} tokens" if "tokens" in event else event["type"]
    outcome = "" if event["outcome"] == "ok" else f", {event['outcome']}"
    said = f"answered {session}: {what} in {event['seconds']} s{outcome}"
    return {"event": said} | {name: event[name] for name in ("timestamp", "model") if name in event}


def _redacted(_logger: object, _method: str, line: Any) -> str:
    """Remove credentials from a line, since texts of exceptions may contain them."""
    return redact(line)
