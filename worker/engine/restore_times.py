"""Measures how fast this machine restores and prefills KV, and says which is faster. Pure; event loop only.

On a slow device a restore saves seconds. On a fast device with a slow disk, prefilling can be faster.
"""

from __future__ import annotations

from typing import Final

#: Smaller restores and prompts are not measured: fixed costs dominate them.
_LEAST_BYTES: Final = 32 * 2**20
_LEAST_TOKENS: Final = 128
#: Weight of the last measurement in an average.
_SHARE: Final = 0.3
#: Each prefix that is not read multiplies the average time by this, so that a slow disk is tried again.
_FORGOTTEN: Final = 0.95


class RestoreTimes:
    """Average seconds for a byte read from disk, a byte fetched from the remote tier, and a prefilled token.

    Each average is None until it is measured.
    """

    def __init__(self) -> None:
        self._byte_s: float | None = None
        self._remote_byte_s: float | None = None
        self._token_s: float | None = None

    def restored(self, size_bytes: int, seconds: float) -> None:
        """Update the average for bytes read from disk by a restore of `size_bytes` that took `seconds`."""
        if size_bytes >= _LEAST_BYTES:
            self._byte_s = _mixed(self._byte_s, seconds / size_bytes)

    def fetched(self, size_bytes: int, seconds: float) -> None:
        """Update the average for fetched bytes by a fetch of `size_bytes` that took `seconds`."""
        if size_bytes >= _LEAST_BYTES:
            self._remote_byte_s = _mixed(self._remote_byte_s, seconds / size_bytes)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Update the average for prefilled tokens by a prefill of `num_tokens` that took `seconds`."""
        if num_tokens >= _LEAST_TOKENS:
            self._token_s = _mixed(self._token_s, seconds / num_tokens)

    def should_fetch(self, size_bytes: int, num_saved: int) -> bool:
        """Say whether fetching `size_bytes` is faster than prefilling `num_saved` tokens; True if unknown."""
        if self._remote_byte_s is None or self._token_s is None:
            return True
        byte_s = self._remote_byte_s + (self._byte_s or 0.0)
        is_faster = size_bytes * byte_s <= num_saved * self._token_s
        if not is_faster:
            self._remote_byte_s *= _FORGOTTEN
            self._byte_s = self._byte_s and self._byte_s * _FORGOTTEN
        return is_faster

    def should_restore(self, size_bytes: int, num_saved: int) -> bool:
        """Say whether reading `size_bytes` is faster than prefilling `num_saved` tokens; True if unknown."""
        if self._byte_s is None or self._token_s is None:
            return True
        is_faster = size_bytes * self._byte_s <= num_saved * self._token_s
        if not is_faster:
            self._byte_s *= _FORGOTTEN
        return is_faster


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else (1 - _SHARE) * before + _SHARE * now
