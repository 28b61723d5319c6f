"""What `bench replay` takes from a log, and which replays can be compared."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from bench.record import COMPARABLE, OTHER, first_difference, fold, pair_up, standings
from turnkeep_client.log import Entry
from turnkeep_client.messages import encode
from turnkeep_client.subjects import SessionKey

APPEND = {"type": "append", "id": "a", "text": "x"}
GENERATE = {"type": "generate", "max_tokens": 2}
SIZES = {"tokens": 1, "cached_tokens": 0, "prefilled_tokens": 1, "kv_live_bytes": 1, "seconds": 0.1}
COUNTS = ("prompt_tokens", "cached_tokens", "prefilled_tokens", "completion_tokens")
SECONDS = dict.fromkeys(("queued", "prefill", "first_token", "total"), 0.1)
REFUSED = {"type": "failed", "id": "x", "code": "expired", "message": "", "retryable": True}


def entry(seq: int, kind: Any, body: dict[str, Any], at_s: float = 0, session: str = "s") -> Entry:
    stored = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=at_s)
    return Entry(seq, SessionKey("default", session), kind, stored, encode(body), "m", "d")


def appended(seq: int, **more: Any) -> dict[str, Any]:
    return {"type": "appended", "id": "x", "seq": seq, "position": 1, **SIZES, **more}


def test_what_changed_nothing_is_left_out_and_the_rest_keeps_its_times() -> None:
    record = fold(
        [
            entry(1, "in", APPEND, 10),
            entry(2, "in", {**APPEND, "id": "b", "expect_position": 3}, 11),
            entry(3, "out", appended(1), 12),
            entry(4, "out", appended(2), 13),
            entry(5, "in", APPEND, 14),
            entry(6, "out", appended(5, repeat_of=1), 15),
            entry(7, "in", {**APPEND, "id": "c"}, 16),
            entry(8, "out", {**REFUSED, "seq": 7}, 17),
            entry(9, "in", {**APPEND, "id": "d"}, 18),
            entry(10, "in", {"type": "no"}, 19),
            entry(11, "in", {**APPEND, "id": "e"}, 12.5, "t"),
            entry(12, "out", appended(11), 14, "t"),
        ]
    )
    assert record.left_out == {"repeated": 1, "refused": 1, "not valid, or not answered": 2}
    first, second = record.sessions.values()
    assert [(step.asked.seq, step.answered.seq, step.took_s) for step in first] == [(1, 3, 2), (2, 4, 2)]
    assert first[1].request.expect_position is None
    assert [(step.asked.seq, step.took_s) for step in second] == [(11, 1.5)]
    assert record.begin == first[0].asked.stored


def test_records_are_the_same_where_the_same_was_asked() -> None:
    def digest(text: str, at_s: float, session: str) -> str:
        request = {**APPEND, "id": session, "text": text}
        return fold([entry(1, "in", request, at_s, session), entry(2, "out", appended(1), 9, session)]).digest

    assert digest("x", 1, "s") == digest("x", 2, "t")
    assert digest("x", 1, "s") != digest("y", 1, "s")


def test_answers_behind_a_difference_a_fault_or_another_prompt_are_not_compared() -> None:
    def stood(*answers: tuple[int, int] | None) -> list[tuple[str | None, int | None]]:
        """Replay three answers of a prompt of 9 tokens and the tokens 1 and 2; None is refused."""
        both = []
        for told in ([(9, 2)] * 3, answers):
            entries = []
            for i, one in enumerate(told):
                body = REFUSED
                if one is not None:
                    usage = dict.fromkeys(COUNTS, 1) | {"prompt_tokens": one[0]}
                    body = {"type": "generated", "id": "x", "position": 1, "text": "", "usage": usage}
                    body |= {"tokens": [1, one[1]], "seconds": SECONDS, "kv_live_bytes": 1}
                    body |= {"finish_reason": "length"}
                entries.append(entry(2 * i + 1, "in", {**GENERATE, "id": f"{i}"}))
                entries.append(entry(2 * i + 2, "out", {**body, "seq": 2 * i + 1}))
            both.append(list(pair_up(entries)))
        return list(standings(both[0], {one.request.id: one for one in both[1]}))

    same, after = (COMPARABLE, None), ("after a difference", None)
    assert stood((9, 2), (9, 2), (9, 2)) == [same, same, same]
    assert stood((9, 2), (9, 3), (9, 2)) == [same, (COMPARABLE, 1), after]
    assert stood((8, 2), (9, 2), (9, 2)) == [(OTHER, None), after, after]
    assert stood((9, 2), None, (9, 2)) == [same, (None, None), after]
    assert stood((9, 2)) == [same, (None, None), (None, None)]


def test_a_first_difference_is_where_one_answer_leaves_the_other() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) == 2
