"""Which requests a session's state allows, whatever their input. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnkeep_client.messages import Close, Open, Rewind

from .history import RefusedError

if TYPE_CHECKING:
    from turnkeep_client.messages import Request

    from .history import TokenHistory


def check_allowed(history: TokenHistory, request: Request) -> None:
    """Raise `RefusedError` if the session's state does not allow the request."""
    if isinstance(request, Open):
        if history.is_open:
            instead = "go on without an open" if request.from_ is None else "fork under another name"
            raise RefusedError(
                "invalid_request",
                f"the session is open already, at position {history.position}; {instead}",
            )
    elif history.closed:
        if not (isinstance(request, Close) and request.forget):
            raise RefusedError(
                "unknown_session", "the session was closed; an open starts a new one under this name"
            )
    elif not history.is_open and (
        isinstance(request, Rewind) or (isinstance(request, Close) and not (request.cancel or request.forget))
    ):  # what a close cancels might have begun the session; `forget` also removes refused requests
        raise RefusedError("unknown_session", "there is no such session; an append or a generate starts one")
    expected = request.expect_position
    position = history.position if history.is_open else 0
    if expected is not None and expected != position:
        raise RefusedError(
            "position_conflict", f"the session is at position {position}, not at the expected {expected}"
        )
    if isinstance(request, Rewind) and request.position > history.position:
        raise RefusedError(
            "invalid_request",
            f"cannot rewind to {request.position}: the session is at position {history.position}",
        )
