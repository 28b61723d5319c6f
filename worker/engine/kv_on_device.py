"""Records which sessions have KV on the device: the KV's tokens, its bytes, and the order of last use.

Event loop only. Decides nothing: KV has no time limit, and stays until its session is forgotten, or memory is
short. Then `ledger.Ledger` chooses what to drop, or the device thread, which has the caches, drops some
(`IdleKv`), and a `DroppedKv` event follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cache.names.policy import FULL
from cache.names.tokens import as_tokens

if TYPE_CHECKING:
    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from turnkeep_client.subjects import SessionKey


@dataclass(frozen=True, slots=True)
class _Kv:
    tokens: Tokens
    size_bytes: int
    earliest: int
    policy: Policy
    used: int


_NO_KV: Final = _Kv(as_tokens(), 0, 0, FULL, 0)


class KvOnDevice:
    """The sessions with KV on the device; while a session's turn runs, the KV that its previous turn left."""

    def __init__(self) -> None:
        self._kv: dict[SessionKey, _Kv] = {}  # least recently used first

    def sessions(self) -> list[SessionKey]:
        """Return all sessions with KV, least recently used first."""
        return [*self._kv]

    def size_bytes(self, key: SessionKey) -> int:
        """Return the bytes of a session's KV; 0 if the session has no KV."""
        return self._kv.get(key, _NO_KV).size_bytes

    def tokens(self, key: SessionKey) -> Tokens:
        """Return the tokens that a session's KV covers; empty if the session has no KV."""
        return self._kv.get(key, _NO_KV).tokens

    def policy(self, key: SessionKey) -> Policy:
        """Return the cache policy of a session's KV; `FULL` if the session has no KV."""
        return self._kv.get(key, _NO_KV).policy

    def used(self, key: SessionKey) -> int:
        """Return when the turn ended that has left a session's KV: see `put`."""
        return self._kv.get(key, _NO_KV).used

    def num_usable(self, key: SessionKey, num_tokens: int, policy: Policy) -> int:
        """Return `num_tokens` if a session's KV has this policy and can be trimmed to that length, else 0."""
        kv = self._kv.get(key, _NO_KV)
        is_usable = kv.policy == policy and kv.earliest <= num_tokens <= len(kv.tokens)
        return num_tokens if is_usable else 0

    def put(
        self,
        key: SessionKey,
        tokens: Tokens,
        size_bytes: int,
        earliest: int = 0,
        policy: Policy = FULL,
        used: int = 0,
    ) -> None:
        """Record the KV of a session whose turn has ended, as the most recently used.

        The KV can be trimmed to any number of tokens that is at least `earliest`. `used` is the end's time in
        the cache's index (`StoredKv.next_use`); 0 without a cache.
        """
        self.pop(key)
        self._kv[key] = _Kv(tokens, size_bytes, earliest, policy, used)

    def pop(self, key: SessionKey) -> bool:
        """Remove the record of a session's KV; return False if the session had none."""
        return self._kv.pop(key, None) is not None
