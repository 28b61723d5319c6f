"""What a run counts over the turns into which pauses and failures divide it, and what a turn releases."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import key, prompt

from cache.names.errors import LostPastError
from cache.names.tokens import as_tokens
from worker.device.request import TurnRequest
from worker.device.turn import DeviceTurn, KvRequest, LostKvError, TurnCost
from worker.engine.kv_lookup import TurnSnapshots
from worker.engine.run import Run


def begun(num_prompt: int = 10) -> Run:
    request = TurnRequest(key("s"), as_tokens(prompt(num_prompt)))
    more = {"request": request, "num_most": 99, "num_logged": num_prompt, "cancelled": lambda: False}
    return Run(request.key, 0, 0.0, phases=[], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turns", "num_reused", "num_prefilled"),
    [
        ([(0, 4), (4, 10)], 0, 10),  # paused in its prompt, and continued with the KV that it had left
        ([(6, 8), (0, 10)], 0, 10),  # its KV was dropped in between
        ([(6, 8), (8, 7), (7, 10)], 6, 4),
        ([(6, 10), (10, 12)], 6, 4),  # paused in its answer
    ],
)
def test_kv_that_a_turn_computed_before_a_pause_and_reuses_after_it_is_counted_as_prefilled(
    turns: list[tuple[int, int]], num_reused: int, num_prefilled: int
) -> None:
    run = begun()
    for reused, cached in turns:
        run.count(run.request, TurnCost(cached, reused), 0)
    result = run.result()
    assert (result.num_cached, result.num_prefilled) == (num_reused, num_prefilled)


LOST = RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("events", "may_start_again"),
    [
        ("lost lost lost lost", "yyyn"),
        ("lost lost lost drawn lost lost lost lost", "yyyyyyn"),
        ("own own", "yn"),
        ("lost own lost", "yyn"),
        ("small small small small small", "yyyyy"),
        ("gap gap gap gap", "yyyn"),
        ("found5 gap gap gap found5 gap", "yyyn"),
        ("found5 gap gap gap found6 gap gap gap gap", "yyyyyyn"),
        ("lost gap lost gap lost gap lost", "yyyyyyn"),
    ],
    ids=[
        "four failures",
        "a new token after three failures",
        "two failures in its own prompt",
        "failures elsewhere and in its own prompt",
        "failures that later pieces avoid",
        "stored kv missing four times",
        "stored kv missing at one position",
        "stored kv missing at two positions",
        "failures and missing kv in turn",
    ],
)
def test_a_turn_is_restarted_after_device_failures_until_the_limit_of_failures_without_progress(
    events: str, may_start_again: str
) -> None:
    """`own`: its own prompt was in the step. `small`: later pieces are shorter. `gap`: the disk lacks KV."""
    run, said = begun(), ""
    for event in events.split():
        if event.startswith("found"):
            run.begin(int(event.removeprefix("found")))
        elif event == "drawn":
            run.note_drawn(0)
        else:
            weight = {"lost": 1, "own": 2, "small": 0}.get(event)
            error = LostPastError("gap") if weight is None else LostKvError(LOST, weight=weight)
            said += "ny"[run.may_start_again(error)]
    assert said == may_start_again


@pytest.mark.parametrize("num_reads", [0, 1, 3])
async def test_a_turn_pins_its_snapshots_once_for_any_number_of_reads_and_releases_all_at_its_end(
    num_reads: int,
) -> None:
    held = Counter[str]()

    def taking(kind: str, num: int) -> Any:
        return lambda *_: held.update({kind: num}) or SimpleNamespace(edges=())

    async def past(*_: object) -> Any:
        return taking("past", 1)()

    kv = SimpleNamespace(
        hold=taking("prefix", 1), release=taking("prefix", -1), past=past, end_past=taking("past", -1)
    )
    store: Any = SimpleNamespace(kv=kv)
    turn = DeviceTurn(begun().request)
    snapshots = TurnSnapshots(store, None, turn.request.context)  # type: ignore[arg-type]
    for _ in range(num_reads):
        await snapshots.read(KvRequest(turn, 8, ()))
        assert held == {"prefix": 1, "past": 1}
    snapshots.release()
    assert not any(held.values())
