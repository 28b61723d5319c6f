"""The commands `service` (a worker as a service of systemd or launchd) and `completion` (for shells)."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click
import platformdirs

from ops import units
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import shown
from worker.process.datadir import DataDir
from worker.process.setting_sources import CONFIG_NAME, load

from .printing import table
from .talking import talk, url_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Metrics
    from worker.process.settings import Settings

_ON_MAC: Final = sys.platform == "darwin"
_PROGRAM: Final = "turnkeep"


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

    def removed(self) -> None:
        _ask("systemctl", "--user", "daemon-reload")

    def state(self) -> tuple[bool, str]:
        shown = _ask(
            "systemctl", "--user", "show", units.NAME, "--property=ActiveState,SubState,MainPID,Result"
        )
        found = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        if found.get("ActiveState") == "active":
            return True, f"running (pid {found.get('MainPID')})"
        return False, f"{found.get('ActiveState')} ({found.get('SubState')}, {found.get('Result')})"

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        return ["journalctl", "--user-unit", units.NAME, "-o", "cat", "-n", str(lines), *["-f"] * follow]

    @property
    def hint(self) -> str:
        return "It ends when you log out, unless you run once: loginctl enable-linger"


@dataclass(frozen=True, slots=True)
class _Launchd:
    """Installs and controls the service with the user's launchd, on macOS."""

    @property
    def file(self) -> Path:
        return Path("~/Library/LaunchAgents/turnkeep.plist").expanduser()

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _log(self) -> Path:
        return Path("~/Library/Logs/turnkeep.log").expanduser()

    def content(self, command: list[str], config: Path) -> bytes:
        return units.agent(command, config.parent, self._log)

    def command(self) -> list[str]:
        return [str(word) for word in plistlib.loads(self.file.read_bytes())["ProgramArguments"]]

    def check(self) -> None:
        if _run("launchctl", "print", self._domain).returncode:
            raise ServiceError("launchd has no session of this user: log in on the screen of this Mac once")

    def start(self) -> None:
        _run("launchctl", "bootout", f"{self._domain}/{units.NAME}")  # of an earlier installation
        _ask("launchctl", "bootstrap", self._domain, str(self.file))

    def stop(self) -> None:
        _run("launchctl", "bootout", f"{self._domain}/{units.NAME}")

    def removed(self) -> None:
        pass

    def state(self) -> tuple[bool, str]:
        done = _run("launchctl", "print", f"{self._domain}/{units.NAME}")
        pids = [
            line.split("=")[1].strip()
            for line in done.stdout.splitlines()
            if line.strip().startswith("pid =")
        ]
        return (True, f"running (pid {pids[0]})") if pids else (False, "stopped")

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        return ["tail", "-n", str(lines), *["-F"] * follow, str(self._log)]

    @property
    def hint(self) -> str:
        return "It runs while you are logged in."


def _system() -> _Systemd | _Launchd:
    return _Launchd() if _ON_MAC else _Systemd()


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
    """A worker that this machine starts by itself: install, status, logs, uninstall."""


@service.command()
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Settings file. [default: ./turnkeep.toml, else one in your configuration folder]",
)
@click.option(
    "--gateway",
    metavar="[PORT]",
    type=click.IntRange(1, 65535),
    is_flag=False,
    flag_value=8080,
    help="Run a gateway too. [default port: 8080]",
)
@click.option(
    "--print", "only_print", is_flag=True, help="Print the file for systemd or launchd; change nothing."
)
def install(config: Path | None, gateway: int | None, only_print: bool) -> None:
    """Install and start the service, or start it anew with other settings.

    A user's systemd runs it on Linux, launchd on macOS.
    """
    system = _system()
    config = _settings_file(config)
    command = [*_program(), "serve", "--config", str(config), *([f"--gateway={gateway}"] if gateway else [])]
    content = system.content(command, config)
    if only_print:
        click.echo(content.decode(), nl=False)
        return
    system.check()
    settings = load({}, {}, config if config.exists() else None, config.parent)
    if not (system.file.exists() and system.state()[0]):
        _check_free(settings, gateway)
    if not config.exists():
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text("# Settings of the worker: https://toml.io. `turnkeep serve --help` lists them.\n")
    system.file.parent.mkdir(parents=True, exist_ok=True)
    system.file.write_bytes(content)
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


def _check_free(settings: Settings, gateway: int | None) -> None:
    """Raise `TurnkeepError` if another program holds the data directory or a port that the service needs."""
    from worker.wire.broker import HOST, EmbeddedServer

    with DataDir.open(settings.data_dir, settings.worker) as directory:  # raises if a worker has it
        if settings.nats is None:
            EmbeddedServer(directory, settings).check()
    if gateway is not None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, gateway))
            except OSError as error:
                raise ServiceError(
                    f"port {gateway} of {HOST} is refused ({error.strerror}); choose another with --gateway"
                ) from None


@service.command()
def status() -> None:
    """Say whether the service runs and serves. Exit code 1 if it does not."""
    system = _system()
    command = _installed(system)
    system.check()
    is_running, state = system.state()
    config = Path(command[command.index("--config") + 1])
    settings = load({}, {}, config, config.parent)
    metrics, why = _worker(settings) if is_running else (None, "")
    port = next((word.partition("=")[2] for word in command if word.startswith("--gateway=")), None)
    rows = [
        ("state", state),
        ("ready", f"yes, turnkeep {metrics.version}" if metrics else f"no; {why}" if why else "no"),
        ("model", metrics.model if metrics else "-"),
        ("NATS", shown(url_of(settings))),
        ("gateway", f"http://127.0.0.1:{port}/v1" if port else "none; install --gateway adds one"),
        ("settings", str(config)),
        ("file", str(system.file)),
    ]
    table(("service", units.NAME), rows)
    sys.exit(0 if metrics else 1)


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
    system.file.unlink()
    system.removed()
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
    """Print the script that completes commands and options in a shell."""
    from click.shell_completion import get_completion_class

    kind: Any = get_completion_class(shell)
    script = kind(context.find_root().command, {}, _PROGRAM, "_TURNKEEP_COMPLETE").source()
    if not install_:
        click.echo(script)
        return
    path = Path(_PLACES[shell]).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    click.echo(f"wrote {path}; it is used in the next shell{_NEEDS[shell]}")
