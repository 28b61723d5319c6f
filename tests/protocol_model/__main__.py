"""Explores the protocol's model to its end (`make model`), or replays simulated histories in it.

python -m tests.protocol_model [--replay SEED --histories N]
"""

import argparse
import gc
import sys
import time
from collections import Counter
from typing import Final

from .checker import Exploration, ViolationError
from .model import Rules
from .replay import PLANS, NotAStepError, replay

_THREE: Final = Rules(num_losses=0, num_drains=0, num_ends=0, reads_at_once=True)
_ONE_FAULT: Final = _THREE._replace(num_faults=1)
#: Explored to their end. No session reads another one's state, so two sessions have no other states than one.
FULL: Final = (
    ("GG", _ONE_FAULT),
    ("GF", _ONE_FAULT),
    ("AF", _ONE_FAULT._replace(reads_at_once=False)),
    ("G", _THREE._replace(num_ends=1)),
    ("A", _THREE._replace(num_losses=1)),
    ("G", _ONE_FAULT._replace(num_losses=1)),
    ("A", _THREE._replace(num_drains=1)),
    ("GF", _ONE_FAULT._replace(num_workers=2, num_faults=0, num_losses=1)),
    ("GFG", _ONE_FAULT._replace(num_workers=2, num_faults=0, num_losses=1)),
    ("AA", _ONE_FAULT._replace(num_workers=2, num_losses=1)),
    ("G", Rules(num_workers=2)),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.protocol_model", description=__doc__)
    parser.add_argument("--replay", type=int, metavar="SEED", help="replay histories from this seed on")
    parser.add_argument("--histories", type=int, default=20)
    asked = parser.parse_args()
    if asked.replay is not None:
        return _replay(asked.replay, asked.histories)
    gc.disable()  # there are no cycles, and collections would look at all states
    return max([_explore(program, rules) for program, rules in FULL])


def _explore(program: str, rules: Rules) -> int:
    begun_s, found = time.process_time(), Exploration(rules, [program])
    try:
        found.explore()
    except ViolationError as wrong:
        print(f"{program}, {rules}: {wrong.what}", *wrong.trace, sep="\n    ")
        return 1
    took_s = time.process_time() - begun_s
    bounds = (
        f"{rules.num_workers} workers, {rules.num_faults} crashes or pauses, {rules.num_losses} lost tails"
    )
    counts = f"{len(found.states)} states, {found.num_steps} steps, {took_s:.0f} s"
    print(f"{program:3} {bounds}: {counts}", flush=True)
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
