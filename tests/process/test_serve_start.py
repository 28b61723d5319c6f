"""A worker finds faults of model and settings before it makes a stream."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import nats
import pytest
import structlog
from nats.js.errors import NotFoundError

from cache.names.policy import Policy
from tests.commands.command_runs import turnkeep
from tests.parts import free_port
from turnkeep_client.errors import TurnkeepError
from worker.app import App
from worker.observe.logs import configure
from worker.process.datadir import DataDir
from worker.process.settings import Settings

pytestmark = pytest.mark.process

WRONG: dict[str, tuple[dict[str, object], str]] = {
    "no model": ({"model": "/no/such/model"}, "there is no model at /no/such/model"),
    "a model in an unknown home": ({"model": "~nobody-here/x"}, "there is no model at ~nobody-here/x"),
    "too little memory": ({"device_memory": 2**20}, "leaves no room for KV"),
    "too much memory": ({"device_memory": 2**50}, "device_memory is 1048576 GiB, and this machine has"),
    "too large a window": (
        {"cache_policy": Policy(4, 4096)},
        "cache_policy cannot be the default here: a sink of 4 and a window of 4096 tokens exceed the context",
    ),
    "too small a window": (
        {"cache_policy": Policy(4, 64)},
        "cache_policy cannot be the default here: a window of 64 tokens is smaller than this worker's block",
    ),
}


def serve(folder: Path, *options: object) -> subprocess.CompletedProcess[str]:
    return turnkeep("serve", "--data-dir", folder / "data", *options)


async def fail_to_start(**settings: object) -> str:
    """Run a worker in this process; return the message of the error that ends it."""
    with pytest.raises(TurnkeepError) as told:
        await App(Settings(**settings)).run()  # type: ignore[arg-type]
    return str(told.value)


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_missing_model_or_too_little_memory_fails_a_worker_start_before_a_nats_stream_is_created(
    wrong: str, tmp_path: Path, tiny_model: Path, nats_url: str
) -> None:
    changes, says = WRONG[wrong]
    prefix = f"t{uuid4().hex}"
    usual = {"data_dir": tmp_path / "data", "nats": nats_url, "prefix": prefix, "model": str(tiny_model)}
    assert says in await fail_to_start(**(usual | changes))
    client = await nats.connect(nats_url)
    with pytest.raises(NotFoundError):
        await client.jetstream().find_stream_name_by_subject(f"{prefix}.default.s.in")
    await client.close()


def test_a_worker_without_a_terminal_logs_a_model_conversion_without_colour_codes(tmp_path: Path) -> None:
    from tests.model.tiny_gguf import TinyLlama

    path = TinyLlama().write(tmp_path / "tiny.gguf")
    options = ("--model", str(path), "--device-memory", "1MiB", "--log-format", "console")
    done = serve(tmp_path, "--nats-port", free_port(), *options)
    assert "[info     ] converting weights" in done.stderr
    assert "\x1b" not in done.stderr


def test_serve_does_not_read_output_printed_by_model_code_as_a_status_report_of_its_worker(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Importing mlx-lm's olmo prints a line on standard output, and then exits."""
    olmo = shutil.copytree(tiny_model, tmp_path / "olmo")
    config = json.loads((olmo / "config.json").read_text())
    (olmo / "config.json").write_text(json.dumps(config | {"model_type": "olmo"}))
    done = serve(tmp_path, "--nats-port", free_port(), "--model", olmo)
    told = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert (done.returncode, len(told)) == (1, 2), done.stderr
    assert told[0].startswith("To run olmo")
    assert told[1].startswith(f"turnkeep: {olmo} cannot be loaded: the code of its model_type olmo")


def test_serve_check_exits_with_0_if_a_worker_would_start_and_starts_no_nats_server(
    tmp_path: Path, tiny_model: Path
) -> None:
    done = serve(tmp_path, "--check", "--model", tiny_model, "--nats-port", free_port())
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list((tmp_path / "data" / "nats").iterdir())


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--model", "/no/such/model"), 1, "nothing at /no/such/model"),
        (("--max-batch", "0"), 2, "--max-batch: '0' is not valid"),
        (("--device-memory", "1024TiB"), 1, "device_memory is 1048576 GiB, and this machine has"),
    ],
)
def test_serve_check_fails_with_the_reason_for_a_missing_model_or_an_option_out_of_range(
    options: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    done = serve(tmp_path, "--check", *options)
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


@pytest.mark.parametrize("check", [(), ("--check",)])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--nats-port", "4301", "--gateway", "4301"), "--nats-port and --gateway have the same port 4301"),
        (
            ("--log-replicas", "3"),
            "log_replicas needs a cluster of NATS servers, and the worker's own is one",
        ),
    ],
)
def test_serve_with_and_without_the_option_check_refuses_settings_that_contradict_each_other(
    check: tuple[str, ...], options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    """With code 2, at which a service does not start again, and before a NATS server runs."""
    done = serve(tmp_path, *check, *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(f"turnkeep: {says}")
    assert not (tmp_path / "data" / "nats-server.conf").exists()


def test_serve_check_fails_for_a_data_directory_that_another_worker_uses(
    tmp_path: Path, tiny_model: Path
) -> None:
    own = ("--check", "--model", tiny_model, "--nats-port", free_port())
    with DataDir.open(tmp_path / "data", "other"):
        done = serve(tmp_path, *own)
    assert done.returncode == 1, done.stdout
    assert f"is in use by worker other (pid {os.getpid()})" in done.stdout


def test_serve_check_fails_if_another_program_holds_the_port_of_the_gateway(
    tmp_path: Path, tiny_model: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        own = ("--model", tiny_model, "--nats-port", free_port())
        done = serve(tmp_path, "--check", *own, "--gateway", port)
    assert done.returncode == 1, done.stdout
    assert f"port {port} of 127.0.0.1 is taken by another program" in done.stdout


def test_each_log_line_of_a_worker_is_written_by_a_single_system_call():
    reading, writing = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # which keeps writes apart
    lines = 'configure("json", "info"); log = structlog.get_logger(); log.info("one"); log.info("two")'
    source = f"import structlog; from worker.observe.logs import configure; {lines}"
    with reading, writing:
        subprocess.run([sys.executable, "-c", source], stderr=writing, check=True)
        written = [reading.recv(4096) for _ in range(2)]
    assert [json.loads(line)["event"] for line in written] == ["one", "two"]
    assert all(line.endswith(b"\n") for line in written)


def test_a_warning_that_comes_again_and_again_is_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As when the worker's user loses its permissions, or a cluster its quorum: it goes on trying."""
    before = structlog.get_config()
    try:
        configure("json", "info")
        log = structlog.get_logger()
        for now_s in (1000, 1001, 1059, 1061):
            monkeypatch.setattr("worker.observe.logs.monotonic", lambda now_s=now_s: now_s)
            for what in ("in", "out"):
                log.warning("NATS error", error=what)
            log.error("a turn failed")
    finally:
        structlog.configure(**before)
    told = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [one["error"] for one in told if one["level"] == "warning"] == ["in", "out"] * 2
    assert len([one for one in told if one["level"] == "error"]) == 4


def test_a_log_line_that_cannot_be_written_is_dropped_without_an_error():
    source = "import structlog; from worker.observe.logs import configure; configure('json', 'info')"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{source}; [structlog.get_logger().info('one') for _ in range(1000)]; print(1)",
        ],
        stderr=writing,
        stdout=subprocess.PIPE,
        check=True,
    )
    os.close(writing)
    assert done.stdout == b"1\n"
