"""`turnkeep ask` with a real worker: its input, options and output, signals and outages."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import WAIT_S, Terminal, command, environment, outside, turnkeep, where

from commands.screen import printable, wrapped
from tests.parts import TINY_CONTEXT, LocalWorker, WorkerProcess
from turnkeep_client.client import Client
from turnkeep_client.messages import Closed, Generate, Generated, decode_request, decode_result, encode
from turnkeep_client.writes import LIKELY


async def asked(client: Client, session: str = "s") -> Generate:
    """Return the last request of a session, a `generate`, from the log."""
    bodies = [entry.body for entry in await client.log(session) if entry.kind == "in"]
    request = decode_request(bodies[-1])
    assert isinstance(request, Generate)
    return request


async def answered(client: Client, session: str = "s") -> Generated:
    """Return the last answer of a session from the log."""
    results = [decode_result(entry.body) for entry in await client.log(session) if entry.kind == "out"]
    return next(result for result in reversed(results) if isinstance(result, Generated))


def contents(request: Generate) -> list[tuple[str, str | None]]:
    return [(message.role, message.content) for message in request.messages or ()]


async def ask(worker: LocalWorker, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    options = ("--session", "s", "--max-tokens", 4, *where(worker))
    return await asyncio.to_thread(turnkeep, "ask", *options, *arguments, **more)


async def test_text_piped_into_ask_is_sent_as_part_of_the_question(worker: LocalWorker) -> None:
    for arguments, piped, whole in (
        (("What is it?",), "", "What is it?"),
        (("What is it?",), "one\n  two\n", "What is it?\n\none\n  two"),
        ((), "one\ntwo\n", "one\ntwo"),
        (("-",), "one\ntwo\n", "one\ntwo"),
        (("What is it?",), "\n \n", "What is it?"),
    ):
        done = await ask(worker, *arguments, text=piped)
        assert (done.returncode, done.stderr) == (0, "turnkeep: ended at max_tokens (4): the answer is cut\n")
        assert contents(await asked(worker.client)) == [("user", whole)]


@pytest.mark.parametrize(
    ("piped", "says"),
    [(b"", "there is no question"), (b" \n", "there is no question"), (b"ab\xff", "not UTF-8 at byte 2")],
)
def test_ask_without_a_question_and_with_an_empty_or_non_utf8_standard_input_is_a_usage_error(
    piped: bytes, says: str
) -> None:
    done = turnkeep("ask", text=piped)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_ask_refuses_an_empty_session_name() -> None:
    """As of a shell's variable that is not set; without a name the session would be a temporary one."""
    for name in ("ask", "run", "chat"):
        done = turnkeep(name, "--session", "", "--nats", "nats://127.0.0.1:1", text="hi")
        assert (done.returncode, done.stdout) == (2, "")
        assert "the session's name is empty" in done.stderr


def test_ask_on_a_terminal_needs_a_question_or_a_dash_which_makes_it_read_the_terminal() -> None:
    with Terminal("ask") as terminal:
        assert terminal.end() == 2
        assert "there is no question" in terminal.transcript
    with Terminal("ask", "-", "--nats", "nats://127.0.0.1:1") as terminal:
        terminal.type("typed\n\x04")
        assert terminal.end() == 1
        assert "no NATS server" in terminal.transcript


async def test_ask_sends_the_generation_options_of_its_command_line_in_its_request(
    worker: LocalWorker,
) -> None:
    options = ("--system", "Be brief.", "--top-p", 0.5, "--temperature", 2, "--seed", 7)
    options += ("--top-k", 5, "--min-p", 0.1, "--repetition-penalty", 1.5)
    done = await ask(worker, "hello", *options, "--stop", "END", "--stop", "\n\n")
    assert done.returncode == 0, done.stderr
    request = await asked(worker.client)
    assert contents(request) == [("system", "Be brief."), ("user", "hello")]
    assert (request.top_p, request.temperature, request.seed) == (0.5, 2, 7)
    assert (request.top_k, request.min_p, request.repetition_penalty) == (5, 0.1, 1.5)
    assert request.stop == ("END", "\n\n")


@pytest.mark.parametrize(
    "wrong",
    [
        *(("ask", "--max-tokens", "-1"), ("ask", "--temperature", "-0.1"), ("ask", "--temperature", "nan")),
        *(("ask", "--seed", "-1"), ("ask", "--logit-bias", "3:500"), ("ask", "--logit-bias", "-3:5")),
        *(("ask", "--top-p", "-0.1"), ("ask", "--json", "--logprobs", "21"), ("chat", "--top-k", "-1")),
        *(("close", "s", "--timeout", "nan"), ("exporter", "--keep-s", "nan")),
    ],
)
async def test_a_command_refuses_a_number_out_of_range_with_an_error_that_names_the_option(
    wrong: tuple[str, ...],
) -> None:
    """The number is refused before any request is sent: no worker runs here."""
    name, *options = wrong
    done = await command(name, *(("hello",) if name == "ask" else ()), *options)
    assert (done.returncode, done.stdout) == (2, "")
    *_, said = done.stderr.splitlines()
    assert said.startswith(f"Error: Invalid value for '{options[-2]}': ")
    assert re.search(r"not in the range|not a number|-100 to 100", said), said


@pytest.mark.serves("endless_model")
async def test_ask_prints_into_a_pipe_exactly_the_logged_answer_as_text_or_as_json(
    worker: LocalWorker,
) -> None:
    """The answer is neither wrapped nor truncated, and standard output has nothing else."""
    done = await ask(worker, "hello", "--max-tokens", 300, "--temperature", 1, "--seed", 3, COLUMNS="20")
    assert (done.returncode, done.stderr) == (0, "turnkeep: ended at max_tokens (300): the answer is cut\n")
    text = (await answered(worker.client)).text
    assert len(text) > 20
    assert done.stdout == printable(text) + "\n"
    done = await ask(worker, "hello", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == encode(await answered(worker.client)).decode() + "\n"
    result = json.loads(done.stdout)
    assert (result["finish_reason"], result["usage"]["completion_tokens"]) == ("length", 4)
    assert result["seconds"]["total"] >= result["seconds"]["first_token"] > 0


@pytest.mark.serves("endless_model")
async def test_ask_cancels_its_answer_when_the_program_that_reads_its_output_closes_the_pipe(
    worker: LocalWorker,
) -> None:
    words = ["-m", "commands", "ask", "hello", "--session", "s", "--max-tokens", "50000"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        *where(worker),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout
    assert process.stderr
    await process.stdout.read(1)
    process.stdout._transport.close()  # type: ignore[attr-defined]  # as `head -c1` does
    errors = await process.stderr.read()
    assert await process.wait() == 1
    assert b"Traceback" not in errors
    await worker.client.session("s").append(text="behind it", timeout_s=60)
    assert (await answered(worker.client)).finish_reason == "cancelled"


async def begun(client: Client, count: int) -> None:
    """Wait until `count` sessions have a request without a result."""
    while sum(one.is_waiting for one in await client.sessions()) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("ended", ["Ctrl-C", "SIGTERM", "closed terminal"])
@pytest.mark.serves("endless_model")
async def test_ask_cancels_its_answer_and_exits_with_130_on_ctrl_c_and_with_143_on_sigterm_or_hangup(
    worker: LocalWorker, ended: str
) -> None:
    options = ("--session", "s", "--max-tokens", 50_000, *where(worker))
    loop = asyncio.get_running_loop()

    def run() -> int:
        with Terminal("ask", "hello", *options) as terminal:
            asyncio.run_coroutine_threadsafe(begun(worker.client, 1), loop).result(WAIT_S)
            assert not terminal.echoes
            if ended == "Ctrl-C":
                terminal.type("\x03")
            elif ended == "closed terminal":
                terminal.hang_up()
                return terminal.process.wait(WAIT_S)
            else:
                terminal.process.terminate()
            return terminal.end()

    assert await asyncio.to_thread(run) == (130 if ended == "Ctrl-C" else 143)
    await worker.client.session("s").append(text="behind it", timeout_s=60)
    assert (await answered(worker.client)).finish_reason == "cancelled"


@pytest.mark.serves("endless_model")
async def test_ctrl_c_cancels_all_answers_that_one_ask_requested_and_closes_their_sessions(
    worker: LocalWorker,
) -> None:
    loop = asyncio.get_running_loop()

    def run() -> int:
        with Terminal("ask", "-n", 2, "--max-tokens", 50_000, "hello", *where(worker)) as terminal:
            asyncio.run_coroutine_threadsafe(begun(worker.client, 2), loop).result(WAIT_S)
            terminal.type("\x03")
            return terminal.process.wait(5)

    assert await asyncio.to_thread(run) == 130
    async with asyncio.timeout(10):
        while not all(one.is_closed for one in await worker.client.sessions()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.process
@pytest.mark.parametrize("is_begun", [True, False], ids=["answer has begun", "answer has not begun"])
async def test_a_question_given_up_with_ctrl_c_while_no_worker_runs_is_not_answered_by_the_next_worker(
    worker_process: Callable[..., WorkerProcess], endless_model: Path, nats_url: str, *, is_begun: bool
) -> None:
    worker, client, place = await outside(worker_process, endless_model, nats_url)
    async with client:

        def run() -> tuple[int, str]:
            with Terminal("ask", "hello", "--max-tokens", 50_000, *place) as terminal:
                if is_begun:
                    terminal.wait_for(r"\w")
                    worker.lose_worker()
                terminal.wait_for("waiting for the worker")
                terminal.type("\x03")
                return terminal.end(), terminal.transcript

        if not is_begun:
            worker.lose_worker()
        code, said = await asyncio.to_thread(run)
        assert code == 130
        assert "the question will get no answer" in " ".join(said.split())
        name = next(one.name for one in await client.sessions() if one.name != "s")
        worker.go_on()
        async with asyncio.timeout(60):
            while not all(one.is_closed for one in await client.sessions() if one.name == name):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        closed = decode_result((await client.log(name))[-1].body)
    assert isinstance(closed, Closed)
    assert closed.position < TINY_CONTEXT, "it was not continued"
    assert is_begun or closed.position == 0


@pytest.mark.process
async def test_ask_waits_while_its_killed_worker_restarts_and_then_prints_the_rest_of_the_answer(
    worker_process: Callable[..., WorkerProcess], endless_model: Path, nats_url: str
) -> None:
    worker, client, place = await outside(worker_process, endless_model, nats_url)
    async with client:
        options = ("--session", "s", "--max-tokens", 3000, *place)

        def run() -> list[str]:
            with Terminal("ask", "hello", *options) as terminal:
                terminal.wait_for(r"\w")
                worker.lose_worker()
                terminal.wait_for("waiting for the worker")
                worker.go_on()
                assert terminal.end() == 0
                return terminal.screen()

        seen = await asyncio.to_thread(run)
        text = printable((await answered(client)).text)
    note = "turnkeep: ended at max_tokens (3000): the answer is cut"
    assert seen == [*(line.rstrip() for line in wrapped(text).split("\n")), note, ""]


@pytest.mark.process
async def test_a_question_to_a_named_session_is_answered_after_an_outage_although_ctrl_c_ended_ask(
    worker_process: Callable[..., WorkerProcess], endless_model: Path, nats_url: str
) -> None:
    worker, client, place = await outside(worker_process, endless_model, nats_url)
    async with client:
        options = ("--session", "s", "--max-tokens", 900, *place)

        def run() -> int:
            with Terminal("ask", "hello", *options) as terminal:
                terminal.wait_for(r"\w")
                worker.lose_worker()
                terminal.wait_for("waiting for the worker")
                terminal.type("\x03")
                code = terminal.end()
                assert "the question is in the log" in terminal.transcript
                return code

        assert await asyncio.to_thread(run) == 130
        worker.go_on()
        await client.session("s").append(text="behind it", timeout_s=60)
        assert (await answered(client)).finish_reason == "length"


async def test_ask_reports_a_question_that_a_full_disk_kept_out_of_the_log_and_ends_at_one_ctrl_c(
    worker: LocalWorker,
) -> None:
    js = worker.app._nc.jetstream()
    log = (await js.stream_info(worker.client.subjects.log_stream)).config
    # A server with a full disk answers nothing.
    await js.update_stream(log.evolve(max_bytes=1, no_ack=True))
    shorter = "import commands.stream as s, turnkeep_client.writes as w; s._PATIENCE_S = 2; w.UNSTORED_S = 1"
    program = f"{shorter}; from commands.cli import main; main()"
    words = [sys.executable, "-c", program, "ask", "hello", "--session", "new", *where(worker)]
    pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def run() -> tuple[int, str]:
        with subprocess.Popen(words, env=environment(), text=True, **pipes) as process:
            first = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            return process.wait(15), first

    assert await asyncio.to_thread(run) == (
        130,
        f"turnkeep: the NATS server has not stored the request; {LIKELY} Still waiting\n",
    )
    await js.update_stream(log)


@pytest.mark.process
async def test_ask_fails_with_exit_code_1_if_the_connection_to_nats_stays_lost(
    worker_process: Callable[..., WorkerProcess], endless_model: Path
) -> None:
    worker = worker_process(model=endless_model)
    worker.start()
    await (await worker.client()).close()
    program = "import commands.stream as s; s._LOST_S = 1; from commands.cli import main; main()"
    asked = ("ask", "hello", "--session", "s", "--max-tokens", "900", "--nats", worker.url)

    def run() -> tuple[int, str]:
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", program, *asked], env=environment(), **pipes) as process:
            process.stdout.read(1)
            worker.stop()  # and its server
            return process.wait(60), process.stderr.read().decode()

    code, said = await asyncio.to_thread(run)
    assert code == 1
    last = said.splitlines()[-1]
    assert last.startswith(
        "turnkeep: no connection to NATS for 1 s, and the question is in the log and will be"
    )
    assert last.endswith("start it, or name another one with --nats or NATS_URL")


@pytest.mark.parametrize(
    "around",
    [{"command": 'set -m; "$0" "$@" & wait $!'}, {"own": False}],
    ids=["background job", "no terminal"],
)
async def test_ask_succeeds_as_a_background_job_and_without_a_controlling_terminal(
    worker: LocalWorker, around: dict[str, Any]
) -> None:
    """The system would stop a background process that changes the terminal's settings."""
    options = ("--session", "s", "--max-tokens", 4, *where(worker))

    def run() -> int:
        with Terminal("ask", "hello", *options, **around) as terminal:
            return terminal.end()

    assert await asyncio.to_thread(run) == 0


async def test_ask_prints_json_that_fits_its_schema_file_and_refuses_a_file_without_a_schema(
    worker: LocalWorker, tmp_path: Path
) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "array", "items": {"enum": [1, "x"]}, "minItems": 1, "maxItems": 2}')
    result = await ask(worker, "--schema", file, "--max-tokens", 40, "What is it?")
    assert (result.returncode, result.stderr) == (0, "")
    assert set(json.loads(result.stdout)) <= {1, "x"}
    file.write_text("[1]")
    for name in (file, tmp_path / "none.json"):
        wrong = await ask(worker, "--schema", name, "What is it?")
        assert wrong.returncode == 2
        assert f"{name} has no JSON schema: " in wrong.stderr
        assert "[Errno" not in wrong.stderr


ASKED = ("ask", "--session", "s", "--max-tokens", 2, "hello")


async def test_ask_starts_a_session_under_a_cache_policy_and_info_shows_its_visible_tokens(
    worker: LocalWorker,
) -> None:
    asked = (*ASKED, "--cache-policy", "sink_window:2,32", *where(worker))
    for _ in range(2):  # the second time the session has this policy
        done = await asyncio.to_thread(turnkeep, *asked)
        assert done.returncode == 0, done.stderr
    position = (await worker.client.session("s").append(tokens=[5] * 50)).position
    rows = (await asyncio.to_thread(turnkeep, "info", "s", *where(worker))).stdout.splitlines()
    said = {row.split("  ")[0]: " ".join(row.split("  ")[1:]).strip() for row in rows}
    assert said["cache policy"] == "sink_window (the first 2 tokens and the last 32)"
    assert said["in sight"] == f"34 of at most 34 tokens, all from position {position - 32} on"
    raw = json.loads((await asyncio.to_thread(turnkeep, "info", "s", "--json", *where(worker))).stdout)
    assert raw["cache"] == {"policy": "sink_window", "sink": 2, "window": 32}
    assert (raw["capacity_tokens"], raw["visible_tokens"]) == (34, 34)
    other = await asyncio.to_thread(turnkeep, *ASKED, "--cache-policy", "full", *where(worker))
    assert (other.returncode, other.stdout) == (1, "")
    assert other.stderr.startswith("turnkeep: invalid_request: the session is open under sink_window")
    await worker.client.session("s").close()
    done = await asyncio.to_thread(turnkeep, *ASKED, *where(worker))
    gone = "turnkeep: session s was closed or removed; turnkeep chat --session s starts it anew\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", gone)
    chat = ("chat", "--session", "s", "--max-tokens", 2, *where(worker))
    assert (await asyncio.to_thread(turnkeep, *chat, text="hello\n")).returncode == 0
    assert (await answered(worker.client)).finish_reason == "length"
    await worker.client.session("s").close()
    for more in ((), ("--snapshots", "none")):
        for _ in range(2):  # the second time the session has this policy
            done = await asyncio.to_thread(turnkeep, *ASKED, "--cache-policy", "full", *more, *where(worker))
            assert done.returncode == 0, done.stderr
        rows = (await asyncio.to_thread(turnkeep, "info", "s", *where(worker))).stdout
        assert ("in sight" in rows, "full, no snapshots" in rows) == (False, bool(more))
        raw = json.loads((await asyncio.to_thread(turnkeep, "info", "s", "--json", *where(worker))).stdout)
        assert raw.get("cache") == ({"policy": "full", "snapshots": "none"} if more else None)
        assert not raw.keys() & {"capacity_tokens", "visible_tokens", "visible_from"}
        await worker.client.session("s").close()


@pytest.mark.parametrize("policy", ["half", "full:1", "sink_window:4", "sink_window:0,64", "paged:x"])
def test_ask_with_an_unknown_or_incomplete_cache_policy_exits_with_code_2_and_shows_the_valid_forms(
    policy: str,
) -> None:
    done = turnkeep(*ASKED, "--cache-policy", policy)
    assert done.returncode == 2
    assert f"'{policy}' must be full, sink_window:SINK,WINDOW with two numbers" in " ".join(
        done.stderr.split()
    )
