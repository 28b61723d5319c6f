"""The commands `service` (a worker as a service of systemd or launchd) and `completion` (for shells)."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click
import platformdirs

from ops import units
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import shown
from worker.process.datadir import DataDir, holder
from worker.process.setting_sources import CONFIG_NAME, load, load_models

from .flags import as_json, port_option
from .nats_connection import talk, url_of
from .printing import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics
    from worker.process.settings import Settings

_ON_MAC: Final = sys.platform == "darwin"
_PROGRAM: Final = "turnkeep"
_AGENTS: Final = Path("~/Library/LaunchAgents")
_DAEMONS: Final = Path("/Library/LaunchDaemons")
#: How long launchd may take to end a worker (`ExitTimeOut` and a margin), and the pause between two looks.
_STOPPING_S: Final = 70.0
_POLL_S: Final = 0.2
#: Folders that macOS opens only to programs which a person has allowed in a dialog.
_GUARDED: Final = (
    *("~/Desktop", "~/Documents", "~/Downloads", "~/Library/Mobile Documents", "~/Library/CloudStorage"),
    "/Volumes",
)


class ServiceError(TurnkeepError):
    """The service cannot be installed, started or queried. The message is one line."""


@dataclass(frozen=True, slots=True)
class _Systemd:
    """Installs and controls the service with the user's systemd, on Linux."""

    @property
    def file(self) -> Path:
        return Path(
            os.environ.get("XDG_CONFIG_HOME") or "~/.config", "systemd/user/turnkeep.service"
        ).expanduser()

    def content(self, command: list[str], _config: Path) -> bytes:
        return units.unit(command).encode()

    def command(self) -> list[str]:
        return units.command_in(self.file.read_text("utf-8"))

    def check(self) -> None:
        done = _run("systemctl", "--user", "show-environment")
        if done.returncode:
            why = f": {done.stderr.strip().splitlines()[0]}" if done.stderr.strip() else ""
            raise ServiceError(
                f"this user has no systemd here{why}; run `turnkeep serve` under what starts services on this"
                " machine, or use a file of ops/deploy; `turnkeep service install --print` shows the unit"
            )

    def start(self) -> None:
        _ask("systemctl", "--user", "daemon-reload")
        _ask("systemctl", "--user", "enable", units.NAME)
        _ask("systemctl", "--user", "restart", units.NAME)

    def stop(self) -> None:
        _ask("systemctl", "--user", "disable", "--now", units.NAME)

    def write(self, content: bytes) -> None:
        _write(self.file, content)

    def remove(self) -> None:
        self.file.unlink()
        _ask("systemctl", "--user", "daemon-reload")

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        return ["journalctl", "--user-unit", units.NAME, "-o", "cat", "-n", str(lines), *["-f"] * follow]

    @property
    def hint(self) -> str:
        return "It ends when you log out, unless you run once: loginctl enable-linger"


@dataclass(frozen=True, slots=True)
class _Launchd:
    """Installs and controls the service with launchd, on macOS.

    It is an agent of the user who is logged in, or a daemon, which runs as the same user without a login.
    What changes a daemon is done by `sudo`, which asks for an administrator's password.
    """

    is_daemon: bool

    @property
    def file(self) -> Path:
        return (_DAEMONS if self.is_daemon else _AGENTS).expanduser() / "turnkeep.plist"

    @property
    def _domain(self) -> str:
        return "system" if self.is_daemon else f"gui/{os.getuid()}"

    @property
    def _service(self) -> str:
        return f"{self._domain}/{units.NAME}"

    def _as_owner(self, *command: str) -> list[str]:
        return [*["sudo"] * self.is_daemon, *command]

    @property
    def _log(self) -> Path:
        return Path("~/Library/Logs/turnkeep.log").expanduser()

    def content(self, command: list[str], config: Path) -> bytes:
        user = getpass.getuser() if self.is_daemon else ""
        return units.agent(command, config.parent, self._log, user)

    def command(self) -> list[str]:
        return [str(word) for word in plistlib.loads(self.file.read_bytes())["ProgramArguments"]]

    def check(self) -> None:
        if _run("launchctl", "print", self._domain).returncode:
            raise ServiceError("launchd has no session of this user: log in on the screen of this Mac once")

    def write(self, content: bytes) -> None:
        if not self.is_daemon:
            _write(self.file, content)
            return
        with tempfile.NamedTemporaryFile() as made:
            made.write(content)
            made.flush()
            owned = ("-o", "root", "-g", "wheel", "-m", "644")
            _ask(*self._as_owner("install", *owned, made.name, str(self.file)))

    def start(self) -> None:
        self.stop()  # of an earlier installation
        _ask(*self._as_owner("launchctl", "bootstrap", self._domain, str(self.file)))

    def stop(self) -> None:
        """Stop the worker and wait for its end: `bootout` returns before, and `bootstrap` then fails."""
        _run(*self._as_owner("launchctl", "bootout", self._service))
        end = time.monotonic() + _STOPPING_S
        while not _run("launchctl", "print", self._service).returncode:
            if time.monotonic() > end:
                raise ServiceError(
                    f"the worker has not ended within {_STOPPING_S} s; try again when `launchctl print"
                    f" {self._service}` no longer finds it"
                )
            time.sleep(_POLL_S)

    def remove(self) -> None:
        _ask(*self._as_owner("rm", str(self.file)))

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *["-F"] * follow, str(self._log)]

    @property
    def hint(self) -> str:
        return "" if self.is_daemon else "It runs while you are logged in; with --system it needs no login."


def _system(*, is_daemon: bool = False) -> _Systemd | _Launchd:
    """Return what runs the service: a daemon if one is asked for or installed."""
    if not _ON_MAC and is_daemon:
        raise ServiceError(
            "--system is for macOS; on Linux `loginctl enable-linger` keeps a user's service running, and"
            " ops/deploy/turnkeep.service is a service of the machine"
        )
    if not _ON_MAC:
        return _Systemd()
    daemon = _Launchd(is_daemon=True)
    return daemon if is_daemon or daemon.file.exists() else _Launchd(is_daemon=False)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"there is no program {command[0]}")


def _ask(*command: str) -> str:
    done = _run(*command)
    if done.returncode:
        raise ServiceError(
            f"{shlex.join(command)} failed: {' '.join(done.stderr.split()) or done.returncode}"
        )
    return done.stdout


@click.group()
def service() -> None:
    """A worker that starts with this machine: install, status, logs."""


@service.command()
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Settings file. [default: ./turnkeep.toml, else one in your configuration folder]",
)
@port_option("gateway", 8080, "Run a gateway too.", least=1)
@click.option(
    "--print", "only_print", is_flag=True, help="Print the file for systemd or launchd; change nothing."
)
@click.option("--system", "is_daemon", is_flag=True, help="macOS: run it without a login; asks for sudo.")
def install(config: Path | None, gateway_port: int | None, only_print: bool, is_daemon: bool) -> None:
    """Install and start the service, or start it anew with other settings.

    A user's systemd runs it on Linux, launchd on macOS. Its gateway is for this machine; `turnkeep gateway
    --listen ADDRESS --keys FILE` serves others.
    """
    system = _system(is_daemon=is_daemon)
    config = _settings_file(config)
    command = [*_program(), "serve", "--config", str(config)]
    command += [f"--gateway={gateway_port}"] if gateway_port else []
    content = system.content(command, config)
    if only_print:
        click.echo(content.decode(), nl=False)
        return
    system.check()
    there = config if config.exists() else None
    settings, models = load({}, {}, there, config.parent), load_models({}, {}, there, config.parent)
    if _ON_MAC:
        files = _model_files(models.values() or (settings,))
        _check_places(Path(command[0]), Path(__file__), config, settings.data_dir, *files)
        if is_daemon and (agent := _Launchd(is_daemon=False)).file.exists():
            raise ServiceError(f"{agent.file} is installed; remove it by `turnkeep service uninstall` first")
    if not (system.file.exists() and holder(settings.data_dir)):  # it may be this service that runs
        _check_free(settings, gateway_port)
    if not config.exists():
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text("# Settings: https://toml.io. `turnkeep serve --help-all` lists them.\n")
    system.write(content)
    system.start()
    click.echo(f"installed {system.file}, with the settings in {config}, and started it. {system.hint}")
    click.echo("See: turnkeep service status, turnkeep service logs. Undo: turnkeep service uninstall")


def _settings_file(config: Path | None) -> Path:
    """Return the absolute path of the settings file. Raises `ServiceError` if a named file does not exist."""
    if config is not None and not config.is_file():
        raise ServiceError(f"there is no settings file {config}; --config must name a TOML file")
    here = Path(CONFIG_NAME)
    if config is None and not here.is_file():
        return platformdirs.user_config_path("turnkeep", appauthor=False) / CONFIG_NAME
    return (config or here).absolute()


def _program() -> list[str]:
    """Return the command that runs this installation, with absolute paths."""
    called = Path(sys.argv[0]).absolute()
    return [str(called)] if called.name == _PROGRAM else [sys.executable, "-P", "-m", "commands"]


def _model_files(served: Iterable[Settings]) -> Iterator[Path]:
    """Yield the file or folder of each model that these settings name, if it is on this machine."""
    from worker.models import catalog

    for one in served:
        for name in filter(None, (one.model, one.draft_model)):
            path = catalog.expanded(name)
            found = path if path.exists() else catalog.find(name, one.data_dir)
            if found is not None:
                yield found


def _check_places(*paths: Path) -> None:
    """Raise `ServiceError` if macOS would ask a person before the service may use one of the paths."""
    for path in map(Path.resolve, paths):
        for folder in (Path(one).expanduser().resolve() for one in _GUARDED):
            if path.is_relative_to(folder) or any(_are_same(one, folder) for one in (path, *path.parents)):
                raise ServiceError(f"macOS keeps services out of {folder}; move {path} to another folder")


def _are_same(path: Path, folder: Path) -> bool:
    """Whether two paths are of one folder, also if they differ in case, which macOS's file system ignores."""
    try:
        return path.samefile(folder)
    except OSError:  # one of them does not exist
        return False


def _check_free(settings: Settings, gateway: int | None) -> None:
    """Raise `TurnkeepError` if another program holds the data directory or a port that the service needs."""
    from worker.wire.broker import EmbeddedServer, check_port

    with DataDir.open(settings.data_dir, settings.worker) as directory:  # raises if a worker has it
        if settings.nats is None:
            EmbeddedServer(directory, settings).check()
    if gateway is not None:
        check_port(gateway, "choose another with --gateway")


@service.command()
@as_json
def status(as_json: bool) -> None:
    """Say whether the service runs and serves. Exit code 1 if it does not."""
    system = _system()
    command = _installed(system)
    config = Path(command[command.index("--config") + 1])
    settings = load({}, {}, config, config.parent)
    held = holder(settings.data_dir)
    is_service = held is not None and _is_run_by(held.pid, command)
    metrics, why = _worker(settings) if is_service else (None, "`turnkeep service logs` may say why")
    running = held.name if held is not None else "no"
    if held is not None and not is_service:
        running = f"no; {held.name} uses its data directory, and is another one"
    port = next((word.partition("=")[2] for word in command if word.startswith("--gateway=")), None)
    rows = [
        ("runs", running),
        ("ready", f"yes, turnkeep {metrics.version}" if metrics else f"no; {why}"),
        ("model", metrics.model if metrics else "-"),
        ("NATS", shown(url_of(settings))),
        ("gateway", f"http://127.0.0.1:{port}/v1" if port else "none; install --gateway adds one"),
        ("settings", str(config)),
        ("file", str(system.file)),
    ]
    if as_json:
        click.echo(json.dumps(dict(rows)))
    else:
        table(("service", units.NAME), rows)
    sys.exit(0 if metrics else 1)


def _is_run_by(pid: int, command: Sequence[str]) -> bool:
    """Whether a process runs the service's command, which an interpreter may precede."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()[1 - len(command) :] == command[1:]
    return False


def _worker(settings: Settings) -> tuple[Metrics | None, str]:
    """Ask the worker for its metrics; return them, or None and the reason."""

    async def ask(client: Client) -> Metrics:
        return await client.worker_metrics()

    try:
        return talk(settings, "default", ask), ""
    except TurnkeepError as error:
        return None, str(error).partition(";")[0]


@service.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines, until Ctrl-C.")
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=50, show_default=True, help="Number of last lines."
)
def logs(lines: int, follow: bool) -> None:
    """Print the last lines of the service's log."""
    system = _system()
    _installed(system)
    _become(system.logs(lines, follow=follow))


def _become(command: list[str]) -> NoReturn:
    if shutil.which(command[0]) is None:
        raise ServiceError(f"there is no program {command[0]}, which reads the log")
    os.execvp(command[0], command)  # noqa: S606  # no shell is wanted


@service.command()
def uninstall() -> None:
    """Stop and remove the service; sessions, models and settings stay."""
    system = _system()
    command = _installed(system)
    system.check()
    system.stop()
    system.remove()
    config = command[command.index("--config") + 1]
    click.echo(f"removed {system.file}; the settings in {config} and the data directory stay")


def _installed(system: _Systemd | _Launchd) -> list[str]:
    """Return the command line of the installed service. Raises `ServiceError` if none is installed."""
    try:
        command = system.command()
    except FileNotFoundError:
        raise ServiceError(f"there is no {system.file}; `turnkeep service install` makes one") from None
    if "--config" not in command[:-1]:
        raise ServiceError(f"{system.file} is not of `turnkeep service install`; remove or move it")
    return command


#: Click's own script needs bash 4.4, and macOS has 3.2. If nothing is found, bash completes names of files.
_BASH: Final = """\
_turnkeep_completion() {
    local IFS=$'\\n' word
    COMPREPLY=()
    local found=$(COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _TURNKEEP_COMPLETE=bash_complete "$1")
    for word in $found; do
        case $word in plain,*) COMPREPLY+=("${word#plain,}") ;; esac
    done
}
complete -o default -F _turnkeep_completion turnkeep
"""
#: Where each shell looks for completion scripts; zsh needs a setting for it, too.
_PLACES: Final[Mapping[str, str]] = {
    "bash": "~/.local/share/bash-completion/completions/turnkeep",
    "zsh": "~/.zfunc/_turnkeep",
    "fish": "~/.config/fish/completions/turnkeep.fish",
}
#: The setting that a shell may need to look there, as a part of a message.
_NEEDS: Final[Mapping[str, str]] = {
    "bash": f"; without the package bash-completion, ~/.bashrc needs: . {_PLACES['bash']}",
    "zsh": "; ~/.zshrc needs: fpath+=~/.zfunc; autoload -Uz compinit; compinit",
    "fish": "",
}


@click.command()
@click.argument("shell", type=click.Choice([*_PLACES]))
@click.option("--install", "install_", is_flag=True, help="Write the script to where the shell finds it.")
@click.pass_context
def completion(context: click.Context, shell: str, install_: bool) -> None:
    """Print the script that completes commands in a shell."""
    from click.shell_completion import get_completion_class

    kind: Any = get_completion_class(shell)
    script = _BASH
    if shell != "bash":
        script = kind(context.find_root().command, {}, _PROGRAM, "_TURNKEEP_COMPLETE").source()
    if not install_:
        click.echo(script)
        return
    path = Path(_PLACES[shell]).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    click.echo(f"wrote {path}; it is used in the next shell{_NEEDS[shell]}")
