"""The size of a session's KV on the device, as a function of its number of tokens. Pure.

A layer keeps KV of all tokens, of the tokens in a window or chunk, or one state of a fixed size.
`layers.sizes` measures a model's layers; admission, the estimate of a step and reports use the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cache.names.policy import SLACK

if TYPE_CHECKING:
    from cache.names.policy import Policy


@dataclass(frozen=True, slots=True)
class Window:
    """Layers that keep at most `num_tokens` tokens; together they take `bytes_per_token` for each token."""

    num_tokens: int
    bytes_per_token: int
    is_ring: bool = False
    #: How many of a ring's `num_tokens` no later token sees: the piece of a prompt that is being prefilled,
    #: chunks that are being read from SSD, and the beginning of a block that is longer than the window.
    spare: int = SLACK
    #: Whether attention is chunked.
    is_chunk: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether snapshots store the layers' tokens by block, not as one state."""
        return self.is_ring or self.is_chunk


@dataclass(frozen=True, slots=True)
class KvSize:
    """Bytes of a model's KV, over all layers."""

    #: Of the layers that keep every token.
    bytes_per_token: int
    windows: tuple[Window, ...] = ()
    #: Of the states of layers that keep no tokens.
    fixed_bytes: int = 0
    #: Of the sketches (2-bit copies of keys) of one token, under a policy with `recall`.
    sketch_bytes: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether all layers keep every token's KV, so that a session can be shortened to any length."""
        return not self.windows and not self.fixed_bytes

    @property
    def bounded_bytes(self) -> int:
        """The most bytes that windows and states take, however long a session becomes."""
        return self.fixed_bytes + sum(one.num_tokens * one.bytes_per_token for one in self.windows)

    def under(self, policy: Policy) -> KvSize:
        """Return the KV size of the same model for sessions with this policy."""
        if policy.most_tokens is None or not self.bytes_per_token:
            return self
        spare = policy.spare
        ring = Window(policy.most_tokens + spare, self.bytes_per_token, is_ring=True, spare=spare)
        return KvSize(self.sketch_bytes if policy.recall else 0, (*self.windows, ring), self.fixed_bytes)

    def held(self, num_tokens: int, *, ahead: int = 0) -> int:
        """Return the KV bytes of a session of `num_tokens` tokens, if windows keep `ahead` extra tokens.

        Rings take no extra tokens, since their size includes spare ones.
        """
        if not num_tokens:
            return 0
        windows = (
            min(num_tokens, one.num_tokens + (0 if one.is_ring else ahead)) * one.bytes_per_token
            for one in self.windows
        )
        return self.fixed_bytes + num_tokens * self.bytes_per_token + sum(windows)

    def live(self, num_tokens: int) -> int:
        """Return the bytes of the KV that the next token sees, without the spare tokens of rings."""
        seen = (
            replace(one, num_tokens=one.num_tokens - one.spare) if one.is_ring else one
            for one in self.windows
        )
        return replace(self, windows=tuple(seen)).held(num_tokens)

    def snapshot(self, num_new: int, *, at: int) -> int:
        """Return the bytes of a snapshot of a session's last `num_new` tokens, with the states at its end.

        `at` is the number of the session's tokens.
        """
        states = replace(self, bytes_per_token=0, windows=tuple(w for w in self.windows if not w.is_cut))
        per_token = self.bytes_per_token + sum(one.bytes_per_token for one in self.windows if one.is_cut)
        return states.held(at) + num_new * per_token

    def most_tokens(self, size_bytes: int, most: int) -> int:
        """Return how many tokens a session can have in `size_bytes`, at most `most`."""
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.held(middle) <= size_bytes else (least, middle - 1)
        return least
