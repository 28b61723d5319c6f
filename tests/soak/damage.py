"""Damages snapshot files of a running worker, while its sessions are evicted and restored.

    python tests/soak/damage.py --requests 600 --seed 1

A damaged file is truncated, changed by a bit, overwritten by another file or by noise, removed, or replaced
by a folder. Every answer must equal the answer of an undisturbed worker to the same requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import (
    Heard,
    SessionKey,
    Verdict,
    arguments,
    connect,
    folder,
    judge,
    read_log,
    report,
    target,
    tiny_model,
)

#: More sessions than fit into memory for 1 MiB of KV, so that most turns restore a session from disk.
SESSIONS = 12
OPTIONS = ("--device-memory", "12MiB", "--min-free-disk", "0")
COMPARED = ("type", "position", "text", "tokens", "finish_reason", "code")


def truncate(path: Path, rng: random.Random, _: list[Path]) -> None:
    with path.open("r+b") as file:
        file.truncate(rng.randint(0, max(path.stat().st_size - 1, 0)))


def flip(path: Path, rng: random.Random, _: list[Path]) -> None:
    with path.open("r+b") as file:
        at = rng.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def exchange(path: Path, rng: random.Random, others: list[Path]) -> None:
    path.write_bytes(rng.choice(others).read_bytes())


def fill(path: Path, rng: random.Random, _: list[Path]) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def remove(path: Path, _: random.Random, __: list[Path]) -> None:
    path.unlink()


def bury(path: Path, _: random.Random, __: list[Path]) -> None:
    path.unlink()
    (path / "below").mkdir(parents=True)


WAYS: tuple[Callable[[Path, random.Random, list[Path]], None], ...] = (
    *(truncate, flip, exchange, fill, remove, bury),
)


@dataclass
class Run:
    """The record of one run: the damaged files, the answers that differ, and the worker's counters."""

    damaged: Counter[str] = field(default_factory=Counter)
    num_cached: int = 0
    differing: list[str] = field(default_factory=list)
    counters: Any = None

    def damage(self, snapshots: Path, rng: random.Random) -> None:
        """Damage up to three of the present snapshot files, each in a random way."""
        files = sorted(path for path in snapshots.iterdir() if path.is_file())
        for path in rng.sample(files, min(len(files), rng.randint(0, 3))):
            way = rng.choice(WAYS)
            with contextlib.suppress(OSError, ValueError):  # the file was moved or damaged before
                way(path, rng, files)
                self.damaged[way.__name__] += 1


def request(rng: random.Random, number: int) -> dict[str, Any]:
    """Make a random request whose seed is explicit, so that two workers give the same answer."""
    made: dict[str, Any] = {"id": f"r{number}"}
    text = "All work and no play makes Jack a dull boy. " * rng.randint(1, 4)
    match rng.choices(("append", "generate", "rewind"), (4, 5, 1))[0]:
        case "append":
            return made | {"type": "append", "text": text}
        case "generate":
            sampling = rng.choice(({}, {"temperature": 0.8, "seed": rng.randint(0, 99)}))
            return made | {"type": "generate", "text": text[:40], "max_tokens": rng.randint(1, 20)} | sampling
        case _:
            return made | {"type": "rewind", "position": rng.randint(0, 300)}


async def damage(where: Path, *, requests: int, seed: int) -> tuple[Run, Verdict]:
    """Send each request to a worker with damaged files, and to an undisturbed one; return the findings."""
    run, rng, model = Run(), random.Random(seed), tiny_model(where, endless=True)
    async with (
        target(where / "data", model, *OPTIONS) as victim,
        target(where / "undisturbed", model, "--min-free-disk", "0", "--snapshots", "off") as other,
    ):
        pid = victim.process.worker_pid
        heards = [await Heard.on(each.url) for each in (victim, other)]
        (snapshots,) = victim.process.data_dir.glob("**/snapshots/snapshots")
        for number in range(requests):
            key = SessionKey("default", f"s{rng.randrange(SESSIONS)}")
            body = request(rng, number)
            (result, *_), (expected, *_) = await asyncio.gather(*(heard.send(key, body) for heard in heards))
            if [result.get(name) for name in COMPARED] != [expected.get(name) for name in COMPARED]:
                run.differing.append(f"{key} {body}: {result}, undisturbed {expected}")
            run.num_cached += result.get("usage", result).get("cached_tokens", 0)
            run.damage(snapshots, rng)
        verdict = judge(await read_log(victim.url), None, heards[0], model)
        async with connect(victim.url) as client:
            await client.session("s0").append(text="to be asked")
            run.counters = (await client.session("s0").info()).worker.snapshots
        for heard in heards:
            await heard.nc.close()
        if not victim.process.running or victim.process.worker_pid != pid:
            verdict.blame("contradicting", "the worker died")
    for line in run.differing:
        verdict.blame("contradicting", line)
    return run, verdict


async def main() -> bool:
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    async with folder() as where:
        run, verdict = await damage(where, **vars(given))
        good = report(
            verdict,
            ("seed", given.seed),
            ("files damaged", f"{run.damaged.total()}: {dict(run.damaged)}"),
            ("answers that differ", len(run.differing)),
            ("tokens that had KV", run.num_cached),
            ("bytes restored", run.counters.restored_bytes),
            ("files rejected", run.counters.rejected),
            ("snapshots durable, failed", f"{run.counters.durable}, {run.counters.failed}"),
        )
        if not good:
            raise SystemExit(1)
    return good


if __name__ == "__main__":
    sys.exit(not asyncio.run(main()))
