"""What follows from the turns of a session: each promise is seen kept, and seen broken."""

from __future__ import annotations

import msgspec
import pytest
from made_turns import PER_TOKEN, make_turns, with_answer

from bench.old.session.checks import checks
from bench.old.session.summary import series, summarise, written, written_per_token, written_per_turn
from bench.old.session.turns import excess_prefilled

ANSWERED, FORMULA, PREFILL, WAIT, DRIFT, GROWTH = range(6)


def verdicts(turns):
    return [check.passed for check in checks(summarise(turns))]


def test_a_good_session_keeps_every_promise():
    turns = make_turns(480)
    summary = summarise(turns)
    assert verdicts(turns) == [True] * 6
    assert summary.kv_bytes_per_token == PER_TOKEN
    assert summary.errors == {}
    assert summary.kv_bounded is False  # it is meant to grow
    assert [bucket.turns for bucket in summary.buckets] == [20] * 24
    assert summary.latency.p50 == pytest.approx(1.8, abs=0.01)
    assert summary.prefilled_tokens_max == 41
    assert summary.written_bytes == 5_000_000 * 479
    assert summary.written_per_token == 5_000_000 / 64
    assert series(turns)["written per generated token"].values == (5_000_000 / 64,) * 479


def test_nothing_is_promised_of_no_turns():
    assert verdicts([]) == [False, None, None, None, None, None]
    assert all(not one.values for one in series([]).values())


def test_an_error_is_counted_by_its_class():
    turns = make_turns(12)
    turns[3] = msgspec.structs.replace(turns[3], answer=None, error="timeout")
    assert summarise(turns).errors == {"timeout": 1}
    assert summarise(turns).answered == 11
    assert verdicts(turns)[ANSWERED] is False


@pytest.mark.parametrize("size", [0, 1, PER_TOKEN * 10**6])
def test_kv_that_is_not_what_the_formula_says_is_named(size):
    turns = make_turns(12)
    turns[6] = with_answer(turns[6], kv_live_bytes=size)
    assert summarise(turns).kv_formula_broken_at == (7,)
    assert verdicts(turns)[FORMULA] is False


def test_a_series_of_zeros_breaks_the_formula_although_it_is_bounded():
    turns = [with_answer(turn, kv_live_bytes=0) for turn in make_turns(12)]
    assert summarise(turns).kv_bounded is True
    assert verdicts(turns)[FORMULA] is False


def test_tokens_that_were_prefilled_again_are_named():
    turns = make_turns(12)
    turns[9] = with_answer(turns[9], prefilled_tokens=turns[9].answer.prompt_tokens, cached_tokens=0)
    summary = summarise(turns)
    assert summary.excess_prefilled_at == (10,)
    assert summary.excess_prefilled_max == turns[9].answer.position_before - 1
    assert verdicts(turns)[PREFILL] is False


def test_what_the_template_rewrote_belongs_to_the_turn():
    turn = with_answer(make_turns(3)[2], rewritten_from=100, prefilled_tokens=149, cached_tokens=99)
    assert turn.answer.prompt_tokens == 248
    assert excess_prefilled(turn.answer) == 0
    assert excess_prefilled(with_answer(turn, prefilled_tokens=150).answer) == 1


def test_a_worker_that_prefills_everything_and_says_that_it_was_cached_is_caught_by_the_clock():
    honest = make_turns(40)
    rate_s = honest[0].answer.first_chunk_s / honest[0].answer.prompt_tokens
    lying = [
        with_answer(turn, first_chunk_s=turn.answer.first_chunk_s + rate_s * turn.answer.position_before)
        for turn in honest
    ]
    assert verdicts(honest)[PREFILL : WAIT + 1] == [True, True]
    assert verdicts(lying)[PREFILL : WAIT + 1] == [True, False]


def test_turns_that_become_slower_drift():
    turns = [
        msgspec.structs.replace(turn, latency_s=turn.latency_s + 0.02 * turn.turn) for turn in make_turns(480)
    ]
    summary = summarise(turns)
    assert summary.latency.drift == pytest.approx(0.02 * 475, abs=0.1)
    assert summary.latency.drift_share == pytest.approx(summary.latency.drift / summary.latency.p50)
    assert verdicts(turns)[DRIFT] is False


def test_a_process_that_leaks_beside_its_kv_is_seen():
    turns = []
    for turn in make_turns(100):
        leaked = turn.memory.process_bytes + 20_000 * turn.turn
        turns.append(
            msgspec.structs.replace(turn, memory=msgspec.structs.replace(turn.memory, process_bytes=leaked))
        )
    assert verdicts(turns)[GROWTH] is False
    assert summarise(turns).beyond_kv.bytes_per_hour == pytest.approx(20_000 * 120, rel=0.2)


def test_a_short_run_does_not_tell_a_leak_from_a_cache_that_fills():
    turns = make_turns(40, every_s=1.0)
    assert summarise(turns).beyond_kv is not None
    assert verdicts(turns)[GROWTH] is None


def test_what_was_written_is_added_up_over_a_restart_of_the_worker():
    memories = [turn.memory for turn in make_turns(4)]
    memories[2] = msgspec.structs.replace(memories[2], uptime_s=1.0, written_bytes=7)
    memories[3] = msgspec.structs.replace(memories[3], uptime_s=31.0, written_bytes=10)
    assert written(memories) == 5_000_000 + 7 + 3
    assert written([]) is None


def test_what_was_written_per_token_leaves_out_turns_that_generated_nothing():
    turns = make_turns(5)
    turns[1] = msgspec.structs.replace(turns[1], answer=None, error="timeout")
    turns[2] = msgspec.structs.replace(turns[2], memory=None)
    assert written_per_turn(turns) == [2 * 5_000_000 / 64, 5_000_000 / 64]
    assert written_per_token(turns) == 4 * 5_000_000 / (3 * 64)
    assert written_per_token(turns[:1]) is None
    assert written_per_token([]) is None
