"""Starts the export of OpenTelemetry spans. Imports OpenTelemetry only if a collector is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from turnkeep_client.errors import TurnkeepError
from worker.process.installed import as_installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .otlp import Traces

log = structlog.get_logger()

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_LACKS: Final = "OpenTelemetry's SDK is missing; pip install 'turnkeep[traces]' brings it"


class TracesError(TurnkeepError):
    """`otlp_endpoint` is given, but OpenTelemetry's SDK is missing; the message says how to install it."""


def start_traces(endpoint: str | None, environ: Mapping[str, str], **attributes: str) -> Traces | None:
    """Start the export of spans.

    Returns None if neither `endpoint` nor OpenTelemetry's environment variables name a collector, or only
    these do and the extra is not installed, which is logged. `attributes` describe the worker. Raises
    `TracesError` if `endpoint` is given but the extra is not installed.
    """
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_off = is_off or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None and (is_off or not any(environ.get(name) for name in _ENDPOINTS)):
        return None
    try:
        from .otlp import Traces
    except ImportError:
        if endpoint is not None:
            raise TracesError(f"otlp_endpoint: {_LACKS}") from None
        # The environment may be meant for other programs.
        log.warning("no spans are made", why=as_installed(_LACKS))
        return None
    return Traces(endpoint, attributes)
