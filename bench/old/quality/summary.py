"""What was measured of each precision, and what follows from it. Pure."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec import Struct

from bench.old import stats
from bench.old.report import Check, Report, Series
from bench.old.stats import Middle  # noqa: TC001  # msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence


class Kept(Struct, frozen=True, kw_only=True, tag_field="kind", tag="kept"):
    """How a precision keeps KV, and the bytes of a token in memory and in the file of a whole block."""

    kv_bits: int | None
    caches: str
    kv_bytes_per_token: int
    disk_bytes_per_token: float


class Window(Struct, frozen=True, kw_only=True, tag_field="kind", tag="window"):
    """The tokens of a window that count.

    `loss` is the sum of their -log p; at so many places (`same`) the likeliest one is full precision's too.
    """

    kv_bits: int | None
    tokens: int
    loss: float
    same: int


class Answer(Struct, frozen=True, kw_only=True, tag_field="kind", tag="answer"):
    """An answer's tokens, and how many of them, from the first on, are those of full precision."""

    kv_bits: int | None
    tokens: int
    same: int


class Side(Struct, frozen=True, kw_only=True):
    """One precision. `perplexity_ratio` is to full precision, window by window; None for that itself."""

    kv_bits: int | None
    perplexity: float
    perplexity_ratio: Middle | None
    likeliest_equal: float
    answers_equal: float | None
    whole_answers_equal: int | None
    kv_bytes_per_token: int
    disk_bytes_per_token: float


class Summary(Struct, frozen=True, kw_only=True):
    """The precisions, full first; `tokens` are those that perplexity is taken over."""

    tokens: int
    answers: int
    sides: tuple[Side, ...]


class QualityReport(Report, frozen=True, kw_only=True):
    """The report of `bench quality`."""

    summary: Summary
    kept: tuple[Kept, ...]
    windows: tuple[Window, ...]
    answers: tuple[Answer, ...]


def summarise(kept: Sequence[Kept], windows: Sequence[Window], answers: Sequence[Answer]) -> Summary:
    """Aggregate what is known so far; a precision without a window yet is left out."""
    full = _of(windows, None)
    sides = [
        _side(one, full, _of(windows, one.kv_bits), [a for a in answers if a.kv_bits == one.kv_bits])
        for one in kept
        if _of(windows, one.kv_bits)
    ]
    return Summary(
        tokens=sum(window.tokens for window in full),
        answers=sum(answer.kv_bits is None for answer in answers),
        sides=tuple(sides),
    )


def series(windows: Sequence[Window], answers: Sequence[Answer]) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    found = {}
    for bits in dict.fromkeys(window.kv_bits for window in windows):
        name = f"{bits} bits" if bits else "full precision"
        losses = tuple(window.loss / window.tokens for window in _of(windows, bits))
        found[f"loss per token: {name}"] = Series(unit="nat", better="lower", values=losses)
        shares = tuple(answer.same / answer.tokens for answer in answers if answer.kv_bits == bits)
        if bits and shares:
            found[f"equal beginnings of answers: {name}"] = Series(unit="", better="higher", values=shares)
    return found


def checks(summary: Summary) -> tuple[Check, ...]:
    """Hold against what is promised: fewer bits take less room. How much is lost is told, not promised."""
    full, *others = summary.sides or (None,)
    sizes = [(side.kv_bytes_per_token, side.disk_bytes_per_token) for side in summary.sides]
    falls = all(a > c and b > d for (a, b), (c, d) in pairwise(sizes))
    return (
        Check(
            name="fewer bits take less memory and disk",
            passed=falls if full is not None and others else None,
            detail=", ".join(f"{memory:,} and {disk:,.0f} bytes" for memory, disk in sizes) or "not measured",
            exact=True,
        ),
    )


def _of(windows: Sequence[Window], bits: int | None) -> list[Window]:
    return [window for window in windows if window.kv_bits == bits]


def _side(kept: Kept, full: list[Window], mine: list[Window], answers: list[Answer]) -> Side:
    ratios = [math.exp(b.loss / b.tokens - a.loss / a.tokens) for a, b in zip(full, mine, strict=False)]
    num_tokens, said = sum(window.tokens for window in mine), sum(answer.tokens for answer in answers)
    return Side(
        kv_bits=kept.kv_bits,
        perplexity=math.exp(sum(window.loss for window in mine) / num_tokens),
        perplexity_ratio=None if kept.kv_bits is None else stats.middle(ratios),
        likeliest_equal=sum(window.same for window in mine) / num_tokens,
        answers_equal=sum(answer.same for answer in answers) / said if said else None,
        whole_answers_equal=sum(answer.same == answer.tokens for answer in answers) if said else None,
        kv_bytes_per_token=kept.kv_bytes_per_token,
        disk_bytes_per_token=kept.disk_bytes_per_token,
    )
