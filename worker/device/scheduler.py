"""Decides which turns the device runs next. Pure: turns in, one step out.

A step is one token for every running answer, and pieces of prompts up to a budget. Prompts rotate, first by
tenant and then within a tenant, so that neither a long prompt nor a tenant with many prompts delays others.
Higher priorities come first. If a step runs no piece of a priority's prompts, this priority rises a little,
so that no prompt starves.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .turn import Turn


#: A priority rises by one after this many consecutive steps without a piece of its prompts.
AGE_STEPS: Final = 16


@dataclass(frozen=True, slots=True)
class Step:
    """A step: `decode` are the turns that get a token; `prefill` pairs turns with prompt token counts."""

    decode: tuple[Turn, ...]
    prefill: tuple[tuple[Turn, int], ...]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class Scheduler:
    """Turns by phase: first prefilling, then decoding.

    At most `max_rows` turns decode, at most `max_tenant_rows` of one tenant.

    A piece of a prompt never crosses a multiple of `block`, so that a prefill resumed at a multiple gives the
    same bits. With a large budget, a prompt that allows it uses a multiple of several blocks instead.
    """

    def __init__(self, max_rows: int, block: int, max_tenant_rows: int | None = None) -> None:
        self._max_rows = max_rows
        self._max_tenant_rows = max_rows if max_tenant_rows is None else max_tenant_rows
        self._block = block
        self._prefilling: dict[str, deque[Turn]] = {}  # by tenant, in the order of their turns
        self._decoding: list[Turn] = []
        self._passed_over: dict[int, int] = {}  # by priority: steps without a piece of its prompts

    def __len__(self) -> int:
        return sum(map(len, self._prefilling.values())) + len(self._decoding)

    def __contains__(self, turn: Turn) -> bool:
        return turn in self._decoding or turn in self._prefilling.get(turn.tenant, ())

    @property
    def decoding(self) -> tuple[Turn, ...]:
        """The turns that decode."""
        return tuple(self._decoding)

    @property
    def prefilling(self) -> tuple[Turn, ...]:
        """The turns whose prompts are not done."""
        return tuple(chain.from_iterable(self._prefilling.values()))

    def add(self, turn: Turn) -> None:
        """Queue a turn whose prompt is not done."""
        self._prefilling.setdefault(turn.tenant, deque()).append(turn)

    def start_decoding(self, turn: Turn) -> None:
        """Move a turn whose answer has begun from prefilling to decoding."""
        self.remove(turn)
        self._decoding.append(turn)

    def remove(self, turn: Turn) -> None:
        """Take a turn out, whatever its phase."""
        if turn in self._decoding:
            self._decoding.remove(turn)
        queue = self._prefilling.get(turn.tenant, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._prefilling[turn.tenant]

    def next(self, budget: int, only: Turn | None = None) -> Step:
        """Choose a step with up to `budget` prompt tokens; with `only`, all of them from that turn.

        The scheduler's state does not change until `advance`.
        """
        rows = Counter(turn.tenant for turn in self._decoding)
        num_blocks = max(budget // self._block, 1)
        pieces: list[tuple[Turn, int]] = []
        for turn in self._rotation() if only is None else [only]:
            if budget == 0 or (pieces and (turn.scale > 1 or pieces[0][0].scale > 1)):
                continue
            start = turn.num_cached
            size = self._block * max(turn.scale, min(num_blocks, turn.most_blocks))
            end = min((start // size + 1) * size, turn.target, start + budget * turn.scale)
            if end == turn.target and turn.draws:
                is_full = rows.total() == self._max_rows or rows[turn.tenant] >= self._max_tenant_rows
                if turn.asks or is_full:
                    end -= 1  # the last token waits
                else:
                    rows[turn.tenant] += 1
            if end > start:
                pieces.append((turn, end - start))
                budget -= (end - start) // turn.scale
        return Step(tuple(self._decoding), tuple(pieces))

    def advance(self, step: Step) -> None:
        """Update the rotation and the ages of prompts for a step that will run."""
        for turn, _ in step.prefill:
            self._to_the_end(turn)
        self._age({turn.priority for turn, _ in step.prefill})

    def _rotation(self) -> list[Turn]:
        """List prefilling turns by priority. Within a priority, tenants alternate."""
        levels = {
            priority: priority + self._passed_over.get(priority, 0) // AGE_STEPS
            for priority in {turn.priority for turn in self.prefilling}
        }
        order: list[Turn] = []
        for priority in sorted(levels, key=lambda priority: (-levels[priority], priority)):
            queues = [
                [turn for turn in queue if turn.priority == priority] for queue in self._prefilling.values()
            ]
            order += (turn for turn in chain.from_iterable(zip_longest(*queues)) if turn is not None)
        return order

    def _age(self, served: set[int]) -> None:
        """Raise the age of each priority that has prompts but no piece in the step."""
        self._passed_over = {
            priority: self._passed_over.get(priority, 0) + 1
            for priority in {turn.priority for turn in self.prefilling} - served
        }

    def _to_the_end(self, turn: Turn) -> None:
        queue = self._prefilling.pop(turn.tenant)
        queue.remove(turn)
        queue.append(turn)
        self._prefilling[turn.tenant] = queue
