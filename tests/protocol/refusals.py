"""Reads what workers refuse from `refusals.toml`: each row is for the decoders and for a worker."""

import tomllib
from pathlib import Path
from typing import Any, Final

_TABLE: Final[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "refusals.toml").read_text())
#: No valid names of requests, sessions and tenants.
NAMES: Final = tuple(name.replace("x{65}", "x" * 65) for name in _TABLE["names"])


def _row(body: str, says: str, piece: str = "", times: int = 1) -> tuple[bytes, str]:
    return body.replace("@", piece * times).encode("latin-1"), says


def refused(kind: str) -> list[tuple[bytes, str]]:
    """Return bodies that are refused on a kind of subject, each with what the refusal says."""
    return [_row(*row) for row in _TABLE[kind]]
