"""Decides how many prompt tokens a step may run without stalling the answers or exceeding the device. Pure.

Learns from past steps how many seconds a prompt token takes on this device, and how many the answers take.
"""

from __future__ import annotations

import math
from typing import Final

#: The smallest budget: prompts continue, however slow the device is.
LEAST: Final = 16
#: Budgets are multiples of this.
_GRAIN: Final = 8
#: After a step that was too long, so many full steps succeed before they may be twice as long; each further
#: failure doubles the number, since it makes all turns start again.
_SUCCESSES: Final = 100
#: Weight of the last step in the averages: high, since a token's cost grows with its context.
_SHARE: Final = 0.4


class PrefillBudget:
    """Limits the prompt tokens of a step, so that it takes at most `stall_s` while answers run.

    Without answers, it takes at most `alone_s`. A step has at most `most` prompt tokens: a block on a CPU,
    several on a GPU, where a piece of one block takes almost as long as one of eight.
    """

    def __init__(self, stall_s: float, most: int, alone_s: float = math.inf) -> None:
        self.stall_s = stall_s
        self._alone_s = alone_s
        #: The most prompt tokens of a step.
        self.most = self._whole = most
        self._num_full = 0  # steps of `most` tokens since it last changed
        self._num_needed = _SUCCESSES // 2
        self._row_s = 0.0
        # Separate averages of seconds and of tokens: so large pieces count more than small ones.
        self._prompt_s = 0.0
        self._num_tokens = 0.0
        self._is_first = False

    def learn(self, num_rows: int, num_tokens: int, step_s: float) -> None:
        """Update the averages by a step of `step_s` over `num_rows` answers and `num_tokens` prompt tokens.

        The time of answers is measured only in steps without prompts. In other steps the last measured time
        is subtracted, at most the whole step, and the rest counts as the time of the prompt tokens.
        """
        if num_tokens == 0:
            if num_rows:
                self._row_s = _mixed(self._row_s or None, step_s)
            return
        self._num_full += num_tokens >= self.most
        if self._num_full > self._num_needed and self.most < self._whole:
            self.most, self._num_full = min(2 * self.most, self._whole), 0
        if num_rows:
            self._row_s = min(self._row_s, step_s)
        rest_s = step_s - self._row_s if num_rows else step_s
        known = self._num_tokens > 0 and not self._is_first
        # The worker's first prompt runs alone, and a GPU also compiles kernels: the next time replaces it.
        self._is_first = not num_rows and not self._num_tokens
        self._prompt_s = _mixed(self._prompt_s if known else None, rest_s)
        self._num_tokens = _mixed(self._num_tokens if known else None, num_tokens)

    def shrink(self, num_tokens: int) -> bool:
        """Halve the most prompt tokens of a step after one of `num_tokens` was too long for the device.

        They grow again after many steps that were not. Returns False if a step has so few prompt tokens that
        they are not the reason.
        """
        self._num_full, self._num_needed = 0, 2 * self._num_needed
        was = min(num_tokens, self.most)
        self.most = min(self.most, max(was // 2 // _GRAIN * _GRAIN, LEAST))
        return was > LEAST

    def budget(self, num_rows: int, spent_s: float = 0.0) -> int:
        """Return how many prompt tokens the next step may run beside `num_rows` answers.

        The answers have already stalled for `spent_s`.
        """
        if not self._num_tokens:
            return min(LEAST, self.most) if num_rows else self.most
        left_s = max(self.stall_s - self._row_s - spent_s, 0.0) if num_rows else self._alone_s
        fitting = left_s * self._num_tokens / self._prompt_s if self._prompt_s > 0 else self.most
        return min(max(int(min(fitting, self.most)) // _GRAIN * _GRAIN, LEAST), self.most)


def _mixed(before: float | None, now: float) -> float:
    return now if before is None else (1 - _SHARE) * before + _SHARE * now
