"""Starts `turnkeep` by forking a process that has imported it, since imports are most of a start's work.

That process is the fork server of `multiprocessing`; each test process has one. A child has its own
arguments, environment, working directory and standard streams, and signals end it like a new process.
"""

import asyncio
import contextlib
import contextvars
import fcntl
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import termios
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection, reduction
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

#: On macOS a process that has loaded Metal must not fork.
CAN_FORK = sys.platform == "linux"
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.imported"])
#: Starting a process polls the exit codes of all others, and each exit code can be read only once.
_LOCK = threading.Lock()


class Forked:
    """A forked process of `python -m commands ...` or `python FILE ...`, with a part of Popen's methods."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        streams: tuple[int, int, int],
        *,
        new_session: bool = False,
        own_terminal: bool = False,
    ) -> None:
        """Start the process; `streams` are the descriptors of its standard streams, which the caller closes.

        With `own_terminal` its standard input becomes its controlling terminal.
        """
        passed = tuple(map(_Passed, streams))
        options = (new_session, own_terminal)
        self._process: ForkServerProcess = _FORKS.Process(
            target=_run, args=(command, environment, str(Path.cwd()), passed, *options)
        )
        with _LOCK:
            self._process.start()

    @classmethod
    def logging_to(
        cls, output: Path, command: list[str], environment: dict[str, str], stdin: int | None = None
    ) -> Self:
        """Start a process whose output is appended to a file; without `stdin` its input is /dev/null."""
        with Path(os.devnull).open() as nothing, output.open("ab") as log:
            return cls(command, environment, (stdin or nothing.fileno(), log.fileno(), log.fileno()))

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        with _LOCK:
            return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout_s)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"process {self.pid} is still there after {timeout_s} s")
        return code


class Piped(Forked):
    """A forked process whose standard streams are pipes; threads collect its output."""

    def __init__(self, command: list[str], environment: dict[str, str], *, new_session: bool = False) -> None:
        pipes = [os.pipe() for _ in range(3)]
        (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err) = pipes
        self._input = os.fdopen(ours_in, "wb")
        super().__init__(command, environment, (theirs_in, theirs_out, theirs_err), new_session=new_session)
        for end in (theirs_in, theirs_out, theirs_err):
            os.close(end)
        self._readers = ThreadPoolExecutor(2)
        self._outputs = [self._readers.submit(_read, end) for end in (ours_out, ours_err)]
        self._readers.shutdown(wait=False)

    def communicate(self, content: bytes = b"", timeout: float | None = None) -> tuple[str, str]:
        """Write `content` to its input, wait for its end, and return its standard output and error."""
        with contextlib.suppress(BrokenPipeError), self._input:
            self._input.write(content)
        try:
            self.wait(timeout)
        except TimeoutError:
            self.kill()
            raise
        out, err = (output.result(timeout).decode() for output in self._outputs)
        return out, err

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self.wait()


def _read(end: int) -> bytes:
    with os.fdopen(end, "rb") as pipe:
        return pipe.read()


class _Passed:
    """A descriptor that can be pickled: the forked process receives a duplicate of it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self._descriptor),)


def _received(passed: Any) -> int:
    descriptor: int = passed.detach()
    return descriptor


def _open_streams() -> None:
    """Open the standard streams as the interpreter does when it starts."""
    text = {"encoding": "utf-8", "closefd": False}
    sys.stdin = sys.__stdin__ = os.fdopen(0, **text)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", **text)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", **text)


_fork_exec = subprocess._fork_exec  # type: ignore[attr-defined]


def _fork_worker(words: list[str], *options: Any) -> int:
    """Start a child process of `turnkeep serve` for Popen: a worker by forking this process, as it is."""
    if "worker.main" not in words:
        return int(_fork_exec(words, *options))
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        streams = (options[5], options[8], options[10])
        for number, descriptor in enumerate(streams):
            if descriptor >= 0:
                os.dup2(descriptor, number)
        os.closerange(3, 4096)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        asyncio._set_running_loop(None)
        _open_streams()
        sys.argv = words[words.index("worker.main") :]
        from worker.main import main

        code = contextvars.Context().run(_exit_code, main)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _exit_code(main: Callable[[], None]) -> int:
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _run(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    streams: tuple[int, int, int],
    new_session: bool,
    own_terminal: bool,
) -> None:
    if new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in set(streams) - {0, 1, 2}:
        os.close(descriptor)
    if own_terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _open_streams()
    subprocess._fork_exec = _fork_worker  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    program, *sys.argv[1:] = command
    if program == "-m":
        sys.argv = ["turnkeep", *sys.argv[2:]]
        from commands.__main__ import main
        from worker import standby

        standby._SPARE_BYTES = 0  # touching spare memory is most of a forked start's work
        main()
    else:
        runpy.run_path(program, run_name="__main__")
