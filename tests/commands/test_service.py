"""`turnkeep service` and `completion`, with stub programs in place of systemctl and launchctl."""

import getpass
import json
import os
import plistlib
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner
from command_runs import environment

from commands import service
from ops import units
from tests.parts import free_port
from worker.process import launchd
from worker.process.datadir import DataDir

Run = Callable[..., subprocess.CompletedProcess[str]]

RECORDS = """#!/bin/sh
echo "$(basename $0) $*" >> "$RECORD"
"""
#: Holds a data directory; its other arguments are those of the service.
HOLDS = """
import sys, time
from pathlib import Path
from worker.process.datadir import DataDir
with DataDir.open(Path(sys.argv[1]), "mine"):
    print(flush=True)
    time.sleep(60)
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

    def run(*words: str, on_mac: bool = False, **more: str) -> subprocess.CompletedProcess[str]:
        program = (
            "import os, sys; from pathlib import Path; from commands import service;"
            "from worker.process import datadir; datadir._STARTING_S = 2;"  # commands wait for so long
            f"os.getppid = lambda: {1 if on_mac else 2};"
            f"service._ON_MAC = {on_mac}; service._DAEMONS = Path({str(tmp_path / 'daemons')!r});"
            "sys.argv = ['/opt/tk/bin/turnkeep', *sys.argv[1:]];"
            "from commands.cli import main; main(prog_name='turnkeep')"
        )
        env = environment() | {
            "HOME": str(home),
            "RECORD": str(tmp_path / "record"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protocol'}",
            **more,
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


def test_the_command_service_installs_starts_shows_and_removes_a_systemd_unit(
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
        starts = [line.removeprefix("systemctl --user ") for line in asked(tmp_path)]
        assert starts == ["daemon-reload", "enable turnkeep", "restart turnkeep"]
    assert units.command_in(unit.read_text())[2:4] == ["--config", str(config)]
    stub("journalctl")
    assert run("service", "logs", "-f", "-n", "7").returncode == 0
    assert asked(tmp_path) == ["journalctl --user-unit turnkeep -o cat -n 7 -f"]
    stopped = run("service", "status")
    assert (stopped.returncode, "no; `turnkeep service logs` may say why" in stopped.stdout) == (1, True)
    assert json.loads(run("service", "status", "--json").stdout)["settings"] == str(config)
    with DataDir.open(config.parent / "data", "mine"):
        shown = run("service", "status")
    assert shown.returncode == 1
    assert f"no; worker mine (pid {os.getpid()}) uses its data directory, and is another one" in shown.stdout
    words_of_it = units.command_in(unit.read_text())[1:]
    holds = [sys.executable, "-c", HOLDS, str(config.parent / "data")]
    with subprocess.Popen([*holds, *words_of_it], stdout=subprocess.PIPE) as service:
        assert service.stdout
        service.stdout.readline()
        shown = run("service", "status")
        service.kill()
    assert shown.returncode == 1, "it does not answer"
    for words_ in (
        f"worker mine (pid {service.pid})",
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
    usual = tmp_path / "home" / ".config" / "turnkeep" / "turnkeep.toml"
    usual.parent.mkdir()
    usual.write_text(f"nats_port = {free_port()}\n")
    done = run("service", "install")
    assert (done.returncode, str(usual) in done.stdout) == (0, True), done.stderr


#: As launchd does, it knows a service for a while after `bootout`, and refuses to start it meanwhile.
LAUNCHCTL = """#!/bin/sh
echo "launchctl $*" >> "$RECORD"
case "$1" in
  bootout) echo 3 > "$RECORD.ending" ;;
  bootstrap) [ ! -s "$RECORD.ending" ] || { echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; } ;;
  print)
    case "$2" in system | gui/*[0-9]) exit 0 ;; esac
    left=$(cat "$RECORD.ending" 2>/dev/null || echo 0)
    if [ "${left:-0}" -gt 0 ]; then echo $((left - 1)) > "$RECORD.ending"; exit 0; fi
    : > "$RECORD.ending"
    exit 113 ;;
esac
"""
SUDO = '#!/bin/sh\n[ "$1" != install ] || set -- "$1" "$8" "$9"\necho "sudo $1" >> "$RECORD"\nexec "$@"\n'


@pytest.mark.parametrize("is_daemon", [False, True])
def test_service_install_on_macos_can_be_repeated_and_service_uninstall_removes_the_launchd_agent_or_daemon(
    run: Run, stub: Callable[..., Path], config: Path, tmp_path: Path, is_daemon: bool
) -> None:
    stub("launchctl", LAUNCHCTL)
    stub("sudo", SUDO)
    agents = tmp_path / "home" / "Library" / "LaunchAgents"
    folder, domain = (tmp_path / "daemons", "system") if is_daemon else (agents, f"gui/{os.getuid()}")
    (tmp_path / "daemons").mkdir()
    for _ in range(2):  # the second one ends the worker of the first
        done = run("service", "install", "--config", str(config), *["--system"] * is_daemon, on_mac=True)
        assert done.returncode == 0, done.stderr
        said = [line for line in asked(tmp_path) if " print " not in line and "sudo" not in line]
        assert said == [
            f"launchctl bootout {domain}/turnkeep",
            f"launchctl bootstrap {domain} {folder / 'turnkeep.plist'}",
        ]
    made = plistlib.loads((folder / "turnkeep.plist").read_bytes())
    assert made["ProgramArguments"] == ["/opt/tk/bin/turnkeep", "serve", "--config", str(config)]
    assert made.get("UserName") == (getpass.getuser() if is_daemon else None)
    assert run("service", "uninstall", on_mac=True).returncode == 0
    asks = [line for line in asked(tmp_path) if line.startswith("sudo")]
    assert asks == ["sudo launchctl", "sudo rm"] * is_daemon
    assert not (folder / "turnkeep.plist").exists()


def test_launchd_does_not_restart_a_worker_whose_settings_have_an_unknown_name(
    run: Run, config: Path
) -> None:
    made = plistlib.loads(units.agent(["turnkeep"], config.parent, config.parent / "log"))
    assert made["KeepAlive"] == {"SuccessfulExit": False}
    config.write_text("modle = 'x'\n")
    of_service = made["EnvironmentVariables"]
    for environment_, is_of_launchd, code in (({}, True, 2), (of_service, True, 0), (of_service, False, 2)):
        done = run("serve", "--config", str(config), on_mac=is_of_launchd, **environment_)
        assert (done.returncode, "modle" in done.stderr) == (code, True), done.stderr


def test_the_log_of_a_launchd_service_is_rotated_at_its_size_limit_and_keeps_the_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    monkeypatch.setenv(launchd.LOG, str(path))
    monkeypatch.setattr(launchd, "_MAX_LOG_BYTES", 100)
    with path.open("a") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        for number in range(100):
            structlog.WriteLogger(launchd.log_file()).msg(f"line {number}")
    assert 0 < len(path.read_text() + (tmp_path / "log.1").read_text()) < 300
    assert f"{(tmp_path / 'log.1').read_text()}{path.read_text()}".endswith("line 98\nline 99\n")


def test_service_install_on_macos_refuses_folders_that_macos_closes_to_background_services(
    run: Run, stub: Callable[..., Path], config: Path, tmp_path: Path
) -> None:
    stub("launchctl", LAUNCHCTL)
    documents = tmp_path / "home" / "Documents" / "x"
    documents.mkdir(parents=True)
    config.write_text(f"data_dir = '{documents}'\n")
    done = run("service", "install", "--config", str(config), on_mac=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"macOS keeps services out of {documents.parent}; move {documents}" in done.stderr


@pytest.mark.parametrize(
    "models",
    ["model = '~/Downloads/x'", "model = 'linked'", "[models.small]\nmodel = 'tiny'\ndraft_model = 'linked'"],
)
def test_service_install_on_macos_refuses_a_model_in_a_folder_that_macos_closes_to_background_services(
    stub: Callable[..., Path], config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: str
) -> None:
    """A browser has put it there; the data directory may link to it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{stub('launchctl', LAUNCHCTL).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.setattr(service, "_ON_MAC", True)
    monkeypatch.setattr(service, "_DAEMONS", tmp_path)
    downloaded, links = tmp_path / "Downloads" / "x", config.parent / "data" / "models"
    downloaded.mkdir(parents=True)
    links.mkdir(parents=True)
    (links / "linked").symlink_to(downloaded)
    config.write_text(f"{config.read_text()}{models}\n")
    done = CliRunner().invoke(service.install, ["--config", str(config)])
    assert str(done.exception) == (
        f"macOS keeps services out of {downloaded.parent}; move {downloaded} to another folder"
    )


def test_service_install_on_macos_refuses_a_protected_folder_whatever_its_capitalisation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS's file system ignores case: ~/documents is ~/Documents."""
    (tmp_path / "Documents").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    stat = Path.stat

    def ignoring_case(self: Path, **named: Any) -> Any:
        return stat(self.with_name("Documents") if self.name == "documents" else self, **named)

    monkeypatch.setattr(Path, "stat", ignoring_case)
    service._check_places(tmp_path / "elsewhere" / "not made yet")
    with pytest.raises(service.ServiceError, match="documents/data to another folder"):
        service._check_places(tmp_path / "documents" / "data")


def test_service_install_without_systemd_or_a_settings_file_fails_in_one_line_and_writes_nothing(
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
        taken = refused("--config", str(config), "--gateway", str(port))
        assert f"port {port} of 127.0.0.1 is taken by another program; choose another with --gateway" in taken
        config.write_text(f"data_dir = 'data'\nnats_port = {port}\n")
        assert f"port {port} of 127.0.0.1 is taken" in refused("--config", str(config))


@pytest.mark.parametrize("word", ["/a b/c", "50%", "$HOME", 'say "hi"', "back\\slash", "é"])
def test_a_systemd_unit_quotes_special_characters_so_that_systemd_reads_the_command_unchanged(
    word: str,
) -> None:
    command = ["/bin/turnkeep", "serve", "--config", word]
    assert units.command_in(units.unit(command)) == command


def test_the_bash_completion_script_uses_no_feature_that_bash_3_2_of_macos_lacks(run: Run) -> None:
    done = run("completion", "bash", on_mac=True)
    assert done.returncode == 0, done.stderr
    newer = r"compopt|nosort|mapfile|readarray|declare -A|;;&|\|&|&>>|\$\{\w+(,|\^|@)|\[-1\]"
    assert not re.search(newer, done.stdout)


def test_a_command_raises_the_soft_limit_of_open_files_to_10240_or_to_the_hard_limit() -> None:
    program = (
        "import resource as r, atexit, sys; files = r.RLIMIT_NOFILE; hard = r.getrlimit(files)[1];"
        "r.setrlimit(files, (256, hard));"
        "atexit.register(lambda: print(r.getrlimit(files)[0], file=sys.stderr));"
        "sys.argv = ['turnkeep', 'completion', 'zsh']; from commands.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stderr) >= min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 10_240)


@pytest.mark.parametrize(
    ("machine", "version", "why"),
    [
        ("x86_64", "15.1", "for arm64"),
        ("arm64", "13.6", "macOS 14"),
        ("arm64", "14.0", ""),
        ("x86_64", "", ""),
    ],
)
def test_make_setup_refuses_a_mac_that_cannot_run_mlx_before_installing_anything(
    stub: Callable[..., Path], tmp_path: Path, machine: str, version: str, why: str
) -> None:
    """The stub is the Python of such a machine. On others it ends with an error at the module `venv`."""
    fakes = (
        f"import platform; platform.mac_ver = lambda: ({version!r},); platform.machine = lambda: {machine!r};"
    )
    python = stub("python", f'#!/bin/sh\n[ "$1" = -c ] || exit 9\nexec {sys.executable} -c "{fakes} $2"\n')
    made = tmp_path / "venv"
    done = subprocess.run(
        ["make", made / "bin" / "pip", f"VENV={made}", f"PYTHON={python}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert ("Making" in done.stdout) == (not why), done.stderr
    assert why in done.stderr
    assert not made.exists()


def test_bash_with_the_completion_script_completes_command_names_and_options(
    run: Run, stub: Callable[..., Path], tmp_path: Path
) -> None:
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
