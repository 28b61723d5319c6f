"""What follows from turns under load: fairness, lateness, gaps, throughput, arrivals, all on made values."""

from __future__ import annotations

import statistics
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_loads import make_answer, make_load, make_turn

from bench.corpus import Conversation, Corpus, Utterance, built_in
from bench.faults import BenchError
from bench.old.load import arrivals, shares
from bench.old.load.checks import checks
from bench.old.load.plan import Level
from bench.old.load.stall import by_round
from bench.old.load.summary import summarise, wait
from bench.old.load.turns import Span, first_chunk_s, gaps, lateness_s, whole_s
from bench.script import scripts
from bench.watch import Reading, lag
from turnkeep_client.messages import Histogram

ANSWERED, USAGE, JOINED, WAIT = range(4)
RATES = st.lists(st.floats(0.01, 1e6), min_size=2, max_size=30)


@given(RATES)
def test_jains_index_lies_between_one_share_and_all_alike(rates):
    assert 1 / len(rates) - 1e-9 <= shares.jain(rates) <= 1 + 1e-9


def test_jains_index_is_that_of_its_definition():
    assert shares.jain([3, 3, 3]) == pytest.approx(1)
    assert shares.jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert shares.jain([1, 2, 3]) == pytest.approx(36 / 42)


def test_fairness_compares_sessions_of_equal_work_alone():
    turns = [
        make_turn(session=0, latency_s=1.0),
        make_turn(session=1, latency_s=2.0),
        make_turn({"completion_tokens": 3}, session=2, latency_s=9.0),
        make_turn(session=3, latency_s=1.0),
        make_turn(session=3, answer=None, error="timeout"),
    ]
    turns[-1] = msgspec.structs.replace(turns[-1], answer=None)
    assert shares.rates(turns) == {0: 10.0, 1: 5.0}
    found = shares.fairness(turns)
    assert (found.sessions, found.max_min) == (2, 2.0)
    assert found.jain == pytest.approx(225 / 250)
    assert shares.fairness(turns[:1]) is None


def test_what_a_session_waits_to_be_sent_is_part_of_its_rate():
    late = [make_turn(session=0), make_turn(session=1, due_s=1.0, sent_s=10.0)]
    assert shares.rates(late) == {0: 10.0, 1: 1.0}


def test_a_turn_that_was_sent_late_counts_from_when_it_was_due():
    """No coordinated omission: what a slow answer delays is not measured as if it had been asked later."""
    turn = make_turn(due_s=2.0, sent_s=5.0)
    assert (lateness_s(turn), whole_s(turn)) == (3.0, 4.0)
    assert first_chunk_s(turn) == pytest.approx(3.1)
    level = summarise(Level("poisson", 2.0), None, [turn, make_turn()], [])
    assert level.lateness.max == 3.0
    assert level.whole.max == 4.0
    assert level.first_chunk.max == pytest.approx(3.1)
    assert summarise(Level("closed", 2), None, [turn], []).lateness is None


def test_chunks_of_one_packet_are_one_arrival():
    assert gaps([]) == gaps([1.0]) == []
    assert gaps([1.0, 1.0001, 1.2, 1.2002, 1.5]) == [(1.0, 1.2), (1.2, 1.5)]


def test_throughput_counts_what_falls_into_the_time_when_the_load_was_full():
    spans = [(0.0, 10.0, 100.0), (5.0, 15.0, 100.0), (20.0, 30.0, 100.0)]
    found = shares.throughput(spans, 10.0)
    assert found.mean == pytest.approx((100 + 50) / 10)
    assert found.slices == pytest.approx([10.0] * 5 + [20.0] * 5)
    assert found.low < found.mean < found.high
    assert shares.throughput([(3.0, 3.0, 40.0)], 10.0).mean == pytest.approx(4.0)
    assert shares.throughput(spans, 0.0) is None
    assert shares.throughput([], 10.0) is None


def test_openings_are_not_part_of_the_load():
    turns = [make_turn(turn=0, latency_s=50.0), make_turn()]
    level = summarise(Level("closed", 1), Span(started_s=0, busy_s=1, ended_s=1), turns, [])
    assert (level.turns, level.whole.max) == (1, 1.0)
    assert level.generated.mean == pytest.approx(10)


def test_a_good_run_keeps_every_promise():
    turns = make_load()
    assert [check.passed for check in checks(turns, wait(turns))] == [True] * 4


def test_a_run_without_turns_promises_nothing():
    assert [check.passed for check in checks([], wait([]))] == [False, None, None, None]


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"answer": None, "error": "timeout"}, ANSWERED),
        ({"answer": make_answer(cached_tokens=99)}, USAGE),
        ({"joined": False}, JOINED),
    ],
)
def test_a_promise_that_one_turn_breaks_is_broken(changes, broken):
    turns = make_load()
    turns[9] = msgspec.structs.replace(turns[9], **changes)
    found = checks(turns, wait(turns))
    assert found[broken].passed is False
    assert [i for i, check in enumerate(found) if check.passed is False] == [broken]


def test_a_worker_whose_first_chunks_wait_for_the_whole_session_is_caught():
    turns = make_load(lies=True)
    found = checks(turns, wait(turns))
    assert [check.passed for check in found] == [True, True, True, False]


def test_arrivals_are_those_of_a_poisson_process_and_the_same_again():
    dues = arrivals.poisson(50.0, 100.0, 8, seed=3)
    every = sorted(due for one in dues for due in one)
    assert len(dues) == 8
    assert all(one == sorted(one) for one in dues)
    assert 4600 < len(every) < 5400
    assert all(0 < due < 100 for due in every)
    pauses = [b - a for a, b in pairwise(every)]
    assert statistics.stdev(pauses) == pytest.approx(statistics.fmean(pauses), rel=0.1)
    assert arrivals.poisson(50.0, 100.0, 8, seed=3) == dues
    assert arrivals.poisson(50.0, 100.0, 8, seed=4) != dues


def recorded_corpus() -> Corpus:
    chats = [Conversation("a", (Utterance("x", 0.0), Utterance("y", 30.0), Utterance("z", 900.0)))] * 2
    return Corpus(built_in().source, tuple(chats))


def test_recorded_arrivals_keep_their_distances_at_the_pace_that_is_asked_for():
    dues = arrivals.recorded(recorded_corpus(), 10.0, 1000.0, 4, seed=1)
    assert all(one[1] - one[0] == pytest.approx(3.0) for one in dues)
    assert all(one[2] - one[0] == pytest.approx(90.0) for one in dues)
    assert len({one[0] for one in dues}) == 4
    short = arrivals.recorded(recorded_corpus(), 10.0, 60.0, 4, seed=1)
    assert all(due < 60 for one in short for due in one)


def test_a_corpus_without_times_is_told():
    with pytest.raises(BenchError, match="has no recorded times"):
        arrivals.recorded(built_in(), 10.0, 60.0, 4, seed=1)


def test_sessions_share_no_first_words_and_begin_with_histories_of_their_own():
    made = scripts(built_in(), [(0, 3), (5, 1), (1, 0)])
    assert [(len(script.history), len(script.turns)) for script in made] == [(0, 3), (5, 1), (1, 0)]
    assert made[0].turn("one", 0)[0]["content"].startswith("[one]\n\n")
    assert made[1].opening("two")[0]["content"].startswith("[two]\n\n")
    assert made[1].turn("two", 0)[0]["content"] == made[1].turns[0]
    assert [script.has_opening for script in made] == [False, True, True]


def test_gaps_are_sorted_by_whether_a_long_prompt_ran():
    stood = [(0.0, 0.2), (0.2, 0.4), (0.9, 1.6), (1.6, 1.7), (2.2, 2.3), (4.5, 4.7)]
    first, second = by_round(stood, [(1.0, 2.0, 50, 40), (4.0, 5.0, 50, 50)], 0.0)
    assert first.alone_s == pytest.approx([0.2, 0.2])
    assert first.during_s == pytest.approx([0.7, 0.1])
    assert (first.tokens, first.prefilled_tokens, first.seconds) == (50, 40, 1.0)
    assert second.alone_s == pytest.approx([0.1])
    assert second.during_s == pytest.approx([0.2])


def reading(counts: tuple[int, ...], total: float) -> Reading:
    return Reading(
        at_s=0,
        worker="w",
        uptime_s=1,
        process_bytes=1,
        resident_kv_bytes=1,
        max_memory_bytes=1,
        sessions=1,
        resident_sessions=1,
        running=0,
        waiting=0,
        written_bytes=0,
        restored_bytes=0,
        stored_bytes=0,
        unwritten=0,
        lag=Histogram((0.01, 0.1), counts, total, sum(counts)),
    )


def test_the_event_loops_lag_is_that_between_two_readings():
    before = reading((1000, 0, 50), 9.0)
    found = lag([before, reading((1098, 2, 50), 10.0)])
    assert (found.mean_s, found.p99_s) == (pytest.approx(0.01), 0.1)
    assert lag([before, reading((1100, 0, 50), 10.0)]).p99_s == 0.01
    assert lag([before, reading((1000, 0, 60), 10.0)]).p99_s is None
    assert lag([before]) is None
    assert lag([before, before]) is None
