"""Draw `docs/turns.svg`: the time to the first token, turn by turn, of sessions under several cache policies.

    turnkeep bench session --turns 2000 --max-tokens 16 --model FOLDER --window 1024 --out window
    turnkeep bench session --turns 2000 --max-tokens 16 --model FOLDER --out full
    .venv/bin/python docs/draw_turns.py window/*.json full/*.json

Each line is one report. Prompts differ in length: turns of 60 to 200 new tokens are shown, as medians of 20.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Final

from figures import LINES, axes

from bench.report import read

if TYPE_CHECKING:
    from bench.report import Report

#: New tokens of the turns that are shown, and how many turns make a point.
NEW: Final = range(60, 201)
AROUND: Final = 20


def policy(report: Report) -> str:
    """Name the session's cache policy."""
    if report.plan["window"] is not None:
        return f"{report.plan['sink']} sinks and a window of {report.plan['window']:,}"
    return "full attention" if report.plan["resident"] is None else f"paged:{report.plan['resident']}"


def points(report: Report) -> list[tuple[float, float, int]]:
    """Return turns, with the time to their first chunks in milliseconds, and the session's positions."""
    found = []
    shown = [(at, turn) for at, turn in enumerate(report.turns, 1) if turn.prefilled_tokens in NEW]
    for start in range(0, len(shown) - AROUND + 1, AROUND):
        numbers, turns = zip(*shown[start : start + AROUND], strict=True)
        first_s = statistics.median(turn.first_s for turn in turns if turn.first_s is not None)
        found.append((statistics.median(numbers), 1e3 * first_s, turns[-1].position or 0))
    return found


def main() -> None:
    """Draw the reports, and print their points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="of `turnkeep bench session`")
    labels = {"xlabel": "turn", "ylabel": "time to the first token (ms)"}
    with axes(Path(__file__).with_name("turns.svg"), **labels) as made:
        for report, (colour, _) in zip(map(read, parser.parse_args().reports), LINES, strict=False):
            found = points(report)
            made.plot(
                [at for at, *_ in found], [first for _, first, _ in found], color=colour, label=policy(report)
            )
            rows = [f"turn {at:,.0f}: {first:.1f} ms, {position:,} tokens" for at, first, position in found]
            print(policy(report), *rows, sep="\n  ")  # noqa: T201  # the program's output
        made.set(xlim=(0, None), ylim=(0, None))


if __name__ == "__main__":
    main()
