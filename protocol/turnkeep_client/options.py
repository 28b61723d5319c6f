"""Checks what the client's methods take beside the fields of requests, which `messages` checks."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Final

from .errors import InvalidMessageError

#: The type of each option's value, and its name for the error.
_KINDS: Final[dict[str, tuple[type, str]]] = {
    **dict.fromkeys(("timeout_s", "connect_timeout_s", "control_timeout_s", "before"), (Real, "a number")),
    **dict.fromkeys(("attempts", "most", "n"), (Integral, "a whole number")),
    **dict.fromkeys(("functions", "headers"), (Mapping, "a mapping")),
}


def check_options(**given: Any) -> None:
    """Raise `InvalidMessageError` unless each option is of its kind."""
    for name, value in given.items():
        kind, words = _KINDS[name]
        if not isinstance(value, kind):
            raise InvalidMessageError(f"{name} must be {words}, not {type(value).__name__}")
        texts = [text for pair in value.items() for text in pair] if isinstance(value, Mapping) else []
        if name == "headers" and not all(isinstance(text, str) for text in texts):
            raise InvalidMessageError("headers must be a mapping of str to str")
