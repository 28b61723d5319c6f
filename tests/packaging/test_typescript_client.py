"""The TypeScript client as users get it: packed, in a fresh folder, against a real worker with kills."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.parts import free_port
from turnkeep_client.messages import Generated, decode_result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.parts import WorkerProcess

PROJECT = Path(__file__).parents[2] / "protocol" / "typescript"
EXAMPLE = PROJECT.parents[1] / "examples" / "typescript" / "agent.ts"
INSTALL = ("install", "--no-audit", "--no-fund", "--ignore-scripts")
MAX_TOKENS = 1500

pytestmark = [pytest.mark.packaging, pytest.mark.registry, pytest.mark.process, pytest.mark.timeout(300)]


def npm(*arguments: object, folder: Path) -> None:
    done = subprocess.run(["npm", *map(str, arguments)], cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the package, install it in a folder of its own, and compile its tests and the example there."""
    if shutil.which("npm") is None:
        pytest.skip("the TypeScript client is built by npm, and there is no npm")
    folder = tmp_path_factory.mktemp("typescript")
    source, user = folder / "source", folder / "user"
    shutil.copytree(PROJECT, source, ignore=shutil.ignore_patterns("node_modules", "dist"))
    npm(*INSTALL, folder=source)
    npm("pack", folder=source)
    (packed,) = source.glob("*.tgz")
    shutil.copytree(source / "tests", user / "tests")
    shutil.copy(EXAMPLE, user / "tests")
    shutil.copy(source / "tsconfig.json", user)
    (user / "package.json").write_text('{"type": "module"}')
    wanted = json.loads((source / "package.json").read_text())["devDependencies"]
    others = [f"{name}@{wanted[name]}" for name in ("ws", "@types/node")]
    npm(*INSTALL, packed, *others, folder=user)
    npm("exec", "--prefix", source, "--", "tsc", "-p", user / "tests", folder=source)
    return user / "tests"


@pytest.fixture
def worker(worker_process: Callable[..., WorkerProcess]) -> Callable[..., Awaitable[WorkerProcess]]:
    """Start workers, and wait until they serve."""

    async def start(model: Path, *options: str) -> WorkerProcess:
        process = worker_process("--ack-wait-s", "0.5", *options, model=model)
        process.start()
        async with asyncio.timeout(60):
            while not process.log_path.exists() or '"event": "ready"' not in process.log:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return process

    return start


async def run(*command: object, **environment: str) -> str:
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=pipe,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    output, _ = await program.communicate()
    assert program.returncode == 0, output.decode()
    return output.decode()


async def test_its_tests_pass(programs: Path, worker: Any, tiny_model: Path) -> None:
    process = await worker(tiny_model)
    await run("node", "--test", programs / "client.test.js", NATS_URL=process.url)


async def test_the_example_goes_on_where_it_was_killed(programs: Path, worker: Any, tiny_model: Path) -> None:
    process = await worker(tiny_model)
    command = ("node", programs / "agent.js", "trip")
    environment = {**os.environ, "NATS_URL": process.url}
    killed = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert killed.stdout is not None
    assert (await killed.stdout.readline()).startswith(b"looking up ")
    killed.kill()
    await killed.wait()
    kill_worker(process)
    whole = await run(*command, NATS_URL=process.url)
    assert whole.endswith("length\n") or whole.endswith("stop\n")
    assert await run(*command, NATS_URL=process.url) == whole
    async with await process.client() as client:
        results = [decode_result(one.body) for one in await client.log("trip") if one.kind == "out"]
    answers = [one.id for one in results if isinstance(one, Generated) and one.repeat_of is None]
    assert answers == ["weather-0", "weather-1", "summary"]


def kill_server(process: WorkerProcess) -> None:
    os.kill(json.loads((process.data_dir / "nats-server.json").read_text())["pid"], signal.SIGKILL)


def kill_both(process: WorkerProcess) -> None:
    kill_server(process)
    kill_worker(process)


def kill_worker(process: WorkerProcess) -> None:
    process.kill()
    process.start()


RUNTIMES = {
    "node": ("node",),
    "deno": ("deno", "run", "--allow-all", "--node-modules-dir=manual"),
    "bun": ("bun",),
}


@pytest.mark.parametrize("transport", ["tcp", "websocket"])
@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_an_answer_goes_on_over_kills_and_is_what_the_log_has(
    programs: Path, worker: Any, endless_model: Path, runtime: str, transport: str
) -> None:
    if shutil.which(runtime) is None:
        pytest.skip(f"there is no {runtime} here")
    port = free_port()
    process = await worker(endless_model, "--nats-websocket", str(port))
    url = process.url
    if transport == "websocket":
        url = f"ws://{url.removeprefix('nats://').partition('@')[0]}@127.0.0.1:{port}"
    command = (*RUNTIMES[runtime], programs / "follow.js", url, "s", "g", MAX_TOKENS)
    program = await asyncio.create_subprocess_exec(*map(str, command), stdout=asyncio.subprocess.PIPE)
    assert program.stdout is not None
    kills = {100: kill_worker, 500: kill_server, 900: kill_both}
    tokens: list[int] = []
    text = ""
    async with asyncio.timeout(120):
        async for line in program.stdout:
            piece = json.loads(line)
            if "result" in piece:
                break
            assert piece["i"] == len(tokens)
            tokens += piece["tokens"]
            text += piece["text"]
            for at in [at for at in kills if at < len(tokens)]:
                kills.pop(at)(process)
        assert await program.wait() == 0
    assert (piece["result"]["text"], piece["result"]["tokens"]) == (text, tokens)
    assert len(tokens) == MAX_TOKENS
    assert not kills
    async with await process.client() as client:
        recorded = await client.session("s").generate(
            text="Begin: ", max_tokens=MAX_TOKENS, request_id="g", timeout_s=60
        )
    assert isinstance(recorded, Generated)
    assert (recorded.text, list(recorded.tokens), recorded.repeat_of is None) == (text, tokens, False)
    assert recorded.resumed_tokens > 100
