"""Errors of files, folders and streams around a command are one line, without a traceback."""

import ast
import errno
import re
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import click
import pytest
from command_runs import environment, turnkeep

from commands import cli
from commands.cache import CacheCommandError, in_one_line
from commands.cli import _COMMANDS

ROOT = Path(__file__).parents[2]
NOWHERE = "--nats nats://127.0.0.1:1"


def shell(script: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a script in which `turnkeep` is the program; return the result with both outputs."""
    start = f'turnkeep() {{ "{sys.executable}" -P -m commands "$@"; }}; set -o pipefail; {script}'
    return subprocess.run(
        ["/bin/bash", "-c", start],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment() | {"PYTHONPATH": str(ROOT)} | more,
    )


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("mkdir gone; cd gone; rmdir ../gone; turnkeep sessions", 1, "the current folder: No such file"),
        ("turnkeep completion bash --install", 1, "home/.local/share/bash-completion"),
        ("turnkeep cache list --data-dir data > /dev/full", 1, "No space left on device"),
        ("turnkeep cache list --data-dir data | true", 1, ""),
        ("turnkeep run tiny <&- --nats nats://127.0.0.1:1", 1, "no NATS server"),
        (f"turnkeep ask - {NOWHERE} <&-", 2, "there is no question"),
        (f"turnkeep ask hi {NOWHERE} >&-", 1, "no NATS server"),
        ("turnkeep doctor --data-dir data --model nosuch >&-", 1, ""),
        ("TZ=America/New_York turnkeep sessions --since 9999-12-31T23:59", 2, "is no time"),
    ],
)
def test_a_command_prints_an_operating_system_error_as_one_line_without_a_traceback(
    script: str, code: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "home").touch()
    done = shell(f"cd {tmp_path}; {script}", HOME=str(tmp_path / "home"))
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert done.stderr.count("turnkeep: ") == (code == 1 and says != "")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_error_while_writing_a_temporary_file_names_the_file_that_the_command_was_to_write(
    tmp_path: Path,
) -> None:
    for name, said in (("tmp69jzbbvy", "out.tar"), ("snapshots/a", "snapshots/a")):
        error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / name))
        with (
            pytest.raises(CacheCommandError, match=rf"^{tmp_path / said}: Permission denied$"),
            in_one_line(tmp_path / "out.tar"),
        ):
            raise error


def test_ctrl_c_while_a_command_imports_its_modules_prints_no_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it waits there if the signal comes late
        nats = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-P", "-X", "importtime", "-m", "commands", "sessions", "--nats", nats]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
            said = ""
            while "turnkeep_client" not in said:  # then the command line is next
                said += process.stderr.readline()
            process.send_signal(signal.SIGINT)
            said += process.stderr.read()
    assert process.returncode in {-signal.SIGINT, 130}, said[-2000:]
    assert "Traceback" not in said


@pytest.mark.parametrize("command", [("cache", "list"), ("export", "s", "file")], ids=lambda words: words[0])
def test_ctrl_c_while_a_command_imports_numpy_ends_the_command_by_sigint_without_a_message(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    """An interrupted numpy raises an ImportError, whose message is about its installation."""
    (tmp_path / "numpy.py").write_text(
        "import os, signal, time\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(1)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('numpy is not installed well')\n"
    )
    done = turnkeep(*command, "--data-dir", tmp_path, fresh=True, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_while_the_module_of_a_command_is_imported_ctrl_c_ends_the_process_by_the_default_signal_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, before = [], signal.getsignal(signal.SIGINT)

    def imported(*name: str) -> ModuleType:
        seen.append(signal.getsignal(signal.SIGINT))
        return import_module(*name)

    monkeypatch.setattr(cli, "import_module", imported)
    assert cli._Group().get_command(click.Context(cli.main), "drain") is not None
    assert (seen, signal.getsignal(signal.SIGINT)) == ([signal.SIG_DFL], before)


def test_each_turnkeep_command_named_in_a_message_of_the_program_exists() -> None:
    sources = [
        path
        for room in ("cache", "commands", "gateway", "ops", "worker")
        for path in (ROOT / room).rglob("*.py")
    ]
    texts = [
        one.value
        for path in sources
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
    named = {word for text in texts for word in re.findall(r"\bturnkeep ([a-z]+)", text)}
    assert len(named) > 20
    assert named - {*_COMMANDS} == {"readiness"}, "which is the name of a connection"
