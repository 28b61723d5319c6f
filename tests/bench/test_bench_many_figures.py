"""What follows from a crowd's turns: who was forgotten, where KV was found, what a session takes."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest
from made_crowds import make_built, make_turn

from bench.old.many.checks import checks
from bench.old.many.plan import order
from bench.old.many.summary import ManySummary, per_session, summarise
from bench.old.many.turns import Account, forgotten, found
from bench.watch import Reading
from turnkeep_client.messages import Histogram

ANSWERED, STILL, REMEMBERED, LIMIT, ACCOUNT = range(5)
SESSIONS = 20
TOTAL = Account(cached=99 * SESSIONS, prefilled=(96 + 21) * SESSIONS, generated=14 * SESSIONS)


def make_reading(at_s: float, **changes: Any) -> Reading:
    fields: dict[str, Any] = {
        "at_s": at_s,
        "worker": "w",
        "uptime_s": at_s,
        "process_bytes": round(50e6 + 4000 * min(at_s, SESSIONS)),
        "resident_kv_bytes": 10_000,
        "max_memory_bytes": 20_000,
        "sessions": 1,
        "resident_sessions": 1,
        "running": 0,
        "waiting": 0,
        "written_bytes": 0,
        "restored_bytes": 0,
        "stored_bytes": 60_000,
        "unwritten": 0,
        "lag": Histogram((), (0,), 0.0, 0),
    }
    return Reading(**(fields | changes))


def summary(**changes: Any) -> ManySummary:
    fields: dict[str, Any] = {
        "built": [make_built(i) for i in range(SESSIONS)],
        "turns": [make_turn(i) for i in range(SESSIONS)],
        "readings": [make_reading(float(i)) for i in range(150)],
        "rewinds": 0,
        "looks": SESSIONS,
        "over_limit": 0,
        "written_at_s": 100.0,
        "account": TOTAL,
        "cold_s": (0.002,),
    }
    fields |= changes
    return summarise(fields.pop("built"), fields.pop("turns"), fields.pop("readings"), **fields)


def verdicts(made: ManySummary, *, own: bool = True) -> list[bool | None]:
    return [check.passed for check in checks(made, SESSIONS, own=own) if check.exact]


def test_a_good_run_keeps_every_promise():
    made = summary()
    assert verdicts(made) == [True] * 5
    assert made.ssd_bytes_per_session == 60_000 / SESSIONS
    assert made.per_session.size_bytes == pytest.approx(4000, rel=0.01)
    assert [(one.place, one.whole.count) for one in made.places] == [("SSD", SESSIONS)]


def test_nothing_is_promised_of_no_sessions():
    made = summary(built=[], turns=[], readings=[], looks=0, account=None, written_at_s=None)
    assert verdicts(made) == [False, None, None, None, None]


def test_a_session_that_was_not_asked_leaves_open_whether_all_answer():
    turns = [make_turn(i) for i in range(SESSIONS - 1)]
    assert verdicts(summary(turns=turns, account=None))[STILL] is None


def test_a_session_that_never_answered_after_it_was_built_breaks_the_promise():
    turns = [make_turn(i) for i in range(SESSIONS)]
    turns[3] = make_turn(3, error="timeout")
    found = verdicts(summary(turns=turns))
    assert (found[ANSWERED], found[STILL], found[ACCOUNT]) == (False, False, None)
    later = [*turns, make_turn(3)]
    assert verdicts(summary(turns=later))[STILL] is True


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, False),
        ({"told": 0}, True),
        ({"prompt_tokens": 20, "position": 30}, True),
        ({"position": 131}, True),
        ({"rewritten_from": 90, "prompt_tokens": 95, "position": 105}, False),
        ({"rewritten_from": 90, "prompt_tokens": 90, "position": 100}, True),
        ({"told": None}, False),
        ({"held": None, "told": 3}, False),
        ({"error": "timeout"}, False),
        ({"error": "timeout", "told": 7}, True),
    ],
)
def test_a_session_is_forgotten_where_its_position_does_not_follow(changes, lost):
    assert forgotten(make_turn(5, **changes)) is lost
    made = summary(turns=[make_turn(5, **changes)])
    assert made.forgotten == ((5,) if lost else ())
    assert verdicts(made)[REMEMBERED] is not lost


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"resident": True}, "memory"),
        ({"resident": True, "cached_tokens": 0}, "memory"),
        ({"cached_tokens": 50}, "SSD"),
        ({"cached_tokens": 49}, "prefilled"),
        ({"cached_tokens": 0}, "prefilled"),
        ({"held": None}, None),
        ({"error": "timeout"}, None),
    ],
)
def test_where_kv_was_found_follows_from_what_the_worker_said_before_and_after(changes, place):
    assert found(make_turn(0, **changes)) == place


def test_one_reading_over_the_limit_breaks_the_promise():
    readings = [make_reading(float(i)) for i in range(150)]
    readings[70] = make_reading(70.0, resident_kv_bytes=20_001)
    assert verdicts(summary(readings=readings))[LIMIT] is False
    assert verdicts(summary(over_limit=1))[LIMIT] is False


def test_a_worker_that_counts_other_tokens_than_it_told_is_caught():
    other = Account(cached=TOTAL.cached, prefilled=TOTAL.prefilled + 1, generated=TOTAL.generated)
    assert verdicts(summary(account=other))[ACCOUNT] is False
    assert verdicts(summary(account=other), own=False)[ACCOUNT] is None


def test_a_worker_whose_first_chunks_wait_for_the_whole_session_is_caught():
    """One prefilled token takes 2 ms; it says 20 of them, and lets the client wait for all."""

    def turns(of: Any) -> list[Any]:
        return [
            make_turn(i % SESSIONS, held=100 + 10 * i, told=100 + 10 * i, first_chunk_s=0.01 + 0.002 * of(i))
            for i in range(40)
        ]

    honest = summary(turns=turns(lambda i: 20 + i % 3))
    liar = summary(turns=turns(lambda i: 120 + 10 * i + i % 3))
    assert [checks(made, SESSIONS, own=True)[5].passed for made in (honest, liar)] == [True, False]
    assert summary(cold_s=()).wait is None


def test_memory_of_a_session_is_told_with_its_spread_over_the_build():
    built = [make_built(i) for i in range(200)]
    noise = random.Random(5)
    readings = [
        make_reading(float(i), process_bytes=round(50e6 + 4000 * i + noise.gauss(0, 3000)))
        for i in range(200)
    ]
    made = per_session(built, readings)
    assert made.low < 4000 < made.high
    assert made.high - made.low < 1000


def test_memory_of_a_session_needs_several_readings():
    built = [make_built(i) for i in range(SESSIONS)]
    assert per_session(built, [make_reading(float(i)) for i in range(3)]) is None
    assert per_session([], [make_reading(float(i)) for i in range(30)]) is None


def test_every_session_is_asked_and_few_are_asked_often():
    chosen = list(islice(order(50, 1.1, 3), 2000))
    assert set(chosen[:100]) == set(range(50))
    counts = sorted((chosen.count(i) for i in range(50)), reverse=True)
    assert counts[0] > 5 * counts[25]
    assert list(islice(order(50, 1.1, 3), 2000)) == chosen
    assert list(islice(order(50, 1.1, 4), 2000)) != chosen
    even = list(islice(order(50, 0.0, 3), 20_000))
    assert max(even.count(i) for i in range(50)) < 2 * min(even.count(i) for i in range(50))
    assert list(islice(order(1, 1.1, 3), 5)) == [0] * 5
