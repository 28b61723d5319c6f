"""`turnkeep replay` with real workers: it reproduces the recorded tokens, or says why they differ."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.commands.command_runs import command, where
from tests.parts import CHAT_TEMPLATE, LocalWorker

Start = Callable[..., Awaitable[LocalWorker]]


async def replay(worker: LocalWorker, *options: object) -> subprocess.CompletedProcess[str]:
    return await command("replay", *options, *where(worker))


async def converse(worker: LocalWorker) -> None:
    """Run two sessions: one with sampled answers, one with concurrent appends, a rewind and a close."""
    garden, house = worker.client.session("garden"), worker.client.session("house")
    say = [{"role": "user", "content": "What is red?"}]
    for _ in range(2):
        await garden.generate(messages=say, max_tokens=40, temperature=1.0)
    await asyncio.gather(*(house.append(messages=say, request_id=f"a{i}") for i in range(3)))
    await house.rewind(20)
    await house.generate(text="and", max_tokens=20)
    await house.close()


async def replayed(worker: LocalWorker) -> list[dict[str, int]]:
    """Return the numbers of entries of the sessions that replays have made, by kind."""
    log = await worker.client.stored.subjects()
    return [kinds for key, kinds in log.items() if key.tenant.startswith("replay-")]


async def test_a_replay_reproduces_the_recorded_answers_and_removes_its_sessions(local_worker: Start) -> None:
    worker = await local_worker()
    await converse(worker)
    done = await replay(worker, "--speed", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("the same: 2 sessions, 7 requests, ")
    assert "turnaround, median" in done.stdout
    kept = await replay(worker, "garden", "--speed", "max", "--into-tenant", "again", "--keep", "--json")
    report = json.loads(kept.stdout)
    assert (kept.returncode, report["same"], report["sessions"], report["tenant"]) == (0, True, 1, "again")
    log = await worker.client.stored.subjects()
    assert [kinds for key, kinds in log.items() if key.tenant == "again"] == [{"in": 2, "out": 2}]
    async with asyncio.timeout(20):  # until only the closes that forget, and their results, are left
        while await replayed(worker) != [{"in": 1, "out": 1, "closed": 1}] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_sessions_with_long_similar_names_are_replayed_apart(local_worker: Start) -> None:
    worker = await local_worker()
    for number in range(2):
        session = worker.client.session(f"{'customer-' * 6}{number}")
        await session.append(text=f"I am {number}", request_id="first")
    done = await replay(worker, "--speed", "max", "--into-tenant", "again")
    assert done.returncode == 0, done.stdout + done.stderr


async def test_a_replay_shows_the_first_difference_with_its_likely_cause(
    local_worker: Start, tmp_path: Path, tiny_model: Path
) -> None:
    changed = tmp_path / "copy" / tiny_model.name
    shutil.copytree(tiny_model, changed)
    for file in changed.glob("chat_template*"):
        file.write_text("Hello. " + CHAT_TEMPLATE)
    worker = await local_worker()
    await converse(worker)
    second = await local_worker(prefix="others", data_dir=tmp_path / "other", model=str(changed))
    done = await replay(worker, "--speed", "max", "--into-prefix", second.settings.prefix)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, different, first, recorded, replayed, cause = done.stdout.splitlines()
    assert different.startswith("different: ")
    assert first.startswith("first: session ")
    assert recorded != replayed
    told = "likely cause: the prompt became other tokens under a model of the same name"
    assert cause.strip().startswith(told)


async def test_a_replay_that_is_impossible_fails_with_one_line_that_says_why(local_worker: Start) -> None:
    worker = await local_worker()
    await converse(worker)
    for options, says in (
        (("nobody",), "turnkeep: there is no session nobody; see turnkeep sessions"),
        (("garden", "huose"), "turnkeep: there is no session huose; see turnkeep sessions"),
        (("garden", "gardn"), "turnkeep: there is no session gardn; did you mean garden?"),
        (("--since", "2100-01-01"), "turnkeep: there is nothing to replay: "),
        (("--into-prefix", "unserved"), "turnkeep: no worker serves unserved.replay-"),
    ):
        done = await replay(worker, *options)
        assert (done.returncode, done.stdout) == (1, ""), done.stdout
        (line,) = done.stderr.splitlines()
        assert line.startswith(says), line
    for options in (("--speed", "0"), ("--speed", "fast"), ("--until", "soon")):
        assert (await replay(worker, *options)).returncode == 2
