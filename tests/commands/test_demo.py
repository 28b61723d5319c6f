"""`turnkeep demo` and `turnkeep run`: one command starts workers, answers, and leaves no process."""

import asyncio
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_runs import WAIT_S, Terminal, environment, processes_with, turnkeep

from tests.forked import Piped
from tests.model.tiny_gguf import TinyLlama
from tests.parts import WorkerProcess, free_port, make_endless_model, make_tiny_model
from worker.process.datadir import holder

pytestmark = pytest.mark.process


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny = make_tiny_model(tmp_path / "tiny", max_position_embeddings=8192)
    return make_endless_model(tiny, tmp_path / "endless")


def test_the_demo_continues_its_answers_after_worker_kills_and_prints_how_many_tokens_were_prefilled(
    tmp_path: Path, model: Path
) -> None:
    done = turnkeep("demo", "--data-dir", tmp_path / "data", TURNKEEP_MODEL=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9 in the middle of the answer" in done.stdout
    rows = [line for line in done.stdout.splitlines() if re.search(r"… +SSD +\d", line)]
    assert len(rows) == 2, done.stdout
    assert "tokens were prefilled, and the first token" in done.stdout
    assert re.search(r"stay for the next run: rm -r +\S+data +frees \d+", done.stdout.replace("\n", " "))


@pytest.mark.packaging
def test_the_demo_on_a_terminal_hides_the_startup_messages_of_its_workers(
    tmp_path: Path, model: Path
) -> None:
    place = ("--data-dir", tmp_path / "data")
    with Terminal("demo", *place, TURNKEEP_MODEL=str(model)) as terminal:
        terminal.wait_for("When was the lighthouse built")
        terminal.type("\x03")
        terminal.end()
        assert "In another terminal" not in terminal.transcript
        assert "start" not in terminal.transcript.replace("first start", ""), "the worker shows its own steps"
    with Terminal("demo", "--data-dir", tmp_path / "other", "--model", "no/where/at/all") as terminal:
        assert terminal.end() == 1
        assert re.search(r"^turnkeep: there is no model", terminal.transcript, re.MULTILINE)


@pytest.mark.packaging
@pytest.mark.parametrize("ended", ["SIGTERM", "SIGKILL", "closed terminal"])
def test_a_demo_ended_by_a_signal_or_a_closed_terminal_leaves_no_worker_and_no_nats_server(
    tmp_path: Path, model: Path, ended: str
) -> None:
    data = tmp_path / "data"
    with Terminal("demo", "--data-dir", data, TURNKEEP_MODEL=str(model)) as terminal:
        terminal.wait_for("When was the lighthouse built")
        if ended == "closed terminal":
            terminal.hang_up()
        else:
            terminal.process.send_signal(getattr(signal, ended))
        terminal.process.wait(WAIT_S)
    deadline = time.monotonic() + 20
    while (left := processes_with(str(data))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.packaging
def test_in_the_cluster_demo_the_second_worker_continues_the_answer_of_the_killed_worker(
    tmp_path: Path, model: Path
) -> None:
    done = turnkeep("demo", "--cluster", "--data-dir", tmp_path / "data", TURNKEEP_MODEL=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    (killed, other) = re.findall(r"kill -9 of worker (\w+), which answers. Worker (\w+)", done.stdout)[0]
    assert {killed, other} == {"one", "two"}
    went_on = rf"mid-answer; after [\d.]+ s worker {other} went on with it"
    assert re.search(went_on, done.stdout), done.stdout
    prefilled = re.findall(r"prefilled\s+(\d+) tokens; for the next question (\d+),", done.stdout)
    assert max(map(int, prefilled[0])) < 400, "of more than 2,000"


def test_the_command_run_starts_a_worker_answers_a_message_and_leaves_no_process(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = tmp_path / "data"
    place = ("--data-dir", data, "--nats-port", free_port())
    done = turnkeep("run", tiny_model, "Hello", *place, "--max-tokens", 4, "--seed", 1)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 0
    assert done.stderr.startswith("starting a worker; it ends with this command\n")
    assert "\nreading the tokenizer\n" in done.stderr, "a start that takes long is not silent"
    assert holder(data) is None
    assert processes_with(str(data)) == []


def test_the_command_run_on_a_terminal_continues_the_chat_of_its_previous_run(
    tmp_path: Path, tiny_model: Path
) -> None:
    place = ("--data-dir", str(tmp_path / "data"), "--nats-port", str(free_port()))
    for found in ("no tokens", r"session .chat., \d+ tokens"):
        with Terminal("run", tiny_model, *place, "--max-tokens", "4") as terminal:
            terminal.wait_for(found)
            terminal.wait_for("\\n>")
            terminal.type("Hello\r")
            terminal.wait_for("max_tokens")
            terminal.type("/bye\r")
            assert terminal.end() == 0
    assert processes_with(str(tmp_path / "data")) == []


def test_the_command_run_refuses_a_question_an_empty_text_or_a_missing_path_as_its_model_with_the_reason(
    tmp_path: Path,
) -> None:
    questions = [
        (one, 2, f"is a model, and {one!r} is none; to ask it: echo {shlex.quote(one)} | turnkeep run\n")
        for one in ("Say hello", "line\nbreak")
    ]
    for name, code, says in (
        *questions,
        ("", 2, "the first argument of run is a model, and it is empty\n"),
        (tmp_path / "nosuch", 1, ""),
    ):
        words = () if (name, code, says) in questions else ("Hello",)
        done = turnkeep("run", name, *words, "--data-dir", tmp_path / "data", "--nats-port", free_port())
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr.endswith(says)
        assert ("starting a worker" in done.stderr, "there is no model at" in done.stderr) == 2 * (code == 1,)


async def test_the_command_run_uses_an_already_running_worker_and_leaves_the_worker_running(
    worker_process: Callable[..., WorkerProcess],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = worker_process(model=tiny_model)
    worker.start()
    await (await worker.client()).close()
    place = ("--data-dir", worker.data_dir, "--nats-port", worker.url.rpartition(":")[2], "--max-tokens", 3)
    done = await asyncio.to_thread(turnkeep, "run", tiny_model.name, "Hello", *place)
    assert done.returncode == 0, done.stderr
    one = await asyncio.to_thread(turnkeep, "run", "nosuch", *place)
    assert one.returncode == 1
    assert "nosuch cannot be served: there is no model nosuch" in one.stderr
    shutil.copytree(tiny_model, worker.data_dir / "models" / "other")
    other = await asyncio.to_thread(turnkeep, "run", "other", "Hello", *place)
    assert other.returncode == 0, other.stderr
    assert f"changing the worker's model from {tiny_model.name} to other\n" in other.stderr
    async with await worker.client() as client:
        assert (await client.worker_metrics()).model == "other"
    TinyLlama().but(tokenizer__chat_template="{% for one in messages %}{{ one.content }}{% endfor %}").write(
        tmp_path / "small.gguf"
    )
    monkeypatch.chdir(tmp_path)
    file = await asyncio.to_thread(turnkeep, "run", "small.gguf", "Hello", *place, fresh=True)
    assert file.returncode == 0, file.stderr
    assert f"changing the worker's model from other to {tmp_path / 'small.gguf'}\n" in file.stderr
    (converted,) = (worker.data_dir / "models").glob("small-*")
    for same in (tmp_path / "small.gguf", converted):
        again = await asyncio.to_thread(turnkeep, "run", same, "Hello", *place)
        assert (again.returncode, "changing" in again.stderr) == (0, False), again.stderr
    with Piped(["-m", "commands", "run", *map(str, place)], environment()) as waiting:
        await asyncio.sleep(1.5)  # then it waits for the end of the question
        waiting.terminate()
        assert await asyncio.to_thread(waiting.wait, 10) in {-signal.SIGTERM, 143}
    assert worker.running
