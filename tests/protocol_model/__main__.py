"""Explores the protocol's model to its end (`make model`), or replays simulated histories in it.

python -m tests.protocol_model [--replay SEED --histories N]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter

from .checker import Exploration, Violation
from .model import Rules
from .replay import PLANS, NotAStepError, replay

#: Explored to their end. The steps of sessions are independent of each other, so each of two sessions with
#: three requests in all is one of these.
FULL = ((("G",), Rules(reads_at_once=True)),)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.protocol_model", description=__doc__)
    parser.add_argument("--replay", type=int, metavar="SEED", help="replay histories from this seed on")
    parser.add_argument("--histories", type=int, default=20)
    asked = parser.parse_args()
    if asked.replay is not None:
        return _replay(asked.replay, asked.histories)
    gc.disable()  # there are no cycles, and collections would look at all states
    return max([_explore(programs, rules) for programs, rules in FULL])


def _explore(programs: tuple[str, ...], rules: Rules) -> int:
    begun_s, found = time.monotonic(), Exploration(rules, programs)
    try:
        found.explore()
    except Violation as wrong:
        print(f"{programs}, {rules}: {wrong.what}", *wrong.trace, sep="\n    ")
        return 1
    took_s = time.monotonic() - begun_s
    print(f"{' and '.join(programs)}: {len(found.states)} states, {found.num_steps} steps, {took_s:.0f} s")
    return 0


def _replay(seed: int, num_histories: int) -> int:
    counts: Counter[str] = Counter()
    for number in range(seed, seed + num_histories):
        plan = PLANS[number % len(PLANS)]
        try:
            counts += replay(number, **plan)
        except NotAStepError as error:
            print(f"seed {number}: {error}")
            return 1
    print(f"{num_histories} histories:", ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
