"""Runs the program as a user does: as a process, with its output in pipes or on a terminal."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
from click.testing import CliRunner
from rich.cells import cell_len
from structlog.testing import capture_logs

from commands.cli import main
from tests.forked import CAN_FORK, Forked, Piped
from tests.parts import LocalWorker, WorkerProcess, free_port
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import NoWorkerError

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
_CONTROL = r"\x1b(\[[0-9;?]*[A-Za-z])"
#: Ctrl-C is a signal only on the controlling terminal of a process session, which this program sets.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def environment() -> dict[str, str]:
    """Return the tests' environment without a worker's settings, and without variables of a terminal."""
    hidden = ("TURNKEEP_", "NATS_URL", "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR")
    return {name: value for name, value in os.environ.items() if not name.startswith(hidden)}


def turnkeep(
    *arguments: object, text: str | bytes = "", fresh: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `text` on its standard input and its output in pipes.

    A `fresh` process is not a fork of one that has already imported the modules.
    """
    content = text.encode() if isinstance(text, str) else text
    if CAN_FORK and not fresh:
        process = Piped(["-m", "commands", *map(str, arguments)], environment() | more)
        out, err = process.communicate(content, timeout=100)
        return subprocess.CompletedProcess(arguments, process.wait(), out, err)
    done = subprocess.run(
        [sys.executable, "-m", "commands", *map(str, arguments)],
        input=content,
        capture_output=True,
        timeout=100,
        check=False,
        env=environment() | more,
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


async def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, on a thread: a process of its own takes a second to start."""
    runner = CliRunner(env=dict.fromkeys(set(os.environ) - set(environment())))
    with capture_logs():  # of a worker in this process, which would print among the command's output
        done = await asyncio.to_thread(runner.invoke, main, [*map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@contextlib.contextmanager
def serving_process(*arguments: object, **more: str) -> Iterator[str]:
    """Run a command that serves HTTP as a process, until SIGTERM; yield the address that it prints first."""
    command = [sys.executable, "-m", "commands", *map(str, arguments)]
    with subprocess.Popen(command, env=environment() | more, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield process.stderr.readline().split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM


def installed(folder: Path, *packages: str) -> Path:
    """Install packages in a new virtual environment; return the folder of its programs."""
    venv.create(folder)
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "-q", "--python", folder / "bin" / "python", *packages]
    subprocess.run(command, check=True)
    return folder / "bin"


def beside(program: str) -> str:
    """Return the path of a program in the tests' environment, as a user in the checkout types it."""
    path = Path(sys.executable).with_name(program)
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def where(worker: LocalWorker) -> tuple[Any, ...]:
    """Return the options with which a command finds a worker of these tests."""
    return ("--nats", worker.settings.nats, "--prefix", worker.settings.prefix)


async def outside(
    make: Callable[..., WorkerProcess], model: Path, nats_url: str
) -> tuple[WorkerProcess, Client, tuple[str, ...]]:
    """Start a worker on a NATS server that goes on when the worker is killed.

    Return the worker, a client, and the options with which a command finds the worker. The session `s` has
    an append, so there is a stream, and the worker listens.
    """
    prefix = f"outside{free_port()}"
    place = ("--nats", nats_url, "--prefix", prefix)
    worker = make(*place, model=model)
    worker.start()
    client = await connect(nats_url, prefix=prefix)
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(NoWorkerError):
                await client.worker_metrics()
                await client.session("s").append(text="a")
                return worker, client, place
            await asyncio.sleep(0.1)


class Terminal:
    """A command on a terminal of its own: tests type keys, and wait for the output. Blocking."""

    def __init__(
        self,
        *arguments: object,
        columns: int = 80,
        command: str = "",
        own: bool = True,
        fresh: bool = False,
        **more: str,
    ) -> None:
        """Start the program; with `command`, a shell runs that script with the program as its arguments.

        Without `own` the terminal does not control the program's process session. A `fresh` process is not
        a fork of one that has already imported the modules.
        """
        self._columns = columns
        self._output = b""
        self._seen = 0
        self._control, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        program = [sys.executable, "-m", "commands", *map(str, arguments)]
        settings = environment() | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | more
        self.terminal = terminal
        self.process: Forked | subprocess.Popen[bytes]
        if CAN_FORK and not (command or fresh):
            streams = (terminal, terminal, terminal)
            self.process = Forked(program[1:], settings, streams, new_session=True, own_terminal=own)
            return
        self.process = subprocess.Popen(
            [
                *((sys.executable, "-c", _TAKE_TERMINAL) if own else ()),
                *(("/bin/sh", "-c", command) if command else ()),
                *program,
            ],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=settings,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.terminal)
        os.close(self._control)

    def hang_up(self) -> None:
        """Close the terminal, as a closed window does: its processes get SIGHUP, and can print no more."""
        os.close(self._control)
        self._control = os.open(os.devnull, os.O_RDWR)

    def type(self, keys: str) -> None:
        os.write(self._control, keys.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the text printed after the last match contains `pattern`; return the match."""
        deadline = time.monotonic() + WAIT_S
        while True:
            if found := re.search(pattern, self.transcript[self._seen :]):
                self._seen += found.end()
                return found
            if not self._read(deadline):
                raise AssertionError(f"{pattern!r} never came: {self.transcript[self._seen :]!r}")

    def end(self) -> int:
        """Wait for the command's end; return its exit code."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(time.monotonic() + 0.05)
        while self._read(time.monotonic() + 0.05):
            pass
        return self.process.wait(0.1)

    @property
    def transcript(self) -> str:
        """The printed text, without the escape sequences for cursor and styles."""
        return re.sub(_CONTROL, "", self._text)

    @property
    def raw(self) -> str:
        return self._output.decode(errors="replace")

    @property
    def _text(self) -> str:
        return without_styles(self.raw)

    @property
    def echoes(self) -> bool:
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ECHO)

    def screen(self) -> list[str]:
        """Return the lines on the terminal (see `seen`)."""
        return seen(self.raw, self._columns)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._control], [], [], max(deadline - time.monotonic(), 0))
        if ready:
            with contextlib.suppress(OSError):
                self._output += os.read(self._control, 65536)
        return bool(ready)


def processes_with(word: str) -> list[list[str]]:
    """Return the command lines of all processes with this word in an argument."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if any(word in argument for argument in line)]


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def seen(text: str, columns: int) -> list[str]:
    """Return the lines on an endless terminal after `text`; knows only the escapes that answers use."""
    rows: list[list[str]] = [[]]
    row = column = 0
    for code, char in re.findall(rf"{_CONTROL}|(.|\n)", without_styles(text)):
        if code == "[A":
            row -= 1
        elif code == "[K":
            del rows[row][column:]
        elif code.endswith("C"):
            column += int(code[1:-1])
        elif code:
            raise AssertionError(f"no answer prints {code}")
        elif char == "\r":
            column = 0
        elif char == "\n":
            row += 1
            rows += [[]] if row == len(rows) else []
        elif not cell_len(char):
            rows[row][column - 1] += char
        else:
            rows[row] += [" "] * (column - len(rows[row]))
            rows[row][column : column + cell_len(char)] = [char] + [""] * (cell_len(char) - 1)
            column += cell_len(char)
            assert column <= columns, "beyond the terminal's edge"
    return ["".join(cells).rstrip() for cells in rows]
