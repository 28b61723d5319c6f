"""Learns how fast this machine restores and prefills, and says which is faster. Pure; event loop only.

On a slow device a restore saves seconds. On a fast one with a slow disk, to prefill can be faster.
"""

from __future__ import annotations

from typing import Final

#: Smaller restores and prompts say more of fixed costs than of rates.
_LEAST_BYTES: Final = 32 * 2**20
_LEAST_TOKENS: Final = 128
#: Weight of the last measurement.
_SHARE: Final = 0.3
#: A disk that was slow once is tried again: each prefix that is not restored makes it seem faster.
_FORGOTTEN: Final = 0.95


class Rates:
    """Average seconds for a byte read from disk or fetched from the remote tier, and for a prefilled token.

    None until they are measured.
    """

    def __init__(self) -> None:
        self._byte_s: float | None = None
        self._remote_byte_s: float | None = None
        self._token_s: float | None = None

    def restored(self, size_bytes: int, seconds: float) -> None:
        """Learn from a restore."""
        if size_bytes >= _LEAST_BYTES:
            self._byte_s = _mixed(self._byte_s, seconds / size_bytes)

    def fetched(self, size_bytes: int, seconds: float) -> None:
        """Learn from a fetch."""
        if size_bytes >= _LEAST_BYTES:
            self._remote_byte_s = _mixed(self._remote_byte_s, seconds / size_bytes)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Learn from a prompt's prefill."""
        if num_tokens >= _LEAST_TOKENS:
            self._token_s = _mixed(self._token_s, seconds / num_tokens)

    def should_fetch(self, size_bytes: int, num_saved: int) -> bool:
        """Say whether to fetch and read `size_bytes` is faster than to prefill `num_saved` tokens."""
        if self._remote_byte_s is None or self._token_s is None:
            return True
        byte_s = self._remote_byte_s + (self._byte_s or 0.0)
        is_faster = size_bytes * byte_s <= num_saved * self._token_s
        if not is_faster:
            self._remote_byte_s *= _FORGOTTEN
        return is_faster

    def should_restore(self, size_bytes: int, num_saved: int) -> bool:
        """Say whether to read `size_bytes` is faster than to prefill `num_saved` tokens, as far as known."""
        if self._byte_s is None or self._token_s is None:
            return True
        is_faster = size_bytes * self._byte_s <= num_saved * self._token_s
        if not is_faster:
            self._byte_s *= _FORGOTTEN
        return is_faster


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else (1 - _SHARE) * before + _SHARE * now
