"""Whose KV is on the device, found by session or by the tokens that it begins with. Event loop only."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from cache.names.blocks import as_tokens, pack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.names.blocks import Tokens
    from turnkeep_client.subjects import SessionKey


class Beginnings:
    """The tokens with KV of each session, in the order in which they were put in."""

    def __init__(self, num_alike: int) -> None:
        """Sessions of a tenant are alike where their first `num_alike` tokens are the same."""
        self._num_alike = num_alike
        self._tokens: dict[SessionKey, Tokens] = {}
        self._alike: defaultdict[tuple[str, bytes], dict[SessionKey, None]] = defaultdict(dict)

    def get(self, key: SessionKey) -> Tokens:
        """Return what a session has KV of; no tokens where it has none."""
        return self._tokens.get(key) or as_tokens()

    def put(self, key: SessionKey, tokens: Tokens) -> None:
        """Note what a session has KV of now."""
        self.pop(key)
        self._tokens[key] = tokens
        if len(tokens) >= self._num_alike:
            self._alike[self._beginning(key.tenant, tokens)][key] = None

    def pop(self, key: SessionKey) -> bool:
        """Forget a session; False where it had no KV."""
        tokens = self._tokens.pop(key, None)
        if tokens is not None and len(tokens) >= self._num_alike:
            beginning = self._beginning(key.tenant, tokens)
            del self._alike[beginning][key]
            if not self._alike[beginning]:
                del self._alike[beginning]
        return tokens is not None

    def alike(self, tenant: str, tokens: Tokens) -> Iterable[SessionKey]:
        """List the tenant's sessions that begin like these tokens, which are enough of them."""
        return self._alike.get(self._beginning(tenant, tokens), ())

    def _beginning(self, tenant: str, tokens: Tokens) -> tuple[str, bytes]:
        return tenant, pack(tokens[: self._num_alike])
