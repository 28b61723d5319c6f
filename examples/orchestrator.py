"""Publishes a turn for each of 100 sessions, and reads the results from the stream, in plain nats-py.

NATS_URL=$(turnkeep info --url) python orchestrator.py [FILE]

The requests and results are in the log, and the results that were written to the file are acknowledged. Kill
the worker, or this program, at any moment, and start it again: each turn is answered once and written once.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import nats

JOBS = {f"job-{number}": f"Write a sentence about the number {number}." for number in range(100)}


async def main() -> None:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "results.jsonl")
    done = {json.loads(line)["job"] for line in file.read_text().splitlines()} if file.exists() else set()
    nc = await nats.connect(os.environ["NATS_URL"])
    js = nc.jetstream()
    # A tenant of its own, so that the consumer gets the results of these sessions alone.
    results = await js.pull_subscribe("turnkeep.jobs.*.out", "orchestrator", stream="turnkeep_log")

    async def publish(job: str, text: str) -> None:
        request = {"type": "generate", "id": "turn", "messages": [{"role": "user", "content": text}]}
        await js.publish(f"turnkeep.jobs.{job}.in", json.dumps({**request, "max_tokens": 24}).encode())

    await asyncio.gather(*(publish(job, text) for job, text in JOBS.items() if job not in done))
    with file.open("a") as output:
        while len(done) < len(JOBS):
            try:
                messages = await results.fetch(64, timeout=5)
            except TimeoutError:  # nats-py's own, or at times Python's
                continue  # the worker is busy, or not there: the requests wait in the log
            for message in messages:
                job, result = message.subject.split(".")[2], json.loads(message.data)
                if job not in done:  # a turn that was published again has a result again
                    done.add(job)
                    print(json.dumps({"job": job, "text": result.get("text")}), file=output, flush=True)
                await message.ack()
    print(f"{len(done)} results are in {file}")
    await nc.close()


asyncio.run(main())
