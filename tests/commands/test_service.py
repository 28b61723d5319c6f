"""`turnkeep service` and `completion`, with stub programs in place of systemctl and launchctl."""

from __future__ import annotations

import os
import plistlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from command_runs import environment

from ops import units
from tests.parts import free_port
from worker.process.datadir import DataDir

Run = Callable[..., subprocess.CompletedProcess[str]]

RECORDS = """#!/bin/sh
echo "$(basename $0) $*" >> "$RECORD"
case "$*" in *ActiveState*) cat "$RECORD.state" 2>/dev/null || echo ActiveState=inactive ;; esac
"""
REFUSES = "#!/bin/sh\necho 'Failed to connect to bus: No medium found' >&2\nexit 1\n"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def stub(tmp_path: Path) -> Callable[[str, str], Path]:
    def make(name: str, text: str = RECORDS) -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a command, with the user's home and programs below `tmp_path`."""
    home = tmp_path / "home"
    home.mkdir()

    def run(*words: str, on_mac: bool = False) -> subprocess.CompletedProcess[str]:
        program = (
            f"import sys; from commands import service; service._ON_MAC = {on_mac};"
            "sys.argv = ['/opt/tk/bin/turnkeep', *sys.argv[1:]];"
            "from commands.cli import main; main(prog_name='turnkeep')"
        )
        env = environment() | {
            "HOME": str(home),
            "RECORD": str(tmp_path / "record"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protocol'}",
        }
        env.pop("XDG_CONFIG_HOME", None)
        return subprocess.run(
            [sys.executable, "-c", program, *words],
            cwd=home,
            env=env,
            check=False,
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "my settings" / "turnkeep.toml"
    path.parent.mkdir()
    path.write_text(f"data_dir = 'data'\nnats_port = {free_port()}\n")
    return path


def asked(tmp_path: Path) -> list[str]:
    record = tmp_path / "record"
    lines = record.read_text().splitlines() if record.exists() else []
    record.unlink(missing_ok=True)
    return [
        line
        for line in lines
        if "show-environment" not in line and not line.startswith("launchctl print gui")
    ]


def test_service_installs_starts_shows_and_removes_a_systemd_unit(
    run: Run, stub: Callable[..., Path], config: Path, tmp_path: Path
) -> None:
    stub("systemctl")
    unit = tmp_path / "home" / ".config" / "systemd" / "user" / "turnkeep.service"
    words = ["service", "install", "--config", str(config), "--gateway", "8123"]
    assert run(*words, "--print").stdout == units.unit(
        ["/opt/tk/bin/turnkeep", "serve", "--config", str(config), "--gateway=8123"]
    )
    assert (unit.exists(), asked(tmp_path)) == (False, [])
    for _ in range(2):
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert str(unit) in done.stdout
        assert str(config) in done.stdout
        starts = [
            line.removeprefix("systemctl --user ") for line in asked(tmp_path) if "ActiveState" not in line
        ]
        assert starts == ["daemon-reload", "enable turnkeep", "restart turnkeep"]
    assert units.command_in(unit.read_text())[2:4] == ["--config", str(config)]
    (tmp_path / "record.state").write_text("ActiveState=active\nSubState=running\nMainPID=7\n")
    shown = run("service", "status")
    assert shown.returncode == 1, "it does not answer"
    for words_ in (
        "running (pid 7)",
        "no; no NATS server at",
        "http://127.0.0.1:8123/v1",
        str(config),
        str(unit),
    ):
        assert words_ in shown.stdout
    asked(tmp_path)
    assert run("service", "uninstall").returncode == 0
    assert asked(tmp_path) == ["systemctl --user disable --now turnkeep", "systemctl --user daemon-reload"]
    assert (unit.exists(), config.exists()) == (False, True)
    gone = run("service", "status")
    assert (gone.returncode, gone.stderr.count("\n")) == (1, 1)
    assert "`turnkeep service install` makes one" in gone.stderr


def test_service_installs_and_removes_a_launchd_agent_on_macos(
    run: Run, stub: Callable[..., Path], config: Path, tmp_path: Path
) -> None:
    stub("launchctl")
    done = run("service", "install", "--config", str(config), on_mac=True)
    assert done.returncode == 0, done.stderr
    agent = tmp_path / "home" / "Library" / "LaunchAgents" / "turnkeep.plist"
    words = plistlib.loads(agent.read_bytes())["ProgramArguments"]
    assert words == ["/opt/tk/bin/turnkeep", "serve", "--config", str(config)]
    domain = f"gui/{os.getuid()}"
    assert asked(tmp_path)[-2:] == [
        f"launchctl bootout {domain}/turnkeep",
        f"launchctl bootstrap {domain} {agent}",
    ]
    assert run("service", "uninstall", on_mac=True).returncode == 0
    assert not agent.exists()


def test_service_install_without_config_names_the_default_settings_file(
    run: Run, stub: Callable[..., Path], tmp_path: Path
) -> None:
    stub("systemctl")
    (tmp_path / "home" / ".config" / "turnkeep").mkdir(parents=True)
    path = tmp_path / "home" / ".config" / "turnkeep" / "turnkeep.toml"
    path.write_text(f"nats_port = {free_port()}\n")
    done = run("service", "install")
    assert (done.returncode, str(path) in done.stdout) == (0, True), done.stderr


def test_a_refused_service_install_names_the_obstacle_in_one_line_and_writes_nothing(
    run: Run, stub: Callable[..., Path], config: Path, tmp_path: Path
) -> None:
    def refused(*words: str) -> str:
        done = run("service", "install", *words)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert not (tmp_path / "home" / ".config" / "systemd").exists()
        return done.stderr

    stub("systemctl", REFUSES)
    no_systemd = refused("--config", str(config))
    assert "this user has no systemd here: Failed to connect to bus" in no_systemd
    assert "turnkeep serve" in no_systemd
    stub("systemctl")
    assert "there is no settings file nowhere.toml" in refused("--config", "nowhere.toml")
    with DataDir.open(config.parent / "data", "other"):
        assert "in use by worker other" in refused("--config", str(config))
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is refused" in refused(
            "--config", str(config), "--gateway", str(port)
        )
        config.write_text(f"data_dir = 'data'\nnats_port = {port}\n")
        assert f"port {port} of 127.0.0.1 is taken" in refused("--config", str(config))


def test_service_logs_shows_the_journal_of_the_systemd_unit(
    run: Run, stub: Callable[..., Path], config: Path, tmp_path: Path
) -> None:
    stub("systemctl")
    stub("journalctl")
    assert run("service", "install", "--config", str(config)).returncode == 0
    asked(tmp_path)
    assert run("service", "logs", "-f", "-n", "7").returncode == 0
    assert asked(tmp_path) == ["journalctl --user-unit turnkeep -o cat -n 7 -f"]


@pytest.mark.parametrize("word", ["/a b/c", "50%", "$HOME", 'say "hi"', "back\\slash", "é"])
def test_a_systemd_unit_quotes_any_word_so_that_the_command_is_read_back_unchanged(word: str) -> None:
    command = ["/bin/turnkeep", "serve", "--config", word]
    assert units.command_in(units.unit(command)) == command


def test_bash_completes_commands_and_options(run: Run, stub: Callable[..., Path], tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    stub("turnkeep", f'#!/bin/sh\nexec {sys.executable} -P -m commands "$@"\n')
    installed = run("completion", "bash", "--install")
    assert installed.returncode == 0
    assert "without the package bash-completion, ~/.bashrc needs: . ~/.local/share/" in installed.stdout
    script = tmp_path / "home" / ".local" / "share" / "bash-completion" / "completions" / "turnkeep"
    asks = (
        f'. {script}; complete() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=();'
        " _turnkeep_completion turnkeep; echo ${COMPREPLY[@]}; };"
        " complete turnkeep ses; complete turnkeep serve --max-dis; complete turnkeep service un"
    )
    env = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'protocol'}",
    }
    done = subprocess.run(["bash", "-c", asks], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["sessions", "--max-disk", "uninstall"], done.stderr
