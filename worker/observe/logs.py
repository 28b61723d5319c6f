"""Configures logging: structlog to standard error, for people or as JSON lines."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

from turnkeep_client.redact import redact

if TYPE_CHECKING:
    from structlog.typing import Processor


def configure(log_format: str, log_level: str) -> None:
    """Set up logging for the process. `auto` is `console` on a terminal, else `json`."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if console else "iso", utc=not console),
    ]
    rendered: list[Processor] = (
        # No rich tracebacks: they show the values of variables.
        [
            structlog.dev.ConsoleRenderer(
                pad_event_to=36,
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*shared, *rendered, _redacted],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[log_level.upper()]
        ),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _redacted(_logger: object, _method: str, line: Any) -> str:
    """Remove credentials from a line: texts of exceptions may contain them."""
    return redact(line)
