"""What `bench replay` takes from a log, and which replays can be compared."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from bench.record import COMPARABLE, Following, Step, first_difference, fold
from turnkeep_client.log import Entry
from turnkeep_client.messages import decode_request, decode_result, encode
from turnkeep_client.subjects import SessionKey

APPEND = {"type": "append", "id": "a", "text": "x"}


def entry(seq: int, kind: Any, body: dict[str, Any], at_s: float, session: str = "s") -> Entry:
    stored = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=at_s)
    return Entry(seq, SessionKey("default", session), kind, stored, encode(body), "m", "d")


def appended(seq: int, **more: Any) -> dict[str, Any]:
    sizes = {"tokens": 1, "cached_tokens": 0, "prefilled_tokens": 1, "kv_live_bytes": 1, "seconds": 0.1}
    return {"type": "appended", "id": "x", "seq": seq, "position": 1, **sizes, **more}


def test_what_changed_nothing_is_left_out_and_the_rest_keeps_its_times() -> None:
    refused = {"type": "failed", "id": "x", "seq": 7, "code": "expired", "message": "", "retryable": True}
    record = fold(
        [
            entry(1, "in", APPEND, 10),
            entry(2, "in", {**APPEND, "id": "b", "expect_position": 3}, 11),
            entry(3, "out", appended(1), 12),
            entry(4, "out", appended(2), 13),
            entry(5, "in", APPEND, 14),
            entry(6, "out", appended(5, repeat_of=1), 15),
            entry(7, "in", {**APPEND, "id": "c"}, 16),
            entry(8, "out", refused, 17),
            entry(9, "in", {**APPEND, "id": "d"}, 18),
            entry(10, "in", {"type": "no"}, 19),
            entry(11, "in", {**APPEND, "id": "e"}, 12.5, "t"),
            entry(12, "out", appended(11), 14, "t"),
        ]
    )
    assert record.left_out == {"repeated": 1, "refused": 1, "not answered": 1, "no valid request": 1}
    first, second = record.sessions.values()
    assert [(s.asked_s, s.answered_s, s.waits) for s in first] == [(0, 2, False), (1, 3, False)]
    assert first[1].request.expect_position is None
    assert [(s.asked_s, s.answered_s) for s in second] == [(2.5, 4)]
    assert (record.num_at_once, record.models) == (2, ("m",))


def test_records_are_the_same_where_the_same_was_asked() -> None:
    def digest(text: str, at_s: float, session: str) -> str:
        request = {**APPEND, "id": session, "text": text}
        return fold([entry(1, "in", request, at_s, session), entry(2, "out", appended(1), 9, session)]).digest

    assert digest("x", 1, "s") == digest("x", 2, "t")
    assert digest("x", 1, "s") != digest("y", 1, "s")


def test_answers_behind_a_difference_are_not_compared_until_a_rewind_before_it() -> None:
    following = Following()

    def take(kind: str, position: int, tokens: list[int], told: list[int]) -> tuple[str | None, int | None]:
        body: dict[str, Any] = {"type": kind, "id": "x", "seq": 1, "position": position}
        if kind == "generated":
            body |= {"text": "", "finish_reason": "length", "kv_live_bytes": 1}
            body |= {"seconds": dict.fromkeys(("queued", "prefill", "first_token", "total"), 0.1)}
            counts = ("prompt_tokens", "cached_tokens", "prefilled_tokens", "completion_tokens")
            body |= {"usage": dict.fromkeys(counts, 1)}
        asked = (
            {"type": "generate", "id": "a", "max_tokens": 2}
            if kind == "generated"
            else {"type": "rewind", "id": "a", "position": position}
        )
        given, other = (decode_result(encode({**body, "tokens": some})) for some in (tokens, told))
        step = Step(decode_request(encode(asked)), given, 0, 1, True, None)
        return following.take(step, other, None)

    assert take("generated", 10, [1, 2], [1, 2]) == (COMPARABLE, None)
    assert take("generated", 20, [1, 2], [1, 3]) == (COMPARABLE, 1)
    assert take("generated", 30, [1, 2], [1, 2]) == ("after a difference", None)
    assert take("rewound", 12, [], []) == (None, None)
    assert take("generated", 20, [1, 2], [1, 2]) == ("after a difference", None)
    assert take("rewound", 10, [], []) == (None, None)
    assert take("generated", 20, [1, 2], [1, 2]) == (COMPARABLE, None)


def test_a_first_difference_is_where_one_answer_leaves_the_other() -> None:
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) == 2
