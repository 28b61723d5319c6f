"""Runs histories by their seeds: `python -m tests.simulation [SEED] [--histories N]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

if os.environ.get("PYTHONHASHSEED") != "0":  # else the same seed would be another history in each process
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tests.simulation", *sys.argv[1:]])

from .history import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--histories", type=int, default=1, help="so many seeds from SEED on")
    parser.add_argument("--tell", action="store_true", help="tell the stories of all, not of failures alone")
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    begun_s, num_wrong = time.monotonic(), 0
    for seed in range(asked.seed, asked.seed + asked.histories):
        outcome = simulate(seed, tell=asked.tell)
        counts.update(outcome.counts)
        if outcome.wrong:
            num_wrong += 1
            if num_wrong <= 5:
                told = simulate(seed, tell=True)
                if told.trace != outcome.trace or told.wrong != outcome.wrong:
                    print(f"seed {seed} is not replayed exactly")
                print(*told.story, sep="\n")
            print(f"seed {seed}:", *outcome.wrong, sep="\n  ")
        elif asked.tell:
            print(*outcome.story, sep="\n")
    took_s = time.monotonic() - begun_s
    said = ", ".join(f"{number} {name}" for name, number in counts.items())
    print(f"{asked.histories} histories in {took_s:.1f} s, {num_wrong} wrong: {said}")
    return bool(num_wrong)


if __name__ == "__main__":
    sys.exit(main())
