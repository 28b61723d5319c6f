"""The device thread runs turns and reports events; tests also cover faults and cancellations."""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import BLOCK, alone, answer, append, generate, key, prompt

from cache.names.blocks import Span
from cache.names.policy import FULL
from cache.names.tokens import as_tokens
from worker.batch.row_sampler import RowSampling
from worker.batch.rows import PrefillPiece
from worker.device import runner
from worker.device.request import NoMemoryError, TurnRequest
from worker.device.runner import Runner
from worker.device.turn import (
    DeviceTurn,
    FaultedTurn,
    FinishedTurn,
    PrefilledPiece,
    SnapshotCut,
    StepReport,
)


class Wrapped:
    """A model that fails, or waits, at the calls that a test selects."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.fails = lambda tokens: False
        self.holds = lambda tokens: False
        self.arrived, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        if self.holds(tokens):
            self.arrived.release()
            assert self.go_on.acquire(timeout=20)
        if self.fails(tokens):
            raise RuntimeError("the device is on fire")
        return self._model(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.fixture
def model(make_model):
    return Wrapped(make_model("llama"))


def numbers(chunks):
    """Return the number of each token of chunks, in its answer."""
    return [chunk.i + i for chunk in chunks for i in range(len(chunk.tokens))]


def test_a_turn_leaves_its_last_token_without_kv_and_the_next_turn_prefills_it(make_rig, model) -> None:
    """An answer is drawn from the logits of the last token, so that token runs when the answer begins."""
    rig = make_rig(model)
    added = append(prompt(19))
    rig.run(added)
    assert (added.num_cached, added.num_prefilled, added.num_reused) == (18, 18, 0)
    per_token = 2 * 2 * 8 * 4 * 2  # layers, KV heads, head_dim, bytes, keys and values
    assert rig.end(added) == FinishedTurn(added, added.cost, 18 * per_token)
    turn = generate(prompt(19), 6, num_kept=18)
    rig.run(turn)
    assert rig.tokens(turn) == alone(model, prompt(19), 6)[0]
    assert numbers(rig.chunks(turn)) == list(range(6))
    assert (turn.num_reused, turn.num_prefilled, turn.num_cached) == (18, 1, 19 + 6 - 1)
    assert rig.end(turn) == FinishedTurn(turn, turn.cost, 24 * per_token)
    assert turn.request.answer.finish_reason == "length"


def test_the_first_token_of_an_answer_that_runs_alone_is_reported_immediately_and_later_tokens_together(
    make_rig, model, monkeypatch
) -> None:
    monkeypatch.setattr(runner, "_CHUNK_S", 60)
    rig = make_rig(model)
    turn = generate(prompt(19), 6)
    rig.run(turn)
    assert [(chunk.i, len(chunk.tokens)) for chunk in rig.chunks(turn)] == [(0, 1), (1, 5)]
    assert rig.tokens(turn) == turn.request.answer.tokens
    assert "".join(chunk.text for chunk in rig.chunks(turn)) == turn.request.answer.text


def test_tokens_drawn_in_a_step_that_also_prefills_a_prompt_are_reported_immediately_one_by_one(
    make_rig, model, monkeypatch
) -> None:
    """The next step may be a long one too."""
    monkeypatch.setattr(runner, "_CHUNK_S", 60)
    rig = make_rig(model)
    running = generate(prompt(9, salt=5), 40, name="running")
    model.holds = lambda tokens: tokens.size == 1
    rig.device.submit(running)
    assert model.arrived.acquire(timeout=20)
    beside = append(prompt(3 * BLOCK), name="beside")
    rig.device.submit(beside)
    model.holds = lambda tokens: False
    model.go_on.release()
    rig.finish(running, beside)
    *early, last = [len(chunk.tokens) for chunk in rig.chunks(running)]
    assert early == [1] * len(early)
    assert len(early) > 3 < last


def test_a_turn_that_fails_reports_first_the_tokens_that_it_has_drawn(make_rig, model, monkeypatch) -> None:
    monkeypatch.setattr(runner, "_CHUNK_S", 60)
    rig = make_rig(model)
    seen = count()
    model.fails = lambda tokens: tokens.size == 1 and next(seen) == 4
    turn = generate(prompt(19), 20)
    rig.run(turn)
    assert isinstance(rig.end(turn), FaultedTurn)
    assert rig.tokens(turn) == turn.request.answer.tokens
    assert len(rig.tokens(turn)) > 1


def test_a_resumed_answer_has_its_published_tokens_and_then_those_of_an_uninterrupted_answer(
    make_rig, model
) -> None:
    """Tokens published before a crash are not drawn again; the draws after them do not change."""
    sampling = RowSampling(0.9, seed=5)
    whole, _ = alone(model, prompt(11), 12, sampling)
    rig = make_rig(model)
    begun = answer(12, *whole[:5])
    turn = DeviceTurn(TurnRequest(key(), as_tokens(prompt(11) + whole[:5]), answer=begun, sampling=sampling))
    rig.run(turn)
    assert begun.tokens == whole
    assert numbers(rig.chunks(turn)) == list(range(5, 12))
    assert turn.request.num_prompt == turn.num_prefilled == 11, "forced tokens are no part of the prompt"
    after = generate(prompt(11) + whole, 1, num_kept=22)
    rig.run(after)
    assert after.num_reused == 22


def test_snapshots_are_made_of_requested_prompt_blocks_all_answer_blocks_and_the_last_partial_block(
    make_rig, model
) -> None:
    """Each span is copied as soon as its KV is complete."""
    rig = make_rig(model, room=lambda: 2**30)
    turn = append(prompt(31), spans=[Span(8, 16)])
    rig.run(turn)
    assert rig.cuts(turn) == [(8, 16), (24, 30)]
    kinds = [type(event) for event in rig.of(turn) if isinstance(event, PrefilledPiece | SnapshotCut)]
    assert kinds == [
        PrefilledPiece,
        PrefilledPiece,
        SnapshotCut,
        PrefilledPiece,
        PrefilledPiece,
        SnapshotCut,
    ], "each as soon as it is there"
    after = generate(prompt(31), 13, num_kept=30)
    rig.run(after)
    assert rig.cuts(after) == [(24, 32), (32, 40), (40, 43)]
    exact = generate(prompt(31), 2, num_kept=30)
    rig.run(exact)
    assert rig.cuts(exact) == [(24, 32)], "an answer that ends on the grid has no tail"


@pytest.mark.parametrize(
    ("edges", "cut"),
    [
        ((24,), (24, 31)),
        ((24, 29), (29, 31)),
        ((24, 29, 30), (29, 31)),
        ((24, 26, 27), (24, 31)),
        ((24, 31), None),
        ((16, 20), (24, 31)),
    ],
)
def test_of_the_last_partial_block_of_an_answer_only_new_tokens_are_stored_unless_shorter_parts_are_replaced(
    make_rig, model, edges, cut
) -> None:
    """Stored pieces of the block stay, except those that are not longer than the new piece."""
    rig = make_rig(model, room=lambda: 2**30)
    rig.run(append(prompt(27)))
    turn = generate(prompt(27), 5, num_kept=26, edges=edges)
    rig.run(turn)
    assert rig.cuts(turn) == [cut] * (cut is not None)


def test_kv_for_snapshots_is_copied_later_if_the_write_queue_is_full_at_first(make_rig, model) -> None:
    room_bytes = 0
    rig = make_rig(model, room=lambda: room_bytes)
    turn = generate(prompt(20), 40, spans=[Span(0, 8), Span(8, 16)])
    rig.device.submit(turn)
    rig.wait(lambda _: len(rig.tokens(turn)) > 20)
    assert rig.cuts(turn) == []
    room_bytes = 2**30
    rig.finish(turn)
    assert rig.cuts(turn) == [*((start, start + 8) for start in range(0, 56, 8)), (56, 59)]


def test_snapshots_that_the_event_loop_has_not_yet_received_count_against_the_write_queue(
    make_rig, model
) -> None:
    """It would have to drop those for which there is no room."""
    rig = make_rig(model, room=lambda: room_bytes)
    room_bytes = 3 * rig.device.kv(FULL).snapshot(8, at=8)
    spans = [Span(start, start + 8) for start in range(0, 48, 8)]
    turns = [append(prompt(49, salt=salt), name=str(salt), spans=spans) for salt in (1, 2)]
    for turn in turns:
        rig.run(turn)
        rig.device.take(StepReport(tuple(rig.of(turn))))
    assert [rig.cuts(turn) for turn in turns] == [[(0, 8), (8, 16), (16, 24)]] * 2


@pytest.mark.parametrize("phase", ["prefill", "decode alone", "decode in a batch"])
def test_an_error_in_a_forward_pass_fails_the_turns_of_that_pass_and_no_other_turns(
    make_rig, model, phase
) -> None:
    """Their KV is dropped. Other turns continue, and later turns of the same sessions succeed."""
    rig = make_rig(model)
    bystander = generate(prompt(12, salt=4), 40, name="bystander")
    victims = [generate(prompt(20), 30, name="victim")]
    if phase == "decode in a batch":
        victims.append(generate(prompt(9, salt=6), 30, name="victim2"))
    rig.run(append(prompt(15, salt=2), name="idle"))
    num_tokens, failing = (BLOCK, 1) if phase == "prefill" else (len(victims), 3)
    seen = count()
    model.fails = lambda tokens: tokens.size == num_tokens and next(seen) == failing
    for turn in victims:
        rig.device.submit(turn)
    rig.finish(*victims)
    rig.device.submit(bystander)
    for turn in victims:
        end = rig.end(turn)
        assert isinstance(end, FaultedTurn)
        assert str(end.error) == "the device is on fire"
        assert rig.of(turn)[-1] is end
    again = [generate(turn.request.context, 30, name=turn.request.key.session) for turn in victims]
    kept = generate(prompt(15, salt=2), 10, name="idle", num_kept=14)
    for turn in (*again, kept):
        rig.device.submit(turn)
    rig.finish(bystander, kept, *again)
    for turn in (bystander, kept, *again):
        assert rig.tokens(turn) == alone(model, turn.request.context, turn.request.answer.max_tokens)[0]
    assert kept.num_reused == 14
    assert [turn.num_reused for turn in again] == [0] * len(again)


def test_a_prompt_that_fails_to_start_fails_alone_and_the_other_turns_of_its_step_complete(
    make_rig, model, monkeypatch
) -> None:
    """Prompts and answers in the same step continue."""
    piece = Runner._piece

    def cut(runner: Runner, turn: DeviceTurn, num_tokens: int) -> PrefillPiece:
        if turn.request.key.session == "doomed":
            raise NoMemoryError("no room")
        return piece(runner, turn, num_tokens)

    monkeypatch.setattr(Runner, "_piece", cut)
    rig = make_rig(model)
    names = ("first", "doomed", "second")
    turns = [generate(prompt(7, salt=n), 40, name=name) for n, name in enumerate(names)]
    seen = iter(range(1000))
    model.holds = lambda _: next(seen) == 0
    rig.device.submit(turns[0])
    assert model.arrived.acquire(timeout=20)
    for turn in turns[1:]:
        rig.device.submit(turn)
    model.go_on.release()
    rig.finish(*turns)
    assert isinstance(rig.end(turns[1]), FaultedTurn)
    for turn in (turns[0], turns[2]):
        assert rig.tokens(turn) == alone(model, turn.request.context, 40)[0]


def test_restored_kv_that_does_not_fit_the_model_is_ignored_and_the_prompt_is_prefilled(
    make_rig, model
) -> None:
    rig = make_rig(model)
    turn = append(prompt(20), restored={"0.keys": mx.zeros((1, 2, 8, 8))}, num_restored=8)
    rig.run(turn)
    assert isinstance(rig.end(turn), FinishedTurn)
    assert (turn.num_reused, turn.num_prefilled) == (0, 19)
    again = generate(prompt(20), 4, num_kept=19)
    rig.run(again)
    assert rig.tokens(again) == alone(model, prompt(20), 4)[0]


def test_idle_sessions_take_less_than_four_times_the_kv_memory_that_they_report(make_rig, model) -> None:
    """Caches grow by 256 tokens at a time and do not shrink by themselves."""
    rig = make_rig(model, block_tokens=256)
    rig.run(append(prompt(5), name="first"))
    before = mx.get_active_memory()
    names = [f"s{i}" for i in range(8)]
    rig.run(*(append(prompt(900), name=name) for name in names))
    turns = [append(prompt(5), name=name, num_kept=4) for name in names]
    rig.run(*turns)
    live_bytes = sum(rig.end(turn).live_bytes for turn in turns)
    assert mx.get_active_memory() - before < 4 * live_bytes
    after = generate(prompt(5), 300, name="s3", num_kept=4)
    rig.run(after)
    assert rig.tokens(after) == alone(model, prompt(5), 300)[0]


def test_a_turn_does_not_reuse_kv_of_other_tokens_that_a_cancelled_turn_left_in_its_session(
    make_rig, model
) -> None:
    """The turn was submitted before an abandoned one of the same session had ended with other tokens."""
    rig = make_rig(model)
    rig.run(append(prompt(20, salt=5)))
    turn = generate(prompt(20), 4, num_kept=19)
    rig.run(turn)
    assert rig.tokens(turn) == alone(model, prompt(20), 4)[0]


def test_a_prompt_with_a_token_outside_the_vocabulary_fails_and_a_concurrent_turn_completes(
    make_rig, model
) -> None:
    rig = make_rig(model)
    bad, good = append([*prompt(9), 10**6, 1]), generate(prompt(20), 4, name="other")
    rig.run(bad, good)
    assert (type(rig.end(bad)), type(rig.end(good))) == (FaultedTurn, FinishedTurn)
