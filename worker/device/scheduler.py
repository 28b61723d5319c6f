"""Decides which turns the device runs next. Pure: turns in, one step out.

A step is one token for every running answer, and pieces of prompts up to a budget. Higher priorities come
first; a priority whose prompts get no piece in many steps rises, so that no prompt starves. Within a
priority, tenants alternate, so that a tenant with many prompts does not delay others. Of a tenant's prompts,
the ones with the least expected work come first; waiting time counts like less work.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Final

from cache.names.images import whole_end

from .request import has_place

if TYPE_CHECKING:
    from collections.abc import Collection

    from .turn import DeviceTurn


#: Each prompt token still to prefill moves a turn back in the order by this many seconds.
_PROMPT_TOKEN_S: Final = 0.002
#: A priority rises by one after this many consecutive steps without a piece of its prompts.
AGE_STEPS: Final = 16


@dataclass(frozen=True, slots=True)
class Step:
    """The turns that run in a step of the device; false if there are none."""

    #: The turns that get a token of their answer.
    decode: tuple[DeviceTurn, ...]
    #: The turns that prefill, each with its number of prompt tokens.
    prefill: tuple[tuple[DeviceTurn, int], ...]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class Scheduler:
    """The turns by phase, prefilling or decoding, and the choice of the next step.

    At most `max_rows` turns decode, at most `max_tenant_rows` of one tenant. For short answers, both limits,
    if above 1, are higher by an eighth.

    A piece of a prompt has up to one `block`, or several if the budget is large (`DeviceTurn.most_blocks`).
    It never crosses a multiple of that size, so that a prefill resumed at a multiple gives the same bits,
    unless it has a whole image that does: with `joins_images`, no piece ends inside an image.
    """

    def __init__(
        self, max_rows: int, block: int, max_tenant_rows: int | None = None, *, joins_images: bool = False
    ) -> None:
        self._joins_images = joins_images
        self._max_rows = max_rows
        self._max_tenant_rows = max_rows if max_tenant_rows is None else max_tenant_rows
        self._block = block
        self._prefilling: dict[str, list[DeviceTurn]] = {}  # by tenant, least recently run first
        self._decoding: list[DeviceTurn] = []
        self._passed_over: dict[int, int] = {}  # by priority: steps without a piece of its prompts

    def __len__(self) -> int:
        return sum(map(len, self._prefilling.values())) + len(self._decoding)

    def __contains__(self, turn: DeviceTurn) -> bool:
        return turn in self._decoding or turn in self._prefilling.get(turn.request.tenant, ())

    @property
    def decoding(self) -> tuple[DeviceTurn, ...]:
        """The turns whose answers are being decoded."""
        return tuple(self._decoding)

    @property
    def prefilling(self) -> tuple[DeviceTurn, ...]:
        """The turns whose prompts are not fully prefilled."""
        return tuple(chain.from_iterable(self._prefilling.values()))

    def add(self, turn: DeviceTurn) -> None:
        """Queue a turn for the prefill of its prompt."""
        self._prefilling.setdefault(turn.request.tenant, []).append(turn)

    def start_decoding(self, turn: DeviceTurn) -> None:
        """Move a turn whose answer has begun from prefilling to decoding."""
        self.remove(turn)
        self._decoding.append(turn)

    def remove(self, turn: DeviceTurn) -> None:
        """Remove a turn in any phase; no effect if it is absent."""
        if turn in self._decoding:
            self._decoding.remove(turn)
        queue = self._prefilling.get(turn.request.tenant, [])
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._prefilling[turn.request.tenant]

    def next(self, budget: int, without: Collection[DeviceTurn] = ()) -> Step:
        """Choose a step with up to `budget` prompt tokens, none of them of the turns `without`.

        A turn may get `DeviceTurn.scale` times as many. Only `advance` changes the scheduler's state.
        """
        rows = Counter((turn.request.tenant, turn.request.is_short) for turn in self._decoding)
        num_blocks = max(budget // self._block, 1)
        pieces: list[tuple[DeviceTurn, int]] = []
        for turn in self._rotation():
            if turn in without or budget == 0 or (pieces and (turn.scale > 1 or pieces[0][0].scale > 1)):
                continue
            start = turn.num_cached
            size = self._block * max(turn.scale, min(num_blocks, turn.most_blocks))
            end = min((start // size + 1) * size, turn.request.target, start + budget * turn.scale)
            if self._joins_images:
                end = min(whole_end(turn.request.context.spans, start, end), turn.request.target)
            if end == turn.request.target and turn.request.draws:
                if turn.asks or not self._has_row(turn, rows):
                    end -= 1  # the last token waits for a row or for recalled chunks
                else:
                    rows[turn.request.tenant, turn.request.is_short] += 1
            if end > start:
                pieces.append((turn, end - start))
                budget = max(budget - (end - start) // turn.scale, 0)
        return Step(tuple(self._decoding), tuple(pieces))

    def _has_row(self, turn: DeviceTurn, rows: Counter[tuple[str, bool]]) -> bool:
        """Say whether one more turn may decode; `rows` counts decoding turns by tenant and by `is_short`."""
        request, num_short = turn.request, sum(num for (_, is_short), num in rows.items() if is_short)
        mine_short = rows[request.tenant, True]
        mine = mine_short + rows[request.tenant, False]
        return has_place(rows.total(), num_short, self._max_rows, 8, is_short=request.is_short) and has_place(
            mine, mine_short, self._max_tenant_rows, 8, is_short=request.is_short
        )

    def advance(self, step: Step) -> None:
        """Update the tenants' rotation and the priorities' ages for a chosen step that will run."""
        for turn, _ in step.prefill:
            self._prefilling[turn.request.tenant] = self._prefilling.pop(turn.request.tenant)
        self._age({turn.request.priority for turn, _ in step.prefill})

    def _rotation(self) -> list[DeviceTurn]:
        """List prefilling turns by priority; within one, tenants alternate, and least work comes first."""
        levels = {
            priority: priority + self._passed_over.get(priority, 0) // AGE_STEPS
            for priority in {turn.request.priority for turn in self.prefilling}
        }
        order: list[DeviceTurn] = []
        for priority in sorted(levels, key=lambda priority: (-levels[priority], priority)):
            queues = [
                sorted((turn for turn in queue if turn.request.priority == priority), key=_order)
                for queue in self._prefilling.values()
            ]
            order += (turn for turn in chain.from_iterable(zip_longest(*queues)) if turn is not None)
        return order

    def _age(self, served: set[int]) -> None:
        """Count one more step for each waiting priority that is not in `served`; reset the other counts."""
        self._passed_over = {
            priority: self._passed_over.get(priority, 0) + 1
            for priority in {turn.request.priority for turn in self.prefilling} - served
        }


def _order(turn: DeviceTurn) -> float:
    return turn.place_s + (turn.request.target - turn.num_cached) * _PROMPT_TOKEN_S
