"""First starts, workers that still start, and how commands find their worker."""

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import TextIO

import httpx2
import pytest
from command_runs import Terminal, environment, turnkeep

from commands.nats_connection import run_until_signal
from tests.parts import WorkerProcess, free_port
from turnkeep_client.client import connect
from turnkeep_client.errors import NoAnswerError, NoWorkerError
from worker.process.settings import Settings

pytestmark = pytest.mark.process


def test_serve_on_a_terminal_prints_its_progress_and_then_the_next_commands_to_type(
    tmp_path: Path, tiny_model: Path
) -> None:
    place = ("--data-dir", str(tmp_path / "data"), "--nats-port", str(free_port()))
    beside = ("--gateway", free_port(), "--console", "0")
    with Terminal("serve", *place, *beside, "--model", tiny_model, columns=200) as terminal:
        terminal.wait_for("starting")
        terminal.wait_for("testing how this model runs best")
        terminal.wait_for(r"loaded the model +context=\d+ model=tiny vision=False\s+\d")
        terminal.wait_for(r"ready +nats=nats://127.0.0.1:\d+ worker=\w+\s")
        agent = f"turnkeep launch --data-dir {place[1]} pi"
        terminal.wait_for(
            f"\nIn another terminal: turnkeep chat {' '.join(place)}, or {agent} .Ctrl-C stops .*\r\n"
        )
        terminal.wait_for(r"the (gateway|console) is at http://")
        terminal.wait_for(r"the (gateway|console) is at http://")
        turnkeep("ask", "Hello", "--session", "garden", "--max-tokens", 3, *place)
        terminal.wait_for(r"\n\d\d:\d\d:\d\d answered garden: \d tokens? in \d+\.\d+ s *\r\n")
        terminal.type("\x03")
        assert terminal.end() == 0
        assert terminal.transcript.count("testing how") == 1
        assert "trial=" not in terminal.transcript, "its figures are for the debug level"
        assert "created stream" not in terminal.transcript
        address = re.search(r"the console is at (http://\S+)", terminal.transcript)
        assert address
        with pytest.raises(httpx2.ConnectError):  # it has ended too
            httpx2.get(address[1])
    with Terminal("serve", *place, "--model", tiny_model, "--log-level", "info") as terminal:
        terminal.wait_for("ready ")
        turnkeep("ask", "And now?", "--session", "garden", "--max-tokens", 3, *place)
        terminal.wait_for(r"answered .* outcome=ok .*request=")
        terminal.type("\x03")
        assert terminal.end() == 0
    with Terminal("serve", *place, "--model", tiny_model, "--log-format", "json", columns=2000) as terminal:
        terminal.wait_for('"ready"')
        terminal.type("\x03")
        assert terminal.end() == 0
        assert "testing how" not in terminal.transcript, "only a first start tests the model"
        assert "In another terminal" not in terminal.transcript, "programs read JSON"
        assert "turnkeep launch" not in terminal.transcript, "it needs a gateway"


async def test_a_worker_whose_terminal_is_closed_stops_its_answer_saves_its_kv_and_exits_with_code_0(
    tmp_path: Path, tiny_model: Path
) -> None:
    data, port = tmp_path / "data", free_port()
    with Terminal("serve", "--data-dir", data, "--nats-port", port, "--model", tiny_model) as terminal:
        await asyncio.to_thread(terminal.wait_for, "In another terminal")
        url = turnkeep("info", "--url", "--data-dir", data).stdout.strip()
        async with await connect(url) as client:
            async for _ in client.session("s").generate(text="hello", max_tokens=1500):
                break
            terminal.hang_up()  # from here on no line of the log can be written
            os.kill(terminal.process.pid, signal.SIGHUP)  # which a shell sends, too
            assert await asyncio.to_thread(terminal.process.wait, 60) == 0
    assert [*(data / "snapshots").rglob("*.safetensors")], "of the answer so far"


def test_importing_the_commands_serve_and_bench_loads_no_mlx_lm_transformers_rich_or_openai() -> None:
    slow = {"rich", "attr", "mlx_lm", "transformers"}
    program = f"import sys, commands.serve, worker.app; print({slow} & set(sys.modules));"
    program += "import bench.peers; print({'openai'} & set(sys.modules)); import rich, openai"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nset()\n"


def locking(data: Path, note: str) -> TextIO:
    """Write a worker's note into a data directory's lock file; return this file, locked until it closes."""
    data.mkdir(exist_ok=True)
    file = (data / "worker.lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(note)
    file.flush()
    return file


@pytest.mark.parametrize("has_lock", [True, False], ids=["data directory locked", "not yet locked"])
def test_ask_prints_that_a_worker_is_starting_and_waits_for_that_worker(
    tmp_path: Path, tiny_model: Path, *, has_lock: bool
) -> None:
    data, port = tmp_path / "data", free_port()
    where = ["--data-dir", str(data), "--nats-port", str(port)]
    program = [sys.executable, "-m", "commands"]
    serve = [*program, "serve", f"--data-dir={data}", *where[2:], "--model", str(tiny_model)]
    with contextlib.ExitStack() as stack:
        if has_lock:
            starting = stack.enter_context(Popen(["sleep", "60"]))
            locked = stack.enter_context(locking(data, f'{{"pid": {starting.pid}}}'))
        else:
            starting = stack.enter_context(Popen(serve, env=environment(), stderr=DEVNULL))
            starting.send_signal(signal.SIGSTOP)
        stack.callback(starting.terminate)
        asked = [*program, "ask", *where, "--max-tokens", "2", "Hello?"]
        ask = Popen(asked, env=environment(), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, text=True)
        stack.enter_context(ask)
        assert ask.stderr is not None
        assert ask.stderr.readline() == f"waiting for the worker that is starting (pid {starting.pid}) ...\n"
        if has_lock:
            locked.close()
            served = stack.enter_context(Popen(serve, env=environment(), stderr=DEVNULL))
            stack.callback(served.terminate)
        starting.send_signal(signal.SIGCONT)
        rest = ask.stderr.read()
        assert ask.wait() == 0, rest


def test_a_command_does_not_wait_for_a_worker_that_has_ended_or_has_been_starting_for_too_long(
    tmp_path: Path,
) -> None:
    with Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    (tmp_path / "worker.lock").write_text(f'{{"pid": {ended.pid}, "worker": "w"}}')
    where = ("--data-dir", tmp_path, "--nats-port", free_port())
    assert "start a worker with" in turnkeep("info", *where).stderr
    with locking(tmp_path, f'{{"pid": {os.getpid()}, "worker": "w"}}'):
        os.utime(tmp_path / "worker.lock", (0, 0))
        assert "start a worker with" in turnkeep("info", *where).stderr, "it has been there for long"


def test_an_unanswered_command_reports_a_stuck_worker_if_one_runs_and_else_how_to_start_a_worker(
    tmp_path: Path,
) -> None:
    async def ask() -> None:
        raise NoAnswerError("no answer")

    settings = Settings(data_dir=tmp_path)
    with (
        locking(tmp_path, f'{{"pid": {os.getpid()}}}'),
        pytest.raises(NoWorkerError, match=r"busy or stuck.*: see its log"),
    ):
        run_until_signal(settings, ask)
    with pytest.raises(NoWorkerError, match="start a worker with"):
        run_until_signal(settings, ask)


def test_a_worker_whose_standard_error_is_closed_answers_requests(tmp_path: Path, tiny_model: Path) -> None:
    words = [sys.executable, "-m", "commands", "serve", "--data-dir", str(tmp_path / "data"), "--until-eof"]
    words += ["--nats-port", str(free_port()), "--model", str(tiny_model)]
    with Popen(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *words], stdin=PIPE, stdout=PIPE, env=environment()
    ) as one:
        assert one.stdin
        assert one.stdout
        assert b"ready\n" in iter(one.stdout.readline, b"")
        one.stdin.close()
        assert one.wait() == 0


ASKED = ("ask", "Hello?", "--max-tokens", 2)


def until_ready(process: WorkerProcess) -> None:
    while '"ready"' not in process.log:
        assert process.running, process.log
        time.sleep(0.02)


@pytest.fixture
def started(worker_process: Callable[..., WorkerProcess]) -> Callable[..., WorkerProcess]:
    def start(*options: str) -> WorkerProcess:
        process = worker_process(*options)
        process.start()
        until_ready(process)
        return process

    return start


def test_commands_find_a_worker_of_this_machine_by_its_data_directory_or_its_nats_url(
    started: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    """By `--data-dir`, `--nats` or NATS_URL, or at the usual place; an error names the right one."""
    worker, home, wrong = started(), tmp_path / "home", free_port()
    place, nowhere = ("--data-dir", worker.data_dir), f"nats://127.0.0.1:{wrong}"
    bare = f"nats://127.0.0.1:{worker.url.rpartition(':')[2]}"
    for options, more in ((place, {}), ((), {"NATS_URL": worker.url})):
        done = turnkeep(*ASKED, *options, **more)
        assert (done.returncode, "waiting" in done.stderr) == (0, False), done.stderr
    for folder in (home, home / "Library" / "Application Support"):
        folder.mkdir(parents=True)
        (folder / "turnkeep").symlink_to(worker.data_dir)
    usual = {"HOME": str(home), "XDG_DATA_HOME": str(home)}
    for options, more in ((place, {}), (place, {"TURNKEEP_NATS_PORT": "4223"}), ((), usual)):
        said = turnkeep("info", "--url", *options, **more)
        assert (said.returncode, said.stdout.strip()) == (0, worker.url), said.stderr
    for options in (place, ("--nats", worker.url)):
        assert turnkeep("sessions", *options, NATS_URL=nowhere).returncode == 0, options

    def fails(*words: object, **more: str) -> str:
        done = turnkeep(*words, **more)
        assert done.returncode == 1
        return done.stderr.removeprefix("turnkeep: ")

    assert fails(*ASKED, *place, "--nats-port", wrong) == (
        f"no NATS server at {nowhere}: connection refused; the one of"
        f" {worker.data_dir} is at {bare}: leave out --nats-port\n"
    )
    assert fails("sessions", NATS_URL=nowhere) == (
        f"no NATS server at {nowhere}: connection refused;"
        " start it, or name another one with --nats or NATS_URL\n"
    )
    helps = "it is that of this machine's own worker: leave out --nats or NATS_URL"
    wants = f"the NATS server at {bare} wants its token"
    assert fails("exporter", *place, "--nats", bare) == f"{wants}; {helps}\n"
    done = turnkeep("sessions", TURNKEEP_DATA_DIR=str(worker.data_dir), NATS_URL=bare)
    assert (done.returncode, done.stderr) == (0, ""), "a data directory comes before NATS_URL"
    assert f"(pid {worker.pid}); stop it" in fails("serve", *place, "--nats-port", free_port())
    invalid = turnkeep("sessions", NATS_URL="http://s3cret@x")
    assert invalid.returncode == 2
    assert invalid.stderr.startswith("turnkeep: NATS_URL: its value is not valid: it must be ")
    assert "s3cret" not in invalid.stderr


def test_commands_find_a_worker_that_uses_an_external_nats_server_by_its_data_directory(
    started: Callable[..., WorkerProcess], nats_url: str
) -> None:
    server = nats_url.replace("nats://", "nats://name:secret@")
    worker = started("--nats", server, "--prefix", "found")
    place = ("--data-dir", worker.data_dir)
    done = turnkeep(*ASKED, *place, "--prefix", "found")
    assert done.returncode == 0, done.stderr
    assert "secret" not in (worker.data_dir / "worker.lock").read_text()
    said = turnkeep("info", "--url", *place)
    assert said.returncode == 2
    assert said.stderr == (
        f"turnkeep: the worker of {worker.data_dir} has no NATS server of its own; it uses {nats_url}\n"
    )


def test_the_printed_command_that_starts_a_worker_contains_no_credentials_of_the_client(
    nats_url: str, tmp_path: Path
) -> None:
    context = tmp_path / "agent.json"
    context.write_text('{"user": "agent", "password": "secret"}')
    options = ("--nats", nats_url, "--prefix", "nobody")
    done = turnkeep("info", *options, "--nats-context", context)
    assert done.returncode == 1
    assert done.stderr.endswith(f"; start a worker with: turnkeep serve {' '.join(options)}\n"), done.stderr
