"""The TypeScript client as users get it: packed, in a fresh folder, with a real worker and kills."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.parts import NatsServer, WorkerProcess, free_port
from turnkeep_client.client import connect
from turnkeep_client.messages import Generated, decode_result

PROJECT = Path(__file__).parents[2] / "protocol" / "typescript"
EXAMPLE = PROJECT.parents[1] / "examples" / "typescript" / "agent.mts"
INSTALL = ("install", "--no-audit", "--no-fund", "--ignore-scripts")
#: So many that a page which is behind has not let the worker reach the end before the first kill.
MAX_TOKENS = 3000

pytestmark = [
    pytest.mark.packaging,
    pytest.mark.registry("npm"),
    pytest.mark.process,
    pytest.mark.timeout(300),
]


def npm(*arguments: object, folder: Path) -> None:
    done = subprocess.run(
        ["npm", *map(str, arguments)], cwd=folder, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the client, install it in a fresh folder, and compile its tests and the example there."""
    folder = tmp_path_factory.mktemp("typescript")
    source, user = folder / "source", folder / "user"
    shutil.copytree(PROJECT, source, ignore=shutil.ignore_patterns("node_modules", "dist", "*.tgz"))
    npm(*INSTALL, folder=source)
    npm("pack", folder=source)
    (packed,) = source.glob("*.tgz")
    shutil.copytree(source / "tests", user / "tests")
    shutil.copy(EXAMPLE, user / "tests")
    shutil.copy(source / "tsconfig.json", user)
    (user / "package.json").write_text('{"type": "module"}')
    wanted = json.loads((source / "package.json").read_text())["devDependencies"]
    others = [f"{name}@{wanted[name]}" for name in ("esbuild", "@types/node")]
    npm(*INSTALL, packed, *others, folder=user)
    npm("exec", "--prefix", source, "--", "tsc", "-p", user / "tests", folder=source)
    return user / "tests"


@pytest.fixture
def worker(worker_process: Callable[..., WorkerProcess]) -> Callable[..., Awaitable[WorkerProcess]]:
    """Start a worker process, and wait until it is ready."""

    async def start(model: Path, *options: str) -> WorkerProcess:
        process = worker_process(*options, model=model)
        await serve(process)
        return process

    return start


async def serve(process: WorkerProcess) -> None:
    num_before = num_ready(process)
    process.start()
    async with asyncio.timeout(60):
        while num_ready(process) == num_before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def num_ready(process: WorkerProcess) -> int:
    return process.log.count('"event": "ready"') if process.log_path.exists() else 0


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


@pytest.mark.parametrize(
    "command",
    [
        ("node", "--test", "--test-timeout=60000"),
        ("deno", "test", "--allow-all", "--no-check", "--node-modules-dir=manual"),
        ("bun", "test", "--timeout", "60000"),
    ],
    ids=lambda command: command[0],
)
async def test_the_tests_of_the_packed_typescript_client_pass_in_node_deno_and_bun(
    programs: Path,
    worker: Any,
    tiny_model: Path,
    embedding_model: Path,
    reranker: Path,
    tmp_path: Path,
    command: tuple[str, ...],
) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    before = shutil.copytree(tiny_model, tmp_path / "before")
    config = json.loads((before / "config.json").read_text())
    (before / "config.json").write_text(json.dumps(config | {"rope_theta": 500_000.0}))
    process = await worker(before)
    async with await process.client() as client:  # the tests continue this session with another model
        await client.session("moved").generate(text="a", max_tokens=2)
    process.stop()
    process.command[process.command.index("--model") + 1] = str(tiny_model)
    process.log_path.unlink()
    await serve(process)
    judge = WorkerProcess(tmp_path / "judge", reranker, free_port())
    embedder = WorkerProcess(tmp_path / "embedder", embedding_model, free_port())
    (tmp_path / "full.conf").write_text("max_connections: 1")
    full = NatsServer(tmp_path / "full", ("-c", str(tmp_path / "full.conf")))
    full.start()
    try:
        await serve(judge)
        await serve(embedder)
        urls = {"RERANKER_URL": judge.url, "EMBEDDER_URL": embedder.url, "FULL_URL": full.url}
        async with connect(full.url):
            said = await run(*command, programs / "client.test.js", NATS_URL=process.url, **urls)
    finally:
        judge.stop()
        embedder.stop()
        full.stop()
    assert re.search(r"\b[2-5][0-9] pass", said) or re.search(r"# pass [2-5][0-9]\b", said), said


async def test_the_typescript_example_agent_run_again_after_a_kill_generates_no_answer_twice(
    programs: Path, worker: Any, tiny_model: Path
) -> None:
    process = await worker(tiny_model)
    command = ("node", programs / "agent.mjs", "trip")
    environment = {**os.environ, "NATS_URL": process.url}
    killed = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, env=environment
    )
    assert killed.stdout is not None
    assert (await killed.stdout.readline()).startswith(b"looking up ")
    killed.kill()
    await killed.wait()
    process.kill()
    await serve(process)  # a client that connects while the NATS server is started again is refused
    whole = await run(*command, NATS_URL=process.url)
    assert whole.endswith(("\nlength\n", "\nstop\n"))
    assert await run(*command, NATS_URL=process.url) == whole
    async with await process.client() as client:
        results = [decode_result(one.body) for one in await client.log("trip") if one.kind == "out"]
    answers = [one.id for one in results if isinstance(one, Generated) and one.repeat_of is None]
    assert answers == ["weather-0", "weather-1", "summary"]


def kill_server(process: WorkerProcess) -> None:
    # The client shows what it had before the last kill: the server may not be back yet.
    with suppress(ProcessLookupError, ValueError):
        os.kill(process.server_pid, signal.SIGKILL)


def kill_both(process: WorkerProcess) -> None:
    kill_server(process)
    kill_worker(process)


def kill_worker(process: WorkerProcess) -> None:
    process.kill()
    process.start()


class Page:
    """Runs a program in a headless browser; the program posts its output lines to the server of its page."""

    def __init__(self, browser: str, folder: Path, arguments: str) -> None:
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        class Handler(SimpleHTTPRequestHandler):
            def do_POST(self) -> None:
                line = self.rfile.read(int(self.headers["Content-Length"]))
                loop.call_soon_threadsafe(lines.put_nowait, line)
                self.send_response(204)  # last: the page then sends its next line, to another thread
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.lines = lines
        self._site = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        Thread(target=self._site.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._site.server_port}/#{arguments}"
        flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}")
        output = subprocess.DEVNULL
        self._process = subprocess.Popen([browser, *flags, url], stdout=output, stderr=output)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._site.shutdown()
        self._site.server_close()


@asynccontextmanager
async def running(runtime: str, programs: Path, *arguments: object) -> AsyncIterator[Callable[[], Any]]:
    """Run the program `follow` in a runtime; yield a function that waits for its next output line."""
    program = next(filter(None, map(shutil.which, RUNTIMES[runtime])), None)
    if program is None:
        pytest.skip(f"there is no {runtime} here")
    if runtime == "browser":
        site = programs.parent / "site"
        bundle = ("follow.js", "--bundle", "--format=esm", f"--outfile={site / 'follow.js'}")
        npm("exec", "--", "esbuild", *bundle, folder=programs)
        (site / "index.html").write_text("<script type=module src=follow.js></script>")
        page = Page(program, site, "|".join(map(str, arguments)))
        try:
            yield page.lines.get
        finally:
            page.close()
        return
    words = ["run", "--allow-all", "--node-modules-dir=manual"] if runtime == "deno" else []
    command = [program, *words, programs / "follow.js", *arguments]
    process = await asyncio.create_subprocess_exec(*map(str, command), stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout.readline
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


RUNTIMES = {
    "node": ("node",),
    "browser": ("chromium", "chromium-browser", "google-chrome"),
    "deno": ("deno",),
    "bun": ("bun",),
}


@pytest.mark.parametrize(
    ("runtime", "transport"),
    [
        ("node", "tcp"),
        ("browser", "websocket"),
        *(product(("deno", "bun"), ("tcp", "websocket"))),
    ],
)
async def test_an_answer_streamed_by_the_typescript_client_across_kills_equals_the_logged_result(
    programs: Path, worker: Any, endless_model: Path, runtime: str, transport: str
) -> None:
    port = free_port()
    process = await worker(endless_model, "--nats-websocket", str(port))
    url = process.url
    if transport == "websocket":
        url = f"ws://{url.removeprefix('nats://').partition('@')[0]}@127.0.0.1:{port}"
    kills = {100: kill_worker, 500: kill_server, 900: kill_both}
    tokens: list[int] = []
    text = ""
    async with asyncio.timeout(120), running(runtime, programs, url, "s", "g", MAX_TOKENS) as next_line:
        while "result" not in (piece := json.loads(await next_line())):
            assert piece["i"] == len(tokens)
            tokens += piece["tokens"]
            text += piece["text"]
            for at in [at for at in kills if at < len(tokens)]:
                kills.pop(at)(process)
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
