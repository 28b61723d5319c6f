"""Turns of sessions under load, as an honest worker would answer them, to bend in tests."""

from __future__ import annotations

from typing import Any

from bench.old.load.turns import Turn
from bench.old.session.turns import Answer

#: Of one prefilled token.
PREFILL_S = 0.002


def make_answer(**changes: Any) -> Answer:
    fields: dict[str, Any] = {
        "first_chunk_s": 0.1,
        "queued_s": 0.0,
        "prefill_s": 0.05,
        "first_token_s": 0.1,
        "position_before": 100,
        "position": 130,
        "prompt_tokens": 120,
        "cached_tokens": 100,
        "prefilled_tokens": 20,
        "completion_tokens": 10,
        "finish_reason": "length",
        "kv_live_bytes": 1000,
        "rewritten_from": None,
    }
    return Answer(**(fields | changes))


def make_turn(answer: dict[str, Any] | None = None, **changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "level": 0,
        "session": 0,
        "turn": 1,
        "due_s": 0.0,
        "sent_s": 0.0,
        "latency_s": 1.0,
        "gaps_s": (0.1,) * 9,
        "answer": make_answer(**(answer or {})),
        "joined": True,
        "error": None,
    }
    return Turn(**(fields | changes))


def make_load(*, lies: bool = False) -> list[Turn]:
    """Eight sessions of growing length, one at a time; a liar prefills all of them every turn."""
    turns = []
    for session in range(8):
        position = 0
        for number in range(4):
            own = 60 + 7 * number + (40 * session if number == 0 else 0)
            prompt = position + own
            ran = prompt if lies else own
            turns.append(
                make_turn(
                    {
                        "first_chunk_s": 0.01 + PREFILL_S * ran + 0.001 * (number % 2),
                        "position_before": position,
                        "position": prompt + 10,
                        "prompt_tokens": prompt,
                        "cached_tokens": position,
                        "prefilled_tokens": own,
                    },
                    session=session,
                    turn=number,
                )
            )
            position = prompt + 10
    return turns
