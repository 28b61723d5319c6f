"""`ChunkCache`: KV of a layer with chunked attention, which snapshots can store by block.

The class extends mlx-lm's `ChunkedKVCache`, which the model's own code uses, with methods for snapshots,
rewinds and forks. Device thread only.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache


class ChunkCache(ChunkedKVCache):
    """KV of one layer's last tokens. A token sees only the tokens of its own chunk of `chunk_size` tokens.

    Holds the tokens from `start_position` on. Before a pass the model drops all but the last `chunk_size`
    tokens. So a session that is restored with these tokens computes the same bits as an uninterrupted one.
    """

    @property
    def earliest(self) -> int:
        """The smallest number of tokens to which `trim` can shorten the cache; greater numbers work too.

        At such a length the cache still holds the whole chunk that the next token sees.
        """
        size = int(self.chunk_size)
        return -(-self.start_position // size) * size

    def trim(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens. Raises `ValueError` if earlier tokens of the chunk are gone."""
        left = self.offset - num_tokens
        if not self.earliest <= left <= self.offset:
            raise ValueError(f"a chunk of {self.offset} tokens cannot go back to {left}")
        self.offset = left

    def copy_from(self, other: ChunkCache) -> None:
        """Replace this cache's contents by a copy of `other`, unevaluated. Both have the same chunk size."""
        if other.keys is not None and other.values is not None:
            self.keys, self.values = mx.array(other.keys), mx.array(other.values)
        self.offset, self.start_position = other.offset, other.start_position

    def holds(self, start: int, end: int) -> bool:
        """Whether the cache has the keys and values of the tokens `[start, end)`."""
        return bool(self.start_position <= start < end <= self.offset)

    def tokens(self, start: int, end: int) -> tuple[tuple[mx.array], tuple[mx.array]]:
        """Return views of the keys and values of the tokens `[start, end)`.

        Raises `ValueError` if some of them are not held.
        """
        if self.keys is None or self.values is None or not self.holds(start, end):
            raise ValueError(f"not held: the tokens [{start}, {end}) of {self.offset}")
        place = slice(start - self.start_position, end - self.start_position)
        return (self.keys[..., place, :],), (self.values[..., place, :],)

    def fill(self, keys: list[mx.array], values: list[mx.array], num_tokens: int) -> None:
        """Put restored KV into an empty cache; `num_tokens` is the number of the session's tokens.

        `keys` and `values` each have one array, with the session's last `chunk_size` tokens, or with all of
        a shorter session. Raises `ValueError` if the arrays have another number of tokens.
        """
        num_held = min(num_tokens, self.chunk_size)
        if any(array.shape[2] != num_held for array in (*keys, *values)):
            raise ValueError(f"not the keys and values of {num_held} tokens")
        (self.keys,), (self.values,) = keys, values
        self.offset, self.start_position = num_tokens, num_tokens - num_held
