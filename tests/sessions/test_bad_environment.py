"""A faulty environment gives one error line and an exit code, and no acknowledged turn is lost."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from click.testing import CliRunner
from nats.js import JetStreamContext

from commands.cli import main
from tests.commands.command_runs import turnkeep
from tests.parts import WorkerProcess, free_port
from turnkeep_client.client import Client
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import SnapshotCounters

NOBODY = "nats://127.0.0.1:1"


def check_one_line(done: subprocess.CompletedProcess[str], code: int, *says: str) -> None:
    """Assert that a command failed with this exit code and one error line, beside log lines in JSON."""
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert done.returncode == code, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("turnkeep: ")
    assert "Traceback" not in done.stderr
    for part in says:
        assert part in lines[0]
    assert done.stdout == ""


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.process
@pytest.mark.parametrize(
    ("breakage", "says"), [("missing", "there is no model at"), ("weights", "is truncated or broken")]
)
def test_serve_with_a_missing_or_truncated_model_exits_with_one_line_that_names_the_model_folder(
    tmp_path: Path, tiny_model: Path, nats_url: str, breakage: str, says: str
) -> None:
    """The line that a user sees; `test_model.py` tests all ways in which a folder may be broken."""
    folder = tmp_path / "model"
    if breakage == "weights":
        shutil.copytree(tiny_model, folder)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    options = ("--data-dir", tmp_path / "data", "--nats", nats_url, "--prefix", f"env{os.getpid()}")
    check_one_line(turnkeep("serve", "--model", folder, *options), 1, says, str(folder))


def test_serve_with_a_file_in_place_of_its_data_directory_exits_with_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    done = turnkeep("serve", "--data-dir", tmp_path / "data", "--nats", NOBODY)
    check_one_line(done, 1, "there is a file in its place", "--data-dir")


def test_serve_with_a_read_only_data_directory_exits_with_a_one_line_error(
    mounted: Callable[[str], Path],
) -> None:
    folder = mounted("ro")
    done = turnkeep("serve", "--data-dir", folder / "data", "--nats", NOBODY)
    check_one_line(done, 1, "its file system is read-only", "--data-dir")


def test_serve_on_a_full_disk_exits_with_a_one_line_error(mounted: Callable[[str], Path]) -> None:
    folder = mounted("size=64k")
    (folder / "filler").write_bytes(bytes(64 * 1024))
    done = turnkeep("serve", "--data-dir", folder, "--nats", NOBODY)
    check_one_line(done, 1, "the disk is full", "--data-dir")


def test_serve_on_a_port_in_use_by_another_program_exits_with_a_one_line_error_that_names_the_port(
    tmp_path: Path, taken_port: int
) -> None:
    done = turnkeep("serve", "--data-dir", tmp_path / "data", "--nats-port", taken_port)
    check_one_line(done, 1, f"port {taken_port} of 127.0.0.1 is taken", "--nats-port")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--no-such-setting", "1"), "No such option"),
        (("--max-batch", "0"), "--max-batch: '0' is not valid: it must be a whole number from 1"),
        (("--max-disk", "much"), "--max-disk: 'much' is not valid"),
        (("--prefix", "a..b"), "--prefix: 'a..b' is not valid"),
        (("--config", "/no/such/file.toml"), "there is no settings file"),
        (("surplus",), "unexpected extra argument"),
    ],
)
def test_serve_with_an_unknown_option_or_a_value_out_of_range_exits_with_code_2(
    arguments: tuple[str, ...], says: str
) -> None:
    done = CliRunner().invoke(main, ["serve", *arguments])
    assert done.exit_code == 2
    assert says in done.output


@pytest.mark.process
async def test_requests_acknowledged_before_the_disk_became_full_are_answered_once_the_disk_has_space(
    mounted: Callable[[str], Path], worker_process: Callable[..., WorkerProcess]
) -> None:
    """The log is on the full disk and stores nothing more until then, with or without an error."""
    folder = mounted("size=24m")
    options = ("--data-dir", str(folder / "data"), "--log-max-bytes", "16MiB", "--max-disk", "1MiB")
    process = worker_process(*options, "--min-free-disk", "0")
    process.start()
    async with await process.client() as client:
        session = client.session("s")
        assert (await session.append(text="x")).position == 1
        nc = await nats.connect(process.url)
        js = nc.jetstream()
        fill(folder / "filler")
        taken = []
        for number in range(4):
            body = json.dumps({"type": "append", "id": f"r{number}", "text": "x"}).encode()
            with contextlib.suppress(nats.errors.Error):
                ack = await js.publish("turnkeep.default.s.in", body + b" " * 50_000, timeout=1)
                taken.append(ack.seq)
                continue
            break
        else:
            raise AssertionError("the disk was not full")
        (folder / "filler").unlink()
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(TurnkeepError):
                    last = await session.append(text="x", timeout_s=3)
                    break
        requests, answered = await log_of(js)
        assert set(taken) <= set(requests)
        assert sorted(answered) == sorted(requests)
        assert last.position >= 2 + len(taken)
        await nc.close()
    assert process.stop() == 0


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


async def log_of(js: JetStreamContext) -> tuple[list[int], list[int]]:
    """Return the sequences of all requests in the log, and the sequences of the requests with a result."""
    requests, answered = [], []
    for seq in range(1, (await js.stream_info("turnkeep_log")).state.last_seq + 1):
        message = await js.get_msg("turnkeep_log", seq)
        if str(message.subject).endswith(".in"):
            requests.append(seq)
        else:
            answered.append(json.loads(message.data or b"")["seq"])
    return requests, answered


def test_printing_the_help_imports_neither_mlx_nor_transformers_nor_nats() -> None:
    """So `--help` is fast."""
    commands = [
        [],
        ["serve"],
        ["chat"],
        ["ask"],
        ["info"],
        ["cancel"],
        ["model"],
        ["model", "list"],
        ["doctor"],
    ]
    program = (
        "import sys; from commands.cli import main\n"
        f"for command in {commands}: main([*command, '--help'], standalone_mode=False)\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == len(commands)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert not loaded & {"mlx", "mlx_lm", "transformers", "nats", "numpy"}


async def test_commands_without_a_nats_server_exit_with_a_one_line_error_that_names_a_remedy(
    tmp_path: Path,
) -> None:
    """`serve` does so before it reads its model's file, which is none."""
    (tmp_path / "model.gguf").write_bytes(b"junk")
    commands = [("ask", "hello"), ("info",), ("info", "s"), ("cancel", "s", "r"), ("chat",)]
    options = ("--data-dir", tmp_path / "data", "--nats", NOBODY, "--model", tmp_path / "model.gguf")
    serve = asyncio.to_thread(turnkeep, "serve", *options)
    others = [asyncio.to_thread(turnkeep, *command, "--nats", NOBODY) for command in commands]
    served, *done = await asyncio.gather(serve, *others)
    check_one_line(served, 1, f"no NATS server answers at {NOBODY}", "nats-server -js")
    for each in done:
        check_one_line(
            each, 1, f"no NATS server at {NOBODY}: connection refused", "name another one with --nats"
        )


def test_the_command_info_without_a_running_worker_prints_the_command_that_starts_a_worker(
    tmp_path: Path,
) -> None:
    port = free_port()
    options = ("--data-dir", tmp_path, "--nats-port", port)
    serve = f"start a worker with: turnkeep serve --data-dir {tmp_path} --nats-port {port}"
    check_one_line(turnkeep("info", *options), 1, f"no NATS server at nats://127.0.0.1:{port}", serve)


def test_a_command_on_a_nats_server_without_a_worker_exits_with_a_one_line_error_that_no_worker_runs(
    nats_url: str,
) -> None:
    options = ("--nats", nats_url, "--prefix", "nobody-here")
    serve = f"start a worker with: turnkeep serve --nats {nats_url} --prefix nobody-here"
    check_one_line(turnkeep("ask", "hello", *options), 1, "no worker", serve)
    check_one_line(turnkeep("info", *options), 1, "no worker serves nobody-here", serve)
    check_one_line(turnkeep("info", "s", *options), 1, "no worker serves nobody-here.default.s.ctl")
    check_one_line(turnkeep("cancel", "s", "r", *options), 1, "no worker serves nobody-here.default.s.ctl")


async def until(client: Client, reached: Callable[[SnapshotCounters], bool]) -> None:
    """Wait until `reached` is true of the snapshot counters, and no snapshot is being written."""
    async with asyncio.timeout(20):
        async for metrics in client.metrics():
            counts = metrics.snapshots
            settled = counts.durable + sum(counts.dropped.values()) + counts.failed + counts.cancelled
            assert counts.accepted == settled + counts.in_flight
            if counts.in_flight == 0 and reached(counts):
                return


async def talk(client: Client, name: str, first: int, end: int) -> list[Any]:
    """Run a session's turns from `first` to before `end`; turn 0 has more than four blocks."""
    texts = [f"{name} says " * 15, " and then?", " and then?"]
    return [await client.session(name).generate(text=text, max_tokens=8) for text in texts[first:end]]


@pytest.mark.process
async def test_remounting_the_disk_read_only_and_back_fails_no_turn_and_loses_no_stored_snapshot(
    mounted: Callable[[str], Path],
    read_only: Callable[[Path, bool], None],
    worker_process: Callable[..., WorkerProcess],
) -> None:
    data = mounted("size=64m") / "data"
    process = worker_process("--data-dir", str(data), "--min-free-disk", "0")
    process.start()
    async with await process.client() as client:
        before = await talk(client, "before", 0, 1)
        await until(client, lambda counts: counts.durable > 0)

        read_only(data / "snapshots", True)
        during = await talk(client, "during", 0, 1)
        await until(client, lambda counts: counts.failed > 0)
        before += await talk(client, "before", 1, 2)
        assert before[1].usage.cached_tokens == before[0].position - 1

        read_only(data / "snapshots", False)
        durable = (await client.session("before").info()).worker.snapshots.durable
        async with asyncio.timeout(20):
            number = 0
            while (await client.session("before").info()).worker.snapshots.durable == durable:
                number += 1
                after = await talk(client, f"after{number}", 0, 1)
        await until(client, lambda counts: True)
    process.kill()
    said = [json.loads(line) for line in process.log.splitlines() if line.startswith("{")]
    assert [line["code"] for line in said if line["event"] == "snapshot_writes_failing"] == ["EROFS"]
    assert [line["event"] for line in said].count("snapshot_writes_recovered") == 1

    process.start()
    # Another tenant shares no KV, so nothing of its answer is restored.
    async with await process.client() as client, await process.client(tenant="other") as other:
        before += await talk(client, "before", 2, 3)
        during += await talk(client, "during", 1, 2)
        after += await talk(client, f"after{number}", 1, 2)
        assert before[2].usage.cached_tokens >= before[0].position - 1, "at least what was stored by then"
        assert during[1].usage.cached_tokens < during[0].position, "perhaps all: it is written later"
        assert after[1].usage.cached_tokens == after[0].position - 1
        for name, turns in (("before", before), ("during", during), (f"after{number}", after)):
            alone = await talk(other, name, 0, len(turns))
            assert [turn.tokens for turn in turns] == [turn.tokens for turn in alone]
    assert process.stop() == 0
