"""The worker's own NATS server requires the token in its data directory, where commands find it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import stat
import subprocess
import time
from typing import TYPE_CHECKING

import nats
import pytest

from tests.commands.command_runs import command
from worker.process.settings import Settings, SettingsError
from worker.wire.broker import EmbeddedServer
from worker.wire.connection import BrokerError
from worker.wire.credentials import client_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.parts import WorkerProcess
    from worker.process.datadir import DataDir

pytestmark = pytest.mark.process


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


async def test_commands_read_the_nats_token_from_the_data_directory(worker: WorkerProcess) -> None:
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


async def first_word(port: int, **login: str) -> bytes:
    """Log in over a raw socket; return the server's first reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert (await reader.readline()).startswith(b"INFO ")
    writer.write(f"CONNECT {json.dumps({'verbose': False} | login)}\r\nPING\r\n".encode())
    said = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return said.strip()


async def test_the_nats_server_refuses_connections_without_the_exact_token(worker: WorkerProcess) -> None:
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


async def test_a_command_without_the_right_token_fails_and_names_the_data_directory_that_has_it(
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


async def test_a_command_takes_the_token_from_a_folder_with_a_copy_of_it(
    worker: WorkerProcess, tmp_path: Path
) -> None:
    shutil.copy(worker.data_dir / "nats-token", tmp_path)
    where = ["--data-dir", str(tmp_path), "--nats-port", port_of(worker)]
    done = await command("sessions", *where)
    assert (done.returncode, done.stderr) == (0, "")


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


def test_the_nats_token_is_readable_by_its_owner_only_and_survives_a_restart(
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


@pytest.mark.parametrize("broken", ["short", "with a space in it, and longer", "käse-käse-käse-käse"])
def test_a_token_file_without_a_valid_token_fails_the_start_and_stays_unchanged(
    directory: DataDir, settings: Settings, broken: str
) -> None:
    path = settings.data_dir / "nats-token"
    path.write_text(broken)
    with pytest.raises(BrokerError) as told:
        EmbeddedServer(directory, settings)
    assert str(told.value) == f"{path} holds no token; remove it, and the next start makes one"
    assert path.read_text() == broken


def test_an_empty_token_file_gets_a_new_token(directory: DataDir, settings: Settings) -> None:
    """A power cut may empty a file that was just written."""
    (settings.data_dir / "nats-token").write_text("")
    made = EmbeddedServer(directory, settings).token
    assert EmbeddedServer(directory, dataclasses.replace(settings, nats_port=1)).token == made
