"""The worker's NATS server requires its own token, and no credentials appear in logs, errors or reports."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import nats
import pytest
import structlog

from tests.commands import command_runs
from tests.commands.command_runs import command
from tests.parts import WorkerProcess
from turnkeep_client.redact import redact, shown
from worker.observe.logs import configure
from worker.process.datadir import DataDir
from worker.process.settings import Settings, SettingsError
from worker.wire.broker import EmbeddedServer
from worker.wire.connection import BrokerError
from worker.wire.credentials import client_options

USER, PASSWORD, TOKEN = "alice-user", "s3cr3t-w0rd", "t0ken-of-the-realm"
SECRETS = (USER, PASSWORD, TOKEN, "wr0ng")
PATIENCE_S = 60


def turnkeep(*arguments):
    """Run a command; return its exit code, and its output and errors as one text."""
    done = command_runs.turnkeep(*arguments)
    return done.returncode, done.stdout + done.stderr


def check_silent(text):
    for secret in SECRETS:
        assert secret not in text


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("nats://host:4222", "nats://host:4222"),
        ("host", "nats://host"),
        ("nats://alice-user:s3cr3t-w0rd@host:4222", "nats://host:4222"),
        ("tls://t0ken-of-the-realm@host", "tls://host"),
        ("nats://alice-user:s3cr3t-w0rd@[::1]:4222", "nats://[::1]:4222"),
        ("nats://alice-user:a@b@s3cr3t-w0rd@host", "nats://host"),
        ("nats://alice-user:s3cr3t-w0rd/x@host:1", "nats://host:1"),
        ("nats://alice-user:s3cr3t-w0rd://x@host:1", "nats://host:1"),
        ("alice-user:s3cr3t-w0rd@host:1", "nats://host:1"),
        ("alice-user:s3cr3t-w0rd://x@host:1", "nats://host:1"),
        ("nats://host:1/s3cr3t-w0rd", "nats://host:1"),
        ("nats://host?s3cr3t-w0rd#s3cr3t-w0rd", "nats://host"),
        ("nats://alice-user:s3cr3t-w0rd", "nats://(not a host and port)"),
        ("nats://a:s3cr3t-w0rd@h:1, nats://b:s3cr3t-w0rd@i:2", "nats://h:1,nats://i:2"),
        ("nats://[s3cr3t-w0rd", "nats://(not a host and port)"),
        ("", "nats://(not a host and port)"),
    ],
)
def test_a_nats_url_is_printed_with_host_and_port_and_without_credentials(urls, expected):
    assert shown(urls) == expected


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_log_lines_and_tracebacks_contain_no_nats_credentials(log_format, capfd):
    """For example, another package's exception may contain the URL."""
    before = structlog.get_config()
    try:
        configure(log_format, "debug")
        log = structlog.get_logger()
        url = f"wss://{USER}:{PASSWORD}@host:443"
        log.info("told", url=url, nested={"urls": [url, "nats://a:1"]})
        try:
            int(f"401, url='{url}'")
        except ValueError:
            log.exception("failed")
        log.error(
            "the tier fails", error=f"s3://bucket/kv?sig={PASSWORD}&se=1: denied", place=f"a://b?{USER}"
        )
    finally:
        structlog.configure(**before)
    written = capfd.readouterr().err
    check_silent(written)
    assert "wss://host:443" in written
    assert "401, url='wss://host:443'" in written
    assert "s3://bucket/kv?...: denied" in written
    assert redact("see http://host/a@b? It is there") == "see http://host/a@b? It is there"


@pytest.mark.parametrize("words", [("serve", "--check"), ("doctor",)])
def test_a_remote_tier_that_cannot_be_used_is_told_without_the_signature_in_its_url(tmp_path, words):
    url = f"nosuch://bucket/kv?sig={PASSWORD}"
    done = command_runs.turnkeep(*words, "--data-dir", tmp_path, "--remote-tier", url)
    assert done.returncode == 1
    assert "remote_tier: nosuch://bucket/kv?... cannot be used: Generic URL error" in done.stderr
    check_silent(done.stdout + done.stderr)


@pytest.mark.parametrize(
    "url",
    [
        f"nats://{USER}:{PASSWORD}",
        f"{USER}:{PASSWORD}",
        f"nats://{USER}:{PASSWORD}/x@host:4222",
        f"nats://{USER}:{PASSWORD}#x@host:4222",
        f"nats://{USER}#{PASSWORD}@host:4222",
        f"nats://{USER}/{PASSWORD}@host:4222",
        f"http://{USER}:{PASSWORD}@host:4222",
        f"nats://{USER}:{PASSWORD}@host:99999",
        f"nats://{USER}:{PASSWORD}@[::1",
        f"nats://host:1,nats://{USER}:{PASSWORD}@",
    ],
)
@pytest.mark.parametrize("command", ["serve", "doctor", "info"])
def test_a_malformed_nats_url_is_refused_without_repeating_its_credentials(command, url, tmp_path):
    from click.testing import CliRunner

    from commands.cli import main

    data = () if command == "info" else ("--data-dir", str(tmp_path))
    done = CliRunner().invoke(main, [command, "--nats", url, *data])
    assert done.exit_code == 2, done.output
    assert "NATS URLs such as nats://host:4222" in done.output
    check_silent(done.output + repr(done.exception))


@pytest.mark.process
@pytest.mark.parametrize("kind", ["password", pytest.param("token", marks=pytest.mark.soak)])
async def test_a_worker_and_its_commands_print_no_credentials_even_after_a_failed_login(
    foreign_server, tmp_path, worker_process, kind
):
    """Covers start, commands, wrong credentials, a reload, a lost NATS server, and the stop."""
    right = f"{USER}:{PASSWORD}" if kind == "password" else TOKEN
    asked = {"user": USER, "password": PASSWORD} if kind == "password" else {"token": TOKEN}
    config = {"jetstream": {"store_dir": str(tmp_path / "js")}, "authorization": asked}
    plain = await foreign_server(**config)
    url = plain.replace("://", f"://{right}@")
    worker = worker_process("--nats", url, "--log-level", "debug", "--log-max-bytes", "64MiB")
    worker.start()

    async def logged(event, times=1):
        async with asyncio.timeout(PATIENCE_S):
            while worker.log.count(event) < times:
                assert worker.running, worker.log
                await asyncio.sleep(0.05)

    await logged('"event": "ready"')
    assert f'"nats": "{plain}"' in worker.log
    for words in (("ask", "hi", "--max-tokens", 2), ("info",), ("info", "--json"), ("doctor",)):
        code, written = await asyncio.to_thread(turnkeep, *words, "--nats", url)
        assert code == 0 or words == ("doctor",), written
        check_silent(written)
    for name in ("ask", "doctor", "serve"):
        wrong = plain.replace("://", "://wr0ng:wr0ng@")
        arguments = ("hi",) if name == "ask" else ("--data-dir", tmp_path / "other")
        code, written = await asyncio.to_thread(turnkeep, name, *arguments, "--nats", wrong)
        assert code == 1
        check_silent(written)
    os.kill(worker.pid, signal.SIGHUP)
    await logged("read the settings again")
    foreign_server.processes[0].kill()
    foreign_server.processes[0].wait()
    await logged("lost the connection to NATS")
    await foreign_server(**{**config, "authorization": {"token": "another"}})
    await logged("the NATS server refuses the credentials")
    await asyncio.to_thread(worker.stop)
    check_silent(worker.log)
    for file in tmp_path.glob("data/**/*"):
        if file.is_file() and file.suffix in {".log", ".json", ".lock", ".conf", ""}:
            check_silent(file.read_text("utf-8", "replace"))
    assert all(json.loads(line) for line in worker.log.splitlines() if line.startswith("{"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def worker(worker_process: Callable[..., WorkerProcess]) -> WorkerProcess:
    worker = worker_process()
    worker.start()
    while '"ready"' not in worker.log:
        time.sleep(0.05)
    return worker


def port_of(worker: WorkerProcess) -> str:
    return worker.url.rpartition(":")[2]


def place(worker: WorkerProcess) -> list[str]:
    return ["--data-dir", str(worker.data_dir), "--nats-port", port_of(worker)]


@pytest.mark.process
async def test_commands_read_the_nats_token_from_the_data_directory(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    """Or from a folder with a copy of it."""
    where = place(worker)
    async with await worker.client() as client:
        await client.session("s").append(text="x")
    for words in (["info", "s"], ["sessions"], ["top"]):
        done = await command(*words, *where)
        if words != ["top"]:
            assert (done.returncode, done.stderr) == (0, ""), words
    assert "needs a terminal" in done.stderr, "it has come further than the connection"
    printed = await command("info", "--url", *where[:2])
    other = await nats.connect(printed.stdout.strip())  # as any program may
    await other.close()
    shutil.copy(worker.data_dir / "nats-token", tmp_path)
    done = await command("sessions", "--data-dir", str(tmp_path), "--nats-port", port_of(worker))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.process
async def test_a_copy_of_a_data_directory_does_not_lead_commands_to_the_worker_of_the_original(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    async with await worker.client() as client:
        await client.session("s").append(text="x")
    copy = tmp_path / "copy"
    shutil.copytree(worker.data_dir, copy)
    at = ["--data-dir", str(copy)]
    for words in (
        ["close", "--forget", "s"],
        ["drain", "one"],
        ["info", "--url"],
        ["sessions", *place(worker)],
    ):
        done = await command(*words, *at)
        assert (done.returncode, done.stdout) == (1, ""), words
        assert done.stderr.startswith(f"turnkeep: no worker runs on the data directory {copy}; start"), words
    assert "s " in (await command("sessions", *place(worker))).stdout


async def first_word(port: int, **login: str) -> bytes:
    """Log in over a raw socket; return the server's first reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert (await reader.readline()).startswith(b"INFO ")
    writer.write(f"CONNECT {json.dumps({'verbose': False} | login)}\r\nPING\r\n".encode())
    said = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return said.strip()


@pytest.mark.process
async def test_the_embedded_nats_server_refuses_connections_without_the_exact_token(
    worker: WorkerProcess,
) -> None:
    port = int(port_of(worker))
    token = (worker.data_dir / "nats-token").read_text().strip()
    assert await first_word(port, auth_token=token) == b"PONG"
    wrong: list[dict[str, str]] = [
        {},
        {"auth_token": ""},
        {"auth_token": token[:-1]},
        {"auth_token": token + "x"},
    ]
    wrong += [{"user": token}, {"user": "a", "pass": token}, {"user": "", "pass": ""}]
    for login in wrong:
        assert await first_word(port, **login) == b"-ERR 'Authorization Violation'", login


@pytest.mark.process
async def test_a_command_without_the_right_nats_token_fails_and_names_the_data_directory_that_has_the_token(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    port = port_of(worker)
    other = tmp_path / "other"
    where = ["--data-dir", str(other), "--nats-port", port]
    done = await command("sessions", *where)
    assert done.returncode == 1
    assert done.stderr == (
        f"turnkeep: the NATS server at nats://127.0.0.1:{port} wants a token, and there is no"
        f" {other}/nats-token; name its worker's data directory by --data-dir\n"
    )
    done = await command("info", "--url", *where[:2])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"turnkeep: there is no {other}/nats-token; start its worker, or name another --data-dir\n"
    )
    other.mkdir()
    (other / "nats-token").write_text("s3cr3t-and-wrong-token\n")
    done = await command("sessions", *where)
    assert done.returncode == 1
    assert done.stderr == (
        f"turnkeep: the NATS server at nats://127.0.0.1:{port} refuses the token in"
        f" {other}/nats-token; name its worker's data directory by --data-dir\n"
    )


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_of_the_machine_gets_an_error_that_the_nats_token_cannot_be_read(
    directory: DataDir, settings: Settings
) -> None:
    EmbeddedServer(directory, settings)
    os.seteuid(65534)
    try:
        with pytest.raises(SettingsError) as told:
            client_options(settings)
    finally:
        os.seteuid(0)
    assert str(told.value) == (
        f"{settings.data_dir}/nats-token cannot be read: Permission denied; run as the worker's user, or name"
        " a folder with a copy as --data-dir"
    )


@pytest.mark.process
def test_the_nats_token_file_is_readable_only_by_its_owner_and_unchanged_after_a_restart(
    directory: DataDir, settings: Settings
) -> None:
    token, seen = settings.data_dir / "nats-token", set()
    for _ in range(2):
        EmbeddedServer(directory, settings)
        assert mode(token) == 0o600
        seen.add(token.read_text())
        token.chmod(0o644)  # as a copy of the directory may have it
    assert len(seen) == 1
    assert len(seen.pop().strip()) >= 43, "32 random bytes"


@pytest.mark.process
async def test_the_nats_token_appears_in_no_log_no_command_output_and_no_process_list(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    process = worker_process("--log-level", "debug")
    process.start()
    async with await process.client() as client:
        await client.session("s").append(text="hello")
        token = (process.data_dir / "nats-token").read_text().strip()
        port = int(process.url.rpartition(":")[2])
        assert b"Authorization" in await first_word(port, auth_token="wrong")
        info = await command("info", "--json", "--data-dir", process.data_dir, "--nats", process.url)
        assert token not in info.stdout + info.stderr
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=False).stdout  # noqa: ASYNC221
    assert process.stop() == 0
    logs = [process.log, *(path.read_text() for path in (process.data_dir / "logs").iterdir())]
    assert len(logs) == 2
    assert token not in "".join(logs) + commands
    kept = {path.name for path in process.data_dir.iterdir() if path.is_file() and token in path.read_text()}
    assert kept == {"nats-token", "nats-server.conf"}


@pytest.mark.process
@pytest.mark.parametrize("broken", ["short", "with a space in it, and longer", "käse-käse-käse-käse"])
def test_a_nats_token_file_without_a_valid_token_makes_the_start_fail_and_stays_unchanged(
    directory: DataDir, settings: Settings, broken: str
) -> None:
    path = settings.data_dir / "nats-token"
    path.write_text(broken)
    with pytest.raises(BrokerError) as told:
        EmbeddedServer(directory, settings)
    assert str(told.value) == f"{path} holds no token; remove it, and the next start makes one"
    assert path.read_text() == broken


@pytest.mark.process
def test_an_empty_nats_token_file_is_filled_with_a_new_token_at_the_start(
    directory: DataDir, settings: Settings
) -> None:
    """A power cut may empty a file that was just written."""
    (settings.data_dir / "nats-token").write_text("")
    made = EmbeddedServer(directory, settings).token
    assert EmbeddedServer(directory, dataclasses.replace(settings, nats_port=1)).token == made
