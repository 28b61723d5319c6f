"""Chooses the device's next step so that it fits into memory. Device thread only.

The scheduler decides which turns run next, and `prefill_budget` how many prompt tokens; this module checks
that the step fits. The scheduler's state changes only if the step fits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cache.kv import layers

from .memory import num_scores
from .prefill_budget import LEAST
from .scheduler import Step
from .turn import Starvation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from worker.batch.batch import Batch

    from .cutter import Cutter
    from .idle_kv import IdleKv
    from .prefill_budget import PrefillBudget
    from .scheduler import Scheduler
    from .starting_kv import StartingKv
    from .turn import DeviceTurn

#: How long a prompt that does not fit waits for memory that no session holds, and how often it checks. The
#: snapshot that is being written cannot be dropped, and a disk may hang for longer than this.
PATIENCE_S: Final = 2.0
_RETRY_S: Final = 0.01
#: A factor corrects estimates that were exceeded: how it decays from step to step, and its maximum.
_KEPT: Final = 0.98
_MOST_FACTOR: Final = 4.0


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """A step that fits into memory; an empty one if nothing fits now."""

    step: Step
    #: The estimated bytes of temporary arrays, and of KV that grows or is copied.
    scratch_bytes: int = 0
    growth_bytes: int = 0
    #: After how many seconds to choose again.
    pause_s: float = 0.0
    #: A prompt that can never continue, and the bytes that its next piece needs.
    hopeless: tuple[DeviceTurn, int] | None = None


class StepChooser:
    """Chooses steps for the turns of one scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        prefill_budget: PrefillBudget,
        idle_kv: IdleKv,
        batch: Batch,
        cutter: Cutter,
        starting_kv: StartingKv,
        starve: Callable[[Starvation], None],
    ) -> None:
        """`starve` is called if only dropping snapshots that wait for the disk can still free memory."""
        self._scheduler = scheduler
        self._prefill_budget = prefill_budget
        self._idle_kv = idle_kv
        self._batch = batch
        self._cutter = cutter
        self._starting_kv = starting_kv
        self._starve = starve
        self._patient_until_s: float | None = None
        self._factor = 1.0  # the factor by which steps exceed their estimates

    def learn(self, choice: ChosenStep, measured_bytes: int) -> None:
        """Correct later estimates by a step that took `measured_bytes` besides weights and KV.

        If a step with prompts took more than estimated, later estimates are raised for a while. Steps during
        restores are ignored, since the measurement would include the restores' memory.
        """
        if choice.step.prefill and not self._idle_kv.is_promised:
            # The copies of growing caches are measured too; the estimate has them in `growth_bytes`.
            factor = measured_bytes / (choice.scratch_bytes / self._factor + choice.growth_bytes)
            self._factor = min(max(factor, 1 + (self._factor - 1) * _KEPT, 1.0), _MOST_FACTOR)

    def choose(self, spent_s: float = 0.0) -> ChosenStep:
        """Choose the next step; answers have already stalled for `spent_s` since the last one.

        If no step fits into memory, idle sessions are dropped first, then prompts run in smaller pieces, then
        prompts wait until the running answers end. If no answer runs, one prompt continues alone.
        """
        if self._batch.is_ahead:
            return ChosenStep(Step(self._scheduler.decoding, ()))
        num_rows = len(self._scheduler.decoding)
        budget = self._prefill_budget.budget(num_rows, spent_s)
        behind: set[DeviceTurn] = set()
        while True:
            step = self._scheduler.next(budget, behind)
            if more := {turn for turn, num in step.prefill if self._cutter.is_behind(turn, num)}:
                behind |= more
                continue
            if behind and not step:
                return ChosenStep(_NOTHING, pause_s=_RETRY_S)
            if (choice := self._fitting(step)) is not None:
                return choice
            if budget > LEAST:
                budget = max(budget // 2, LEAST)
            elif num_rows:
                budget = 0
            elif len(step.prefill) > 1:
                budget = 1  # the first of the prompts alone
            elif self._idle_kv.is_promised:
                return ChosenStep(_NOTHING, pause_s=_RETRY_S)  # the end of the restore arrives as a command
            else:
                return self._alone(behind)

    def _alone(self, behind: Collection[DeviceTurn]) -> ChosenStep:
        """Choose a step with only the prompt that has the most KV; drop other prompts' KV to make room.

        Prompts that are `behind` wait for the disk.

        If even that step does not fit, wait `PATIENCE_S` for snapshots to leave memory; then report the
        prompt as hopeless.
        """
        self._factor = 1.0  # an earlier step's excess is no reason to refuse a prompt
        prompts = self._scheduler.prefilling
        turn = max((one for one in prompts if one not in behind), key=lambda one: one.num_cached)
        step = self._scheduler.next(LEAST, {*prompts} - {turn})
        while (choice := self._fitting(step)) is None and self._preempt_for(turn):
            pass
        if choice is not None:
            return choice
        if self._patient_until_s is None:
            self._starve(Starvation())
            self._patient_until_s = time.monotonic() + PATIENCE_S
        if time.monotonic() < self._patient_until_s:
            return ChosenStep(_NOTHING, pause_s=_RETRY_S)
        self._patient_until_s = None
        return ChosenStep(_NOTHING, hopeless=(turn, sum(self._needs(step))))

    def _fitting(self, step: Step) -> ChosenStep | None:
        """Return the step if it fits or has no prompts, else None."""
        scratch_bytes, growth_bytes = self._needs(step)
        if not self._idle_kv.make_room(scratch_bytes + growth_bytes) and step.prefill:
            return None
        self._patient_until_s = None
        self._scheduler.advance(step)
        return ChosenStep(step, scratch_bytes, growth_bytes)

    def _needs(self, step: Step) -> tuple[int, int]:
        """Estimate a step's temporary bytes, and its bytes for KV that grows, leaves a batch or is copied."""
        pieces = [
            (num, num_scores(turn.request.policy, turn.num_cached + num, num)) for turn, num in step.prefill
        ]
        estimator = self._idle_kv.estimator
        scratch_bytes = estimator.scratch_bytes(len(step.decode), pieces, self._batch.num_cached)
        recalled = (
            estimator.recall_bytes(turn.request.policy, turn.num_cached + num) for turn, num in step.prefill
        )
        scratch_bytes += max(recalled, default=0)
        growing = [
            turn.request.policy.num_held(turn.num_cached + num)
            for turn, num in step.prefill
            if _grows(turn.caches, num)
        ]
        growth_bytes = estimator.growth_bytes(
            [*self._batch.growing, *growing], max((num for num, _ in pieces), default=1)
        )
        scratch_bytes = int(scratch_bytes * self._factor)
        return scratch_bytes, growth_bytes + self._batch.removal_bytes + self._cutter.size_bytes(step)

    def _preempt_for(self, to: DeviceTurn) -> bool:
        """Drop the KV of one turn so that the prompt `to` can run; return False if no other turn has KV.

        Turns that wait for another turn's KV lose their own KV first. After them, the prompt with the least
        KV loses its KV and is later prefilled from the start. This is rare, because each turn reserves its
        estimated bytes in the ledger.
        """
        if self._starting_kv.drop_resident():
            return True
        holding = [turn for turn in self._scheduler.prefilling if turn.num_cached and turn is not to]
        if not holding:
            return False
        turn = min(holding, key=lambda turn: turn.num_cached)
        self._cutter.cut(turn)  # before the KV is dropped
        self._starting_kv.begin_anew(turn)
        return True


_NOTHING: Final[Step] = Step((), ())


def _grows(caches: list[Any] | None, num_tokens: int) -> bool:
    """Say whether caches have to allocate memory to hold `num_tokens` more tokens."""
    return not caches or layers.grows(caches, num_tokens) is not False
