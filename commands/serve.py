"""`turnkeep serve`: runs the supervisor of one model or several in the foreground, from settings to exit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import click

from worker.observe.bare_structlog import structlog
from worker.observe.logs import configure
from worker.process.cache_parts import cache_codec
from worker.process.children import PROGRAM, ending, start
from worker.process.concurrency import task_group
from worker.process.contradictions import check_together
from worker.process.settings import SettingsError
from worker.wire.credentials import worker_options

from .flags import port_option, with_settings
from .nats_connection import CLIENT_SETTINGS, GATEWAY_SETTINGS, command_line
from .ports import Beside, ports_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from anyio.abc import Process

    from worker.process.settings import Settings
    from worker.supervisor import Supervisor

    from .flags import GivenSettings

log = structlog.get_logger()

#: How long a gateway or a console may take to end; its clients retry when it runs again.
_BESIDE_S = 3.0
#: After this time a gateway or a console that ends was no failed start; the pause before its next start.
_SETTLED_S = 60.0
_AGAIN_S = 1.0
#: How many lines of the log are kept for the console, and how often they are sent to it.
_LOG_LINES = 200
_LOG_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How `serve` runs, apart from the settings."""

    #: The commands to run beside the workers, `gateway` and `console`, with their options.
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: The gateway's port; None if there is no gateway, or any free port.
    gateway: int | None = None
    #: Whether it prints the steps of its start and then `ready`, and ends when its standard input does.
    until_eof: bool = False
    #: Lines of the log that were not sent to the console yet.
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))


@click.command()
@click.option("--check", is_flag=True, help="Check what this worker needs, as doctor does, and end.")
@port_option("gateway", 8080, "Run a gateway too, on this machine's loopback address.")
@port_option("console", 9423, "Run a console too, a page to chat in, on the loopback address.")
@click.option("--until-eof", is_flag=True, hidden=True, help="End when standard input does.")
@with_settings()
def serve(
    given: GivenSettings,
    check: bool,
    gateway_port: int | None,
    console_port: int | None,
    until_eof: bool,
) -> None:
    """Run a model for programs; with --gateway over OpenAI's API.

    It starts a NATS server of its own unless --nats names one. Ctrl-C stops all. Log lines go to standard
    error: as text on a terminal, as JSON in a pipe or a file. `turnkeep serve --log-format console 2>&1 |
    tee log` shows text and keeps it.

    If turnkeep.toml has tables [models.NAME], each of these models gets a worker when it is asked for.
    On SIGHUP a worker reads the settings again and applies max_disk and min_free_disk.
    """
    settings, models = _loaded(given)
    beside = Beside(gateway_port, console_port)
    ports_of(settings, beside)  # raises if two are the same
    if check:
        _check(settings, models, beside)
    for one in models.values() or (settings,):
        cache_codec(one)  # raises if its key cannot be used
    # Without --data-dir, a child would use the server of NATS_URL.
    own = given.but(data_dir=settings.data_dir, prefix=None if models else settings.prefix)
    manner = Manner(beside=_beside(own, beside), gateway=gateway_port or None, until_eof=until_eof)
    again = given.as_found()  # without its file, a reload would apply defaults, and evict snapshots
    run(settings, models, lambda: _loaded(again), manner)


def _loaded(given: GivenSettings) -> tuple[Settings, dict[str, Settings]]:
    """Load the settings, and those of each model if there are several."""
    settings, models = given.load(), given.load_models()
    if not models and (given.flags["memory"] or given.flags["unload_after_s"]):
        raise SettingsError(
            "--memory and --unload-after-s are for [models] in turnkeep.toml, which has none; one model alone"
            " has --device-memory, and stays loaded"
        )
    for one in models.values() or (settings,):
        check_together(one)
    return settings, models


def _check(settings: Settings, models: Mapping[str, Settings], beside: Beside) -> None:
    from .doctor import examine

    worker_options(settings)
    examine(settings, models, beside, as_json=False)


def _beside(own: GivenSettings, beside: Beside) -> dict[str, list[str]]:
    """Wait until the ports are free; return the options of the gateway and the console beside a worker."""
    from worker.wire.broker import wait_for_port

    found = {}
    for name, port, settings in zip(Beside._fields, beside, (GATEWAY_SETTINGS, ()), strict=True):
        if port:
            wait_for_port(port, f"choose another with --{name} PORT")
        if port is not None:
            own_options = own.options((*CLIENT_SETTINGS, *settings))
            found[name] = [*own_options, "--listen", str(port)]
    return found


def run(
    settings: Settings,
    models: Mapping[str, Settings],
    read_again: Callable[[], tuple[Settings, dict[str, Settings]]],
    manner: Manner,
) -> None:
    """Run a supervisor until SIGINT or SIGTERM; a second signal ends the process at once.

    The workers, the gateway and the console run in processes of their own, which end with this one.
    Without a terminal, SIGHUP applies the disk limits that `read_again` returns. On a terminal SIGHUP means
    that the terminal was closed, and stops the worker like SIGTERM.
    """
    configure(settings.log_format, settings.log_level, manner.log.append)
    if _for_people(settings) and not manner.until_eof:
        log.info("starting", version=importlib.metadata.version("turnkeep"), data_dir=str(settings.data_dir))

    async def run() -> None:
        from worker.supervisor import Supervisor

        supervisor = Supervisor(
            settings,
            models,
            kept=manner.log.append if "console" in manner.beside else None,
            step=click.echo if manner.until_eof else None,
            gateway=manner.gateway,
        )

        async def reload() -> None:
            try:
                await supervisor.reload(*read_again())
            except SettingsError as error:
                log.error("the settings stay as they are", reason=str(error))  # noqa: TRY400  # the user's mistake

        starting = anyio.CancelScope()
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as received:
            async with task_group() as tasks:
                tasks.start_soon(_obey, received, supervisor, starting, reload)
                await _run_all(supervisor, settings, manner, starting)
                tasks.cancel_scope.cancel()

    anyio.run(run)


async def _run_all(app: Supervisor, settings: Settings, manner: Manner, starting: anyio.CancelScope) -> None:
    """Run `app`, and the gateway and the console beside it."""
    async with task_group() as tasks:
        if manner.until_eof:
            tasks.start_soon(_serve_a_parent, app, starting)
        elif _for_people(settings) and settings.log_level in {"auto", "debug", "info"}:
            tasks.start_soon(_say_what_next, settings, app, "gateway" in manner.beside)
        for name, options in manner.beside.items():
            tasks.start_soon(_run_beside, app, name, options, manner)
        with starting:
            await app.run()
        tasks.cancel_scope.cancel()


def _for_people(settings: Settings) -> bool:
    """Return whether the log is text on a terminal, for a person to read."""
    return settings.log_format != "json" and sys.stderr.isatty()


async def _say_what_next(settings: Settings, app: Supervisor, has_gateway: bool) -> None:
    """Once the worker serves, print how to talk with it."""
    await app.ready.wait()
    ways = [command_line(settings, "chat")]
    if has_gateway:
        ways.append(f"{command_line(settings, 'launch', ['data_dir'])} pi")
    click.echo(
        f"In another terminal: {', or '.join(ways)} (Ctrl-C stops the worker, sessions stay)", err=True
    )


async def _run_beside(
    app: Supervisor,
    name: str,
    options: Sequence[str],
    manner: Manner,
) -> None:
    """Run a gateway or a console once the worker serves, and again if it crashes.

    The console gets the log's lines.
    """

    async def tell(console: Process) -> None:
        with contextlib.suppress(anyio.BrokenResourceError):
            while True:
                while manner.log:
                    await console.stdin.send(f"{manner.log.popleft()}\n".encode())  # type: ignore[union-attr]
                await anyio.sleep(_LOG_S)

    await app.ready.wait()
    while True:
        began_s = anyio.current_time()
        try:
            process = await start([*PROGRAM, name, *options, "--until-eof"])
        except OSError as error:  # as at the system's limit of processes
            told = f"the {name} cannot be started yet"
            log.error(told, reason=str(error))  # noqa: TRY400
            await anyio.sleep(_AGAIN_S)
            continue
        async with ending(process, _BESIDE_S), task_group() as tasks:
            if name == "console":
                tasks.start_soon(tell, process)
            code = await process.wait()
            tasks.cancel_scope.cancel()
        # One that ends by itself soon after its start would do so again: it has printed the reason.
        if code >= 0 and anyio.current_time() - began_s < _SETTLED_S:
            told = f"the {name} has ended, the worker goes on"
            log.error(told, code=code)
            return
        told = f"the {name} has ended; starting it again"
        log.error(told, code=code)
        await anyio.sleep(_AGAIN_S)


async def _serve_a_parent(app: Supervisor, starting: anyio.CancelScope) -> None:
    """Print `ready` for the parent process once the worker serves; stop when standard input ends."""
    async with task_group() as tasks:
        tasks.start_soon(_say_when_ready, app)
        await anyio.wait_readable(sys.stdin)
        _end(app, starting)
        tasks.cancel_scope.cancel()


async def _say_when_ready(app: Supervisor) -> None:
    await app.ready.wait()
    click.echo("ready")


async def _obey(
    received: AsyncIterator[signal.Signals],
    app: Supervisor,
    starting: anyio.CancelScope,
    reload: Callable[[], Awaitable[None]],
) -> None:
    """On a signal stop the workers, at a second one exit; without a terminal, SIGHUP reloads instead."""
    has_terminal = os.isatty(0)  # a closed one is none any more
    told = False
    async for number in received:
        if number == signal.SIGHUP and not has_terminal:
            await reload()
        elif not told:
            told = True
            _end(app, starting)
        elif number != signal.SIGHUP:  # which may come twice from one terminal; threads cannot be interrupted
            os._exit(128 + number)


def _end(app: Supervisor, starting: anyio.CancelScope) -> None:
    if app.ready.is_set():
        app.stop()
    else:
        starting.cancel()
