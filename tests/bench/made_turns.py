"""Turns as a worker in good health would give them, for what is computed from turns."""

from __future__ import annotations

import random
from typing import Any

from bench.old.session.turns import Answer, Memory, Turn

PER_TOKEN = 46_080


def make_turns(
    num: int, *, seed: int = 1, every_s: float = 30.0, prompt: int = 40, tokens: int = 64
) -> list[Turn]:
    noise = random.Random(seed)
    turns, position = [], 0
    for number in range(1, num + 1):
        context = position + prompt
        answer = Answer(
            first_chunk_s=0.3 + noise.gauss(0, 0.01),
            queued_s=0.001,
            prefill_s=0.25,
            first_token_s=0.29,
            position_before=position,
            position=context + tokens,
            prompt_tokens=context,
            cached_tokens=max(position - 1, 0),
            prefilled_tokens=context - max(position - 1, 0),
            completion_tokens=tokens,
            finish_reason="length",
            kv_live_bytes=PER_TOKEN * (context + tokens - 1),
            rewritten_from=None,
        )
        position = answer.position
        latency_s = 1.8 + noise.gauss(0, 0.02)
        memory = Memory(
            at_s=(number - 1) * every_s + latency_s,
            worker="w",
            uptime_s=10 + number * every_s,
            process_bytes=700_000_000 + answer.kv_live_bytes + round(noise.gauss(0, 1e5)),
            resident_kv_bytes=answer.kv_live_bytes,
            written_bytes=5_000_000 * number,
        )
        started_s = (number - 1) * every_s
        turns.append(
            Turn(turn=number, started_s=started_s, latency_s=latency_s, answer=answer, memory=memory)
        )
    return turns


def with_answer(turn: Turn, **changes: Any) -> Turn:
    import msgspec

    assert turn.answer is not None
    return msgspec.structs.replace(turn, answer=msgspec.structs.replace(turn.answer, **changes))
