"""Defines what the event loop knows of a session's KV on the device, while its next turn runs too.

KV has no time limit, and stays until its session is forgotten, or memory is short. Then `ledger.Ledger`
chooses what to drop, or the device thread, which has the caches, drops some (`IdleKv`), and a `DroppedKv`
event follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cache.names.policy import FULL
from cache.names.tokens import as_tokens

if TYPE_CHECKING:
    from cache.names.policy import Policy
    from cache.names.tokens import Tokens


@dataclass(frozen=True, slots=True)
class KvOnDevice:
    """The KV on the device that a session's last turn has left."""

    #: The tokens that it covers.
    tokens: Tokens
    size_bytes: int
    #: It can be trimmed to any number of tokens that is at least this.
    earliest: int = 0
    policy: Policy = FULL
    #: When the turn ended, as a time in the cache's index (`StoredKv.next_use`); 0 without a cache.
    used: int = 0

    def num_usable(self, num_tokens: int, policy: Policy) -> int:
        """Return `num_tokens` if the KV has this policy and can be trimmed to that length, else 0."""
        is_usable = self.policy == policy and self.earliest <= num_tokens <= len(self.tokens)
        return num_tokens if is_usable else 0


#: Stands for the KV of a session that has none.
NO_KV: Final = KvOnDevice(as_tokens(), 0)
