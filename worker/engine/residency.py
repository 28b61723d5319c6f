"""Records which sessions have KV on the device: the KV's tokens, its bytes, and the order of last use.

Event loop only. The device thread holds the caches; if it drops some since it lacks memory, a `Dropped` event
follows.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cache.names.policy import FULL
from cache.names.tokens import as_tokens, pack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from turnkeep_client.subjects import SessionKey

#: The fewest common tokens for which a turn copies another session's KV, or waits for its prefill.
LEAST_SHARED: Final = 32


@dataclass(frozen=True, slots=True)
class _Kv:
    tokens: Tokens
    size_bytes: int
    earliest: int
    policy: Policy


class Residency:
    """The sessions with KV on the device. A session is in use while its turn has reserved memory, else idle.

    For a session in use, the record describes the KV that its previous turn left, until its turn ends.
    """

    def __init__(self) -> None:
        self.idle_bytes = 0
        self._idle: OrderedDict[SessionKey, _Kv] = OrderedDict()  # least recently used first
        self._used: dict[SessionKey, _Kv] = {}
        # Sessions of a tenant that begin with the same `LEAST_SHARED` tokens.
        self._alike: defaultdict[tuple[str, bytes], dict[SessionKey, None]] = defaultdict(dict)

    @property
    def num_idle(self) -> int:
        """Number of sessions whose KV no turn uses."""
        return len(self._idle)

    def sessions(self) -> list[SessionKey]:
        """Return all sessions with KV: idle ones, then those in use, each least recently used first."""
        return [*self._idle, *self._used]

    def tokens(self, key: SessionKey) -> Tokens:
        """Return the tokens that a session's KV covers; empty if the session has no KV."""
        kv = self._get(key)
        return kv.tokens if kv is not None else as_tokens()

    def policy(self, key: SessionKey) -> Policy:
        """Return the cache policy of a session's KV; `FULL` if the session has no KV."""
        kv = self._get(key)
        return kv.policy if kv is not None else FULL

    def num_usable(self, key: SessionKey, num_tokens: int, policy: Policy) -> int:
        """Return `num_tokens` if a session's KV has this policy and can be trimmed to that length, else 0."""
        kv = self._get(key)
        if kv is None or kv.policy != policy or not kv.earliest <= num_tokens <= len(kv.tokens):
            return 0
        return num_tokens

    def put(
        self, key: SessionKey, tokens: Tokens, size_bytes: int, earliest: int = 0, policy: Policy = FULL
    ) -> None:
        """Record the KV of a session whose turn has ended; the session is idle now.

        The KV can be trimmed to any number of tokens that is at least `earliest`.
        """
        self.pop(key)
        self._idle[key] = _Kv(tokens, size_bytes, earliest, policy)
        self.idle_bytes += size_bytes
        if len(tokens) >= LEAST_SHARED:
            self._alike[_beginning(key.tenant, tokens)][key] = None

    def pop(self, key: SessionKey) -> bool:
        """Remove the record of a session's KV; return False if the session had none."""
        self.use(key)
        kv = self._used.pop(key, None)
        if kv is not None and len(kv.tokens) >= LEAST_SHARED:
            beginning = _beginning(key.tenant, kv.tokens)
            del self._alike[beginning][key]
            if not self._alike[beginning]:
                del self._alike[beginning]
        return kv is not None

    def use(self, key: SessionKey) -> None:
        """Record that a turn of a session has reserved memory; the session is no longer idle."""
        kv = self._idle.pop(key, None)
        if kv is not None:
            self.idle_bytes -= kv.size_bytes
            self._used[key] = kv

    def unuse(self, key: SessionKey) -> None:
        """Record that no turn of a session has memory reserved any longer.

        If the session has KV, it becomes the most recently used idle session.
        """
        kv = self._used.pop(key, None)
        if kv is not None:
            self._idle[key] = kv
            self.idle_bytes += kv.size_bytes

    def pop_oldest(self) -> SessionKey:
        """Remove the record of the least recently used idle session; raise StopIteration if there is none."""
        key = next(iter(self._idle))
        self.pop(key)
        return key

    def alike(self, tenant: str, tokens: Tokens) -> Iterable[SessionKey]:
        """List the tenant's sessions whose first `LEAST_SHARED` tokens equal those of `tokens`."""
        return self._alike.get(_beginning(tenant, tokens), ())

    def _get(self, key: SessionKey) -> _Kv | None:
        return self._idle.get(key) or self._used.get(key)


def _beginning(tenant: str, tokens: Tokens) -> tuple[str, bytes]:
    return tenant, pack(tokens[:LEAST_SHARED])
