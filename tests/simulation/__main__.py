"""Runs simulated histories: `python -m tests.simulation [SEED ...] [--histories N]`.

A history is one run of workers, clients and faults on a NATS server in memory; its seed determines all of it.
"""

import argparse
import contextlib
import gc
import os
import sys
import time
from collections import Counter

if os.environ.get("PYTHONHASHSEED") != "0":  # otherwise a seed gives another history in each process
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-P", "-m", "tests.simulation", *sys.argv[1:]])

from tests.mutants import mutated, table

from .history import simulate
from .shrink import shrink

sys.unraisablehook = lambda _: None  # closing the coroutines of killed processes may raise


def main() -> int:
    """Return 1 if histories went wrong; with several guards to take away, if some did without each."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="*", metavar="SEED", default=[0])
    parser.add_argument("--histories", type=int, default=1, help="so many seeds from each SEED on")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no history after so long")
    parser.add_argument("--tell", action="store_true", help="tell the stories of all, not of failures alone")
    parser.add_argument("--traces", action="store_true", help="print a checksum of each history")
    mutants = table()
    parser.add_argument(
        "--without",
        choices=mutants,
        nargs="+",
        metavar="MUTANT",
        help="take these guards of the program away, one after the other; tests/mutants.toml has their names",
    )
    parser.add_argument("--workers", type=int, help="so many workers in each history")
    parser.add_argument("--whole", action="store_true", help="tell failures as they are, not shrunk")
    parser.add_argument("--first", action="store_true", help="end at the first failure, without its story")
    asked = parser.parse_args()
    found = []
    for name in asked.without or [None]:
        if name is not None:
            print(f"without {name}:")
        asked.favoured = mutants[name].plan if name is not None else None
        if asked.workers is not None:
            asked.favoured = {**(asked.favoured or {}), "num_workers": asked.workers, "leases": False}
        with mutated(mutants[name]) if name is not None else contextlib.nullcontext():
            found.append(simulate_all(asked))
    return min(found)


def tell_failure(seed: int, asked: argparse.Namespace) -> None:
    """Print the story of a seed's failing history; without `--whole` reduce it to its causes first."""
    if asked.whole:
        told = simulate(seed, tell=True, favoured=asked.favoured)
    else:
        told = shrink(seed, asked.favoured)
        print(f"seed {seed} goes wrong with these alone: {', '.join(told.acts)}")
    print(*told.story, *(f"wrong: {one}" for one in told.wrong), sep="\n")


def simulate_all(asked: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    begun_s, num_histories, num_wrong = time.monotonic(), 0, 0
    seeds = [seed for first in asked.seeds for seed in range(first, first + asked.histories)]
    for seed in seeds:
        if time.monotonic() - begun_s > asked.seconds:
            break
        num_histories += 1
        outcome = simulate(seed, tell=asked.tell, favoured=asked.favoured)
        if num_histories == 1:
            gc.freeze()  # later collections skip all objects that exist now
        if asked.traces:
            print(f"seed {seed}: trace {outcome.trace:08x}")
        counts.update(outcome.counts)
        if outcome.wrong:
            num_wrong += 1
            if num_wrong <= 5 and not asked.first:
                if simulate(seed, favoured=asked.favoured).trace != outcome.trace:
                    print(f"seed {seed} is not replayed exactly")
                tell_failure(seed, asked)
            print(f"seed {seed}:", *outcome.wrong, sep="\n  ")
            if asked.first:
                break
        elif asked.tell:
            print(*outcome.story, sep="\n")
    took_s = time.monotonic() - begun_s
    said = ", ".join(f"{number} {name}" for name, number in counts.items() if not name.startswith("faults:"))
    played = f"seeds {seeds[0]} to {seeds[num_histories - 1]}"
    print(f"{num_histories} histories, {played}, in {took_s:.1f} s, {num_wrong} wrong: {said}")
    kinds = sorted(
        (name.removeprefix("faults: "), n) for name, n in counts.items() if name.startswith("faults:")
    )
    print("faults:", ", ".join(f"{number} {kind}" for kind, number in kinds))
    return bool(num_wrong)


if __name__ == "__main__":
    sys.exit(main())
