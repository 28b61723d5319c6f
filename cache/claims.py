"""What a snapshot file says of itself in its header: for lists and for sorting out, never for use.

Reads files of any format version that keeps its metadata where version 1 has it. Proves nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .identity import FORMAT_VERSION
from .snapshot import DoubtfulSnapshotError

if TYPE_CHECKING:
    from pathlib import Path

_MAX_HEADER_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Claim:
    """Of a header: the format's version, the identity's digest as hex, and the identity's fields."""

    version: str
    identity: str
    model: dict[str, Any]

    @property
    def is_foreign(self) -> bool:
        """Whether another version of Turnkeep wrote the file: it is left alone."""
        return self.version != str(FORMAT_VERSION)


def read_claim(path: Path) -> Claim:
    """Read a file's claim. Raises `DoubtfulSnapshotError` where it is no file of Turnkeep's, `OSError`."""
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise DoubtfulSnapshotError("shorter than its header, or an absurd header length")
        header = file.read(length)
    try:
        metadata = json.loads(header)["__metadata__"]
        if metadata["format"] != "turnkeep":
            raise DoubtfulSnapshotError("not a snapshot of Turnkeep's")
        version, identity = str(metadata["version"]), str(metadata.get("identity", ""))
        model = json.loads(metadata.get("model", "{}"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DoubtfulSnapshotError(f"unreadable header: {type(error).__name__}") from error
    return Claim(version, identity, model if isinstance(model, dict) else {})
