"""`bench snapshots`: what it makes of the sides' takes, that it sees what is slow, and its bad disks."""

from __future__ import annotations

import errno
import os
import threading
import time
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from bench_runs import turnkeep

from bench.old import report
from bench.old.page import render
from bench.old.snapshots.disk import WRITER, spoil
from bench.old.snapshots.measure import prompts_of, taken
from bench.old.snapshots.page import page_of
from bench.old.snapshots.sides import Side
from bench.old.snapshots.summary import SnapshotsReport, checks, series, summarise
from bench.old.snapshots.takes import (
    FAILING,
    OFF,
    ON,
    SIDES,
    SLOW,
    Heard,
    Snapshots,
    Take,
    agreeing,
    beside_blocks,
    decoding,
)
from cache import layers

if TYPE_CHECKING:
    from pathlib import Path

#: What the sides' snapshots come to where all is as it should be: durable, lost, waiting.
SOUND = {OFF: (0, 0, 0), ON: (4, 0, 0), SLOW: (0, 0, 4), FAILING: (0, 4, 0)}
(WRITTEN, WAITED, LOST, NONE_KEPT, SAME, FAST_ON, FAST_SLOW, FAST_FAILING, LIGHT_ON, LIGHT_SLOW) = range(10)
BLOCK = 128


def made(
    speeds: dict[str, float] | None = None,
    snapshots: dict[str, tuple[int, int, int]] | None = None,
    agreeing: int = 320,
    beside_s: dict[str, float] | None = None,
) -> list[Take]:
    """Takes of all sides at two batch sizes; a side's speed is by that without snapshots.

    `beside_s` is what a block adds to the steps beside it, which take 1 ms more or less by themselves.
    """
    speeds, counts, added_s = speeds or {}, SOUND | (snapshots or {}), beside_s or {}
    return [
        Take(
            round=number,
            batch=batch,
            side=side,
            prompt_tokens=200,
            prefill_s=1.0,
            tokens=320,
            agreeing=agreeing,
            decoded=318,
            decode_s=(1 + number / 100) / speeds.get(side, 1.0),
            beside_s=tuple(added_s.get(side, 0.0) + noise_s for noise_s in (-0.001, 0.001)),
            snapshots=Snapshots(
                durable=counts[side][0], lost=counts[side][1], waiting=counts[side][2], written_bytes=0
            ),
        )
        for number in (1, 2, 3)
        for batch in (1, 4)
        for side in SIDES
    ]


def judged(takes: list[Take]) -> list[bool | None]:
    return [check.passed for check in checks(takes, summarise(takes, BLOCK))]


def test_what_is_promised_is_held_against_the_speed_without_snapshots_in_the_same_round() -> None:
    assert judged(made()) == [True] * 11
    assert judged(made({ON: 0.97}))[FAST_ON] is False
    assert judged(made({ON: 0.985, SLOW: 0.96, FAILING: 0.94}))[FAST_ON : FAST_FAILING + 1] == [
        True,
        True,
        False,
    ]
    (cost,) = [one for one in summarise(made({ON: 0.9}), BLOCK).costs if (one.batch, one.side) == (4, ON)]
    assert cost.decode.median == pytest.approx(0.9)  # though every round is slower than the one before
    assert cost.prefill.median == 1


def test_rounds_that_scatter_around_what_is_promised_tell_nothing() -> None:
    takes = made()
    slower = [
        msgspec.structs.replace(take, decode_s=take.decode_s / (0.94, 0.97, 0.99)[take.round - 1])
        if take.side == ON
        else take
        for take in takes
    ]
    assert judged(slower)[FAST_ON] is None
    assert judged(slower).count(True) == 10


def test_what_a_block_adds_to_the_steps_beside_it_is_a_share_of_the_time_of_its_tokens() -> None:
    found = {(cost.batch, cost.side): cost for cost in summarise(made(beside_s={ON: 0.05}), BLOCK).costs}
    assert found[1, OFF].beside is None
    beside = found[1, ON].beside
    assert beside is not None
    assert beside.blocks == 6
    assert beside.added_s.median == pytest.approx(0.05)
    assert beside.added_s.low < 0.05 < beside.added_s.high
    rate = 318 / 1.02
    assert beside.speed.median == pytest.approx(1 / (1 + 0.05 * rate / BLOCK))
    assert beside.speed.low < beside.speed.median < beside.speed.high
    assert judged(made(beside_s={ON: 0.05, SLOW: 0.001}))[LIGHT_ON : LIGHT_SLOW + 1] == [False, True]
    at_the_bound_s = (1 / 0.98 - 1) * BLOCK / rate
    assert judged(made(beside_s={ON: at_the_bound_s}))[LIGHT_ON] is None
    one_batch = [take for take in made(beside_s={ON: 0.05}) if take.batch == 4]
    both = [take for take in made(beside_s={ON: at_the_bound_s}) if take.batch == 1] + one_batch
    assert judged(both)[LIGHT_ON] is False, "one that tells is enough"


def test_a_block_is_held_against_the_steps_around_it() -> None:
    """10 ms a step, from 20 ms on in the middle: two blocks, of which the second held up a step by 7 ms."""
    steps_s = [0.01] * 30 + [0.02] * 40
    steps_s[44] += 0.007  # the step behind the token that completes the second block
    times_s = tuple(accumulate(steps_s, initial=5.0))
    answer = Heard(20, tuple(range(71)), times_s, (1,) * 71)  # behind 20 tokens: the tokens 12 and 44
    first, second = beside_blocks(answer, 32)
    assert first == pytest.approx(0.0)
    assert second == pytest.approx(0.007)
    assert beside_blocks(answer, 128) == []
    pairs = Heard(20, tuple(range(70)), times_s[1::2], (2,) * 35)  # tokens that came in twos
    assert sum(pairs.steps_s) == pytest.approx(times_s[-2] - times_s[1])


@pytest.mark.parametrize(
    ("side", "counts", "check"),
    [
        (ON, (3, 1, 0), WRITTEN),
        (ON, (0, 0, 0), WRITTEN),
        (SLOW, (4, 0, 0), WAITED),
        (FAILING, (0, 0, 0), LOST),
        (FAILING, (1, 3, 0), NONE_KEPT),
        (OFF, (1, 0, 0), NONE_KEPT),
    ],
)
def test_a_side_that_is_not_what_it_is_called_fails_the_run(side: str, counts: Any, check: int) -> None:
    passed = judged(made(snapshots={side: counts}))
    assert passed[check] is False
    assert passed.count(False) == 1


def test_sides_that_say_something_else_are_seen_and_none_at_all_is_no_answer() -> None:
    assert judged(made(agreeing=200))[SAME] is False
    assert judged([]) == [None] * 11
    assert series([]) == {}
    assert list(series(made()))[:2] == ["decode: off, batch 1", "prefill: off, batch 1"]


def test_decoding_counts_from_when_all_answers_have_begun() -> None:
    early = Heard(0, (1, 2, 3, 4), (0.0, 1.0, 2.0, 3.0), (1, 1, 1, 1))
    late = Heard(0, (5, 6, 7), (1.0, 2.0, 4.0), (1, 1, 1))
    assert decoding([early, late]) == (4, 3.0)
    assert agreeing([early, late], [Heard(0, (1, 2, 9, 4), (), ()), Heard(0, (5, 6), (), ())]) == 4


def test_prompts_have_the_length_that_is_asked_for_and_no_common_beginning() -> None:
    prompts = list(islice(prompts_of(iter(["Why?", "How so?"] * 20), 30), 3))
    assert [len(prompt) for prompt in prompts] == [30] * 3
    assert len({prompt[:8] for prompt in prompts}) == 3


def test_only_the_writer_thread_has_a_bad_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int | None] = {}

    def sync(name: str) -> None:
        with (tmp_path / name).open("wb") as file:
            try:
                os.fsync(file.fileno())
            except OSError as error:
                found[name] = error.errno
            else:
                found[name] = None

    monkeypatch.setattr(os, "fsync", os.fsync)  # is put back
    spoil(fails=True)
    for name in (WRITER, "another"):
        thread = threading.Thread(target=sync, args=(name,), name=name)
        thread.start()
        thread.join()
    assert found == {WRITER: errno.EIO, "another": None}


def test_a_page_is_made_of_a_whole_report_and_of_an_empty_one() -> None:
    from made_reports import make_report

    plain = msgspec.to_builtins(make_report())
    for takes in ([], made()):
        fields = {name: plain[name] for name in SnapshotsReport.__struct_fields__ if name in plain}
        fields |= {"schema": report.schema_of("snapshots"), "checks": (), "series": {}}
        fields |= {
            "summary": msgspec.to_builtins(summarise(takes, BLOCK)),
            "takes": msgspec.to_builtins(takes),
        }
        page = render(page_of(msgspec.convert(fields, SnapshotsReport)), warn=print)
        assert page is not None
        assert page.count("<svg") == (2 if takes else 0)
    assert "slow disk, batch 4" in page


async def test_a_worker_that_snapshots_slow_down_is_seen(
    local_worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real sides: 100 ms more for each cut must show in both ratios, and in no check of the sides."""
    cut = layers.cut
    monkeypatch.setattr(layers, "cut", lambda *a, **k: time.sleep(0.1) or cut(*a, **k))
    sides = []
    for name, more in ((OFF, {"snapshots": "off"}), (ON, {})):
        data_dir = tmp_path / name
        worker = await local_worker(prefix=f"bench-{name}-{time.monotonic_ns()}", data_dir=data_dir, **more)
        sides.append(Side(name, worker.client, settles=True, timeout_s=60))
        await sides[-1].begin()
    prompts = ["Why are there lighthouses on this coast?", "And who lives in them?"]
    takes = []
    for number in (1, 2):
        takes += taken(number, 2, {side.name: await side.take(prompts, 40) for side in sides}, 32)
    costs = {cost.side: cost for cost in summarise(takes, 32).costs}
    assert costs[ON].decode.high < 0.8
    assert costs[ON].prefill.high < 0.8
    assert costs[ON].beside is not None
    assert costs[ON].beside.speed.high < 0.8
    assert costs[ON].durable > 0
    assert judged(takes)[FAST_ON] is False
    assert judged(takes)[LIGHT_ON] is False
    assert judged(takes)[WRITTEN] is True


@pytest.mark.process
def test_a_smoke_run_of_snapshots_ends_well(tmp_path: Path, tiny_model: Path) -> None:
    process = turnkeep("snapshots", "--smoke", "--model", tiny_model, "--out", tmp_path)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, out + err
    found = report.read(next(tmp_path.glob("snapshots-*.json")), SnapshotsReport)
    assert found.complete
    assert {(take.batch, take.side) for take in found.takes} == {(2, side) for side in SIDES}
    assert all(take.decoded and take.prompt_tokens for take in found.takes)
    assert next(tmp_path.glob("snapshots-*.html")).read_text().count("<svg") == 2
    assert "slow disk" in out
