"""The user, password or token of the NATS URL appears in no log, error or report."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.parse

import pytest
import structlog

from tests.commands import command_runs
from turnkeep_client.client import connect as client
from turnkeep_client.errors import NoWorkerError
from turnkeep_client.redact import redact, shown
from worker.observe.logs import configure
from worker.wire.connection import BrokerError, connect

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
def test_a_nats_url_is_shown_with_host_and_port_and_without_credentials(urls, expected):
    assert shown(urls) == expected


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_log_lines_and_tracebacks_show_no_credentials(log_format, capfd):
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
    finally:
        structlog.configure(**before)
    written = capfd.readouterr().err
    check_silent(written)
    assert "wss://host:443" in written
    assert "401, url='wss://host:443'" in written
    assert redact("see http://host/a@b") == "see http://host/a@b"


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


@pytest.mark.parametrize("name", ["nats", "unreadable"])
async def test_the_error_for_a_missing_nats_server_shows_no_credentials(name, unused_port):
    host = "127.0.0.1" if name == "nats" else "no such host"
    for user in (f"{USER}:{PASSWORD}", TOKEN, f"{USER}:a@{PASSWORD}", f"{USER}:{urllib.parse.quote('/#@')}"):
        url = f"nats://{user}@{host}:{unused_port}"
        with pytest.raises(BrokerError, match="no NATS server answers at nats://") as refused:
            await connect(url, name="test", timeout_s=0.4)
        check_silent(str(refused.value))
        with pytest.raises(NoWorkerError, match="no NATS server at nats://") as refused:
            await client(url, connect_timeout_s=0.4)
        check_silent(str(refused.value))


@pytest.mark.process
@pytest.mark.parametrize("kind", ["password", pytest.param("token", marks=pytest.mark.soak)])
async def test_a_worker_and_its_commands_print_no_credentials_even_after_a_failed_login(
    foreign_server, tmp_path, tiny_model, kind
):
    """Covers start, commands, wrong credentials, a reload, a lost NATS server, and the stop."""
    right = f"{USER}:{PASSWORD}" if kind == "password" else TOKEN
    asked = {"user": USER, "password": PASSWORD} if kind == "password" else {"token": TOKEN}
    config = {"jetstream": {"store_dir": str(tmp_path / "js")}, "authorization": asked}
    plain = await foreign_server(**config)
    url = plain.replace("://", f"://{right}@")
    log_file = tmp_path / "worker.log"
    options = ["--data-dir", tmp_path / "data", "--nats", url, "--model", tiny_model, "--log-level", "debug"]
    options += ["--log-max-bytes", "64MiB", "--log-format", "json"]
    with log_file.open("wb") as output:
        worker = subprocess.Popen(  # noqa: ASYNC220  # it outlives this block
            [sys.executable, "-m", "commands", "serve", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    async def logged(event, times=1):
        async with asyncio.timeout(PATIENCE_S):
            while log_file.read_text().count(event) < times:
                assert worker.poll() is None, log_file.read_text()
                await asyncio.sleep(0.05)

    try:
        await logged('"event": "ready"')
        assert f'"nats": "{plain}"' in log_file.read_text()
        for command in (("ask", "hi", "--max-tokens", 2), ("info",), ("info", "--json"), ("doctor",)):
            code, written = await asyncio.to_thread(turnkeep, *command, "--nats", url)
            assert code == 0 or command == ("doctor",), written
            check_silent(written)
        for command in ("ask", "doctor", "serve"):
            wrong = plain.replace("://", "://wr0ng:wr0ng@")
            arguments = ("hi",) if command == "ask" else ("--data-dir", tmp_path / "other")
            code, written = await asyncio.to_thread(turnkeep, command, *arguments, "--nats", wrong)
            assert code == 1
            check_silent(written)
        worker.send_signal(signal.SIGHUP)
        await logged("read the settings again")
        foreign_server.processes[0].kill()
        foreign_server.processes[0].wait()
        await logged("lost the connection to NATS")
        await foreign_server(**{**config, "authorization": {"token": "another"}})
        await logged("Authorization Violation")
        worker.terminate()
        await asyncio.to_thread(worker.wait, PATIENCE_S)
    finally:
        if worker.poll() is None:
            worker.kill()
            worker.wait()
    check_silent(log_file.read_text())
    for file in tmp_path.glob("data/**/*"):
        if file.is_file() and file.suffix in {".log", ".json", ".lock", ".conf", ""}:
            check_silent(file.read_text("utf-8", "replace"))
    assert all(json.loads(line) for line in log_file.read_text().splitlines() if line.startswith("{"))
