"""Sessions and turns of a crowd, as an honest worker would answer them, to bend in tests."""

from __future__ import annotations

from typing import Any

from bench.old.many.turns import Built, Turn


def make_built(number: int, **changes: Any) -> Built:
    fields: dict[str, Any] = {
        "session": number,
        "at_s": 1.0 + number,
        "latency_s": 0.5,
        "position": 100,
        "prefilled_tokens": 96,
        "cached_tokens": 0,
        "generated_tokens": 4,
        "kv_live_bytes": 1000,
    }
    return Built(**(fields | changes))


def make_turn(number: int, **changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "session": number,
        "at_s": 100.0 + number,
        "latency_s": 0.2,
        "held": 100,
        "told": 100,
        "resident": False,
        "first_chunk_s": 0.1,
        "position": 130,
        "prompt_tokens": 120,
        "cached_tokens": 99,
        "prefilled_tokens": 21,
        "generated_tokens": 10,
    }
    return Turn(**(fields | changes))
