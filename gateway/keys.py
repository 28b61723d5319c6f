"""API keys and their tenants, from a file."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from turnkeep_client.errors import InvalidMessageError, TurnkeepError
from turnkeep_client.subjects import DEFAULT_TENANT, check_id

from .turn import Fault

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Keys:
    """Which tenant a key belongs to. Without keys, every request is of the default tenant."""

    def __init__(self, tenants: Mapping[bytes, str] | None = None) -> None:
        """`tenants` are by the SHA-256 of their keys, so that a look-up says nothing of them by its time."""
        self._tenants = tenants

    @classmethod
    def read(cls, path: Path) -> Keys:
        """Read a file with a key and a tenant in each line. Raises `TurnkeepError`."""
        found: dict[bytes, str] = {}
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TurnkeepError(f"the keys cannot be read from {path}: {error}") from None
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 2:
                raise TurnkeepError(f"{path}, line {number}: it must be a key and a tenant")
            try:
                found[_digest(words[0])] = check_id("tenant", words[1])
            except InvalidMessageError as error:
                raise TurnkeepError(f"{path}, line {number}: {error}") from None
        if not found:
            raise TurnkeepError(f"{path} has no keys: nobody could ask anything")
        return cls(found)

    def tenant_of(self, headers: Mapping[str, str]) -> str:
        """Return the tenant of a request. Raises `Fault`."""
        if self._tenants is None:
            return DEFAULT_TENANT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if (tenant := self._tenants.get(_digest(key))) is None:
            message = "the API key (Authorization: Bearer KEY, or x-api-key: KEY) is missing or unknown"
            raise Fault(401, message, code="invalid_api_key")
        return tenant


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
