"""First token after `kill -9` of a session with a picture, beside that of a session in memory.

Run it on a quiet machine: `python tests/soak/pictures_again.py --rounds 20`. The model has random weights,
and the picture 1,024 patches. Each round asks the next question in both sessions, in a random order; of one
of them the worker was killed before. The aim is a ratio of the medians of 1.15. On a busy machine only the
worker's CPU time is steady.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
from harness import Target, arguments, connect, folder

from tests import taught
from tests.device import tiny_seeing
from turnkeep_client import image
from turnkeep_client.session import Session

#: A prompt and a picture take seconds on a CPU, as those of users' models on their machines.
_TEXT = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_VISION = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "image_size": 512,
}


def write(where: Path) -> Path:
    """Write the folder of a model whose picture has 1,024 patches and 256 tokens; return it."""
    own = tiny_seeing.CONFIGS["smolvlm"]
    tiny_seeing.CONFIGS["thousand"] = {
        **own,
        "model_type": "smolvlm",
        "text_config": {**own["text_config"], **_TEXT, "max_position_embeddings": 1 << 15},
        "vision_config": {**own["vision_config"], **_VISION, "patch_size": 16},
    }
    side = {"longest_edge": 512}
    tiny_seeing.PROCESSORS["thousand"] = {"size": side, "max_image_size": side, "do_image_splitting": False}
    tiny_seeing.write("thousand", where)
    (where / "chat_template.jinja").write_text(taught.CHAT_TEMPLATE)
    return where


async def first_s(target: Target, session: Session, *parts: str | bytes) -> tuple[float, float]:
    """Ask, with parts of a message; return the time to the first chunk, and the worker's CPU time."""
    said = [image(one) if isinstance(one, bytes) else {"type": "text", "text": one} for one in parts]
    worker, first = psutil.Process(target.process.worker_pid), list[tuple[float, float]]()

    def times_s() -> tuple[float, float]:
        return time.perf_counter(), sum(worker.cpu_times()[:2])

    started = times_s()
    asked: Any = session.generate(messages=[{"role": "user", "content": said}], max_tokens=8)
    async for _ in asked:
        first = first or [times_s()]
    return first[0][0] - started[0], first[0][1] - started[1]


async def settled(session: Session) -> None:
    """Wait until the worker has written all snapshots."""
    while (await session.info()).worker.snapshots.in_flight:  # noqa: ASYNC110  # over the wire
        await asyncio.sleep(0.05)


async def measure(where: Path, rounds: int, seed: int) -> list[dict[str, tuple[float, float]]]:
    """Return, of each round, the times to the first token after a kill and in memory (`first_s`)."""
    target, order, found = Target(where / "data", write(where / "model")), random.Random(seed), []
    target.start()
    try:
        await target.ready()
        async with connect(target.url) as client:
            names = ("killed", "kept")
            for at, name in enumerate(names):  # pictures of their own, so that no KV is shared
                picture = tiny_seeing.picture(at, 512, 512)
                cold = await first_s(target, client.session(name), picture, "What is it? " * 60)
                print("with the picture", _said(cold), flush=True)
            for at in range(rounds):
                times = {}
                for name in order.sample(names, 2):
                    session = client.session(name)
                    await first_s(target, session, f"And {at}? ")  # the other's kill has dropped KV
                    await settled(session)
                    if name == "killed":
                        target.kill_worker()
                        await target.ready()
                    times[name] = await first_s(target, session, f"So {at}? ")
                found.append(times)
                both = f"after kill -9 {_said(times['killed'])}, in memory {_said(times['kept'])}"
                print(f"{at + 1}: {both}", flush=True)
    finally:
        target.process.stop()
    return found


def _said(times_s: tuple[float, float]) -> str:
    return "{:.3f} s ({:.2f} s of CPU)".format(*times_s)


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    async with folder() as where:
        found = await measure(where, options.rounds, options.seed)
    for at, what in enumerate(("time", "CPU time")):
        killed, kept = (statistics.median(one[name][at] for one in found) for name in ("killed", "kept"))
        print(f"ratio of {what} {killed / kept:.2f} ({killed:.3f} s and {kept:.3f} s)")


if __name__ == "__main__":
    asyncio.run(main())
