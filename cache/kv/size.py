"""What a session's KV takes on the device, by the number of its tokens. Pure.

Layers differ in what they can hold: all tokens, those of a window or a chunk, or one state of a fixed size.
`layers.sizes` measures a model's; admission, the estimate of a step and reports of sizes count with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Layers that hold no more than `num_tokens` tokens, of so many bytes all together."""

    num_tokens: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class KvSize:
    """Bytes of one model's layers: for each token for good, of windows, and of states of a fixed size."""

    bytes_per_token: int
    windows: tuple[Window, ...] = ()
    fixed_bytes: int = 0

    @property
    def bounded_bytes(self) -> int:
        """Bytes that windows and states take at the most, however long a session becomes."""
        return self.fixed_bytes + sum(one.num_tokens * one.bytes_per_token for one in self.windows)

    def held(self, num_tokens: int, *, ahead: int = 0) -> int:
        """Count the bytes of so many tokens. Windows may hold `ahead` more while a piece of a prompt runs."""
        if not num_tokens:
            return 0
        windows = (min(num_tokens, one.num_tokens + ahead) * one.bytes_per_token for one in self.windows)
        return self.fixed_bytes + num_tokens * self.bytes_per_token + sum(windows)

    def snapshot(self, num_new: int, *, at: int) -> int:
        """Count the bytes of a snapshot of the last `num_new` of `at` tokens, with the states there."""
        return self.held(at) - (at - num_new) * self.bytes_per_token

    def most_tokens(self, size_bytes: int, most: int) -> int:
        """Return how many tokens fit into so many bytes, up to `most`."""
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self.held(middle) <= size_bytes else (least, middle - 1)
        return least
