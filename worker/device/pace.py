"""Decides how many prompt tokens a step may run without stalling the running answers. Pure.

Learns from past steps what one prompt token costs on this device, and what the running answers cost.
"""

from __future__ import annotations

from typing import Final

#: The smallest budget: prompts continue, however slow the device is.
LEAST: Final = 16
#: Budgets are multiples of this.
_GRAIN: Final = 8
#: Weight of the last step in the averages. A token costs more the longer its context is.
_SHARE: Final = 0.4


class Pace:
    """Limits the prompt tokens of a step, so that it takes at most `stall_s` while answers run.

    A step has at most `block` prompt tokens while answers run, and at most `most` without answers.
    """

    def __init__(self, stall_s: float, block: int, most: int = 0) -> None:
        self._stall_s = stall_s
        self._block = block
        self._most = max(most, block)
        self._row_s = 0.0
        self._token_s: float | None = None

    def learn(self, num_rows: int, num_tokens: int, step_s: float) -> None:
        """Learn from a step of `step_s` seconds over `num_rows` answers and `num_tokens` tokens of prompts.

        The cost of answers is measured only in steps without prompts. In other steps the last measured cost
        is subtracted, at most the whole step, and the rest counts as the cost of the prompt tokens.
        """
        if num_tokens == 0:
            if num_rows:
                self._row_s = _mixed(self._row_s or None, step_s)
            return
        if num_rows:
            self._row_s = min(self._row_s, step_s)
        rest_s = step_s - self._row_s if num_rows else step_s
        self._token_s = _mixed(self._token_s, rest_s / num_tokens)

    def budget(self, num_rows: int) -> int:
        """Return how many tokens of prompts the next step may run beside `num_rows` answers."""
        if not num_rows:
            return self._most
        if self._token_s is None:
            return min(LEAST, self._block)
        left_s = max(self._stall_s - self._row_s, 0.0)
        fitting = left_s / self._token_s if self._token_s > 0 else self._block
        return min(max(int(min(fitting, self._block)) // _GRAIN * _GRAIN, LEAST), self._block)


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else (1 - _SHARE) * before + _SHARE * now
