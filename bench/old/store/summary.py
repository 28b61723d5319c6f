"""What was measured of a store, what follows from it, and what is promised. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from bench.old import stats
from bench.old.report import Check, Report, Series
from bench.old.stats import Middle  # noqa: TC001  # msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Of the speed at which MLX alone loads and evaluates the same files.
LEAST_SHARE: Final = 0.8
#: What is promised of an index is promised of one of this size.
PROMISED_BLOCKS: Final = 100_000
PROMISED_CHAIN: Final = 1_000
MOST_OPEN_S: Final = 1.0
MOST_MATCH_S: Final = 0.005


class Filled(Struct, frozen=True, kw_only=True, tag_field="kind", tag="filled"):
    """A directory was filled with so many blocks; nothing is measured of that."""

    blocks: int


class Read(Struct, frozen=True, kw_only=True, tag_field="kind", tag="restore"):
    """A session of so many tokens, read by the store and, before or after it, by MLX alone."""

    tokens: int
    size_bytes: int
    restore_s: float
    load_s: float


class Opened(Struct, frozen=True, kw_only=True, tag_field="kind", tag="index"):
    """A directory of so many blocks opened, and a prefix of `chain` blocks found in it."""

    blocks: int
    chain: int
    open_s: float
    match_s: float


class Length(Struct, frozen=True, kw_only=True):
    """All restores of one length. Rates are bytes per second; `share` is their ratio, pair by pair."""

    tokens: int
    size_bytes: int
    restore_rate: Middle
    load_rate: Middle
    share: Middle


class Summary(Struct, frozen=True, kw_only=True):
    """The aggregates."""

    lengths: tuple[Length, ...]
    blocks: int | None
    chain: int | None
    open_s: Middle | None
    match_s: Middle | None


class StoreReport(Report, frozen=True, kw_only=True):
    """The report of `bench store`."""

    summary: Summary
    reads: tuple[Read, ...]
    opened: tuple[Opened, ...]


def summarise(reads: Sequence[Read], opened: Sequence[Opened]) -> Summary:
    """Aggregate all measurements so far."""
    found = [_length([read for read in reads if read.tokens == tokens]) for tokens in _lengths(reads)]
    return Summary(
        lengths=tuple(found),
        blocks=opened[0].blocks if opened else None,
        chain=opened[0].chain if opened else None,
        open_s=stats.middle([one.open_s for one in opened]),
        match_s=stats.middle([one.match_s for one in opened]),
    )


def series(reads: Sequence[Read], opened: Sequence[Opened]) -> dict[str, Series]:
    """Return the measures that two reports are compared by."""
    found = {}
    for tokens in _lengths(reads):
        some = [read for read in reads if read.tokens == tokens]
        found[f"restore: {tokens} tokens"] = _lower([read.restore_s for read in some])
        found[f"MLX alone: {tokens} tokens"] = _lower([read.load_s for read in some])
    if opened:
        found["opening the index"] = _lower([one.open_s for one in opened])
        found["matching a prefix"] = _lower([one.match_s for one in opened])
    return found


def checks(summary: Summary) -> tuple[Check, ...]:
    """Hold the aggregates against what is promised; all of them are timings."""
    slowest = min(summary.lengths, key=lambda length: length.share.median, default=None)
    size = (summary.blocks or 0) >= PROMISED_BLOCKS and (summary.chain or 0) >= PROMISED_CHAIN
    return (
        Check(
            name=f"a restore runs at {LEAST_SHARE} or more of MLX's own speed",
            passed=None if slowest is None else slowest.share.median >= LEAST_SHARE,
            detail="nothing was restored"
            if slowest is None
            else f"{slowest.share.median:.2f} at {slowest.tokens:,} tokens",
            exact=False,
        ),
        _below("the index opens within 1 s", summary.open_s, MOST_OPEN_S, f"{summary.blocks} blocks", size),
        _below(
            "a prefix is matched within 5 ms", summary.match_s, MOST_MATCH_S, f"{summary.chain} blocks", size
        ),
    )


def _below(name: str, measured: Middle | None, most_s: float, what: str, size: bool) -> Check:
    passed = measured.median <= most_s if measured is not None and size else None
    detail = "not measured" if measured is None else f"{measured.median * 1000:.1f} ms for {what}"
    return Check(name=name, passed=passed, detail=detail, exact=False)


def _lengths(reads: Sequence[Read]) -> list[int]:
    return sorted({read.tokens for read in reads})


def _length(reads: Sequence[Read]) -> Length:
    restore = stats.middle([read.size_bytes / read.restore_s for read in reads])
    load = stats.middle([read.size_bytes / read.load_s for read in reads])
    share = stats.middle([read.load_s / read.restore_s for read in reads])
    if restore is None or load is None or share is None:
        raise AssertionError("a length has reads")
    return Length(
        tokens=reads[0].tokens,
        size_bytes=reads[0].size_bytes,
        restore_rate=restore,
        load_rate=load,
        share=share,
    )


def _lower(values: Sequence[float]) -> Series:
    return Series(unit="s", better="lower", values=tuple(values))
