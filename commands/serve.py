"""`turnkeep serve`: runs a worker, or a supervisor of several, in the foreground, from settings to exit.

The console runs in a child process, and prints its requests to `serve` on its standard output, one per line.
`serve NAME` restarts the worker with that model, `serve-undrafted NAME` does so without the draft model;
`serve` loads the unloaded model again, and `unload NAME` unloads it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import anyio
import click
import msgspec

from worker.models.blas import computes_on_linux_cpu, preload
from worker.observe.bare_structlog import structlog
from worker.observe.logs import configure
from worker.process.children import PROGRAM, child
from worker.process.concurrency import task_group
from worker.process.heap import Spare
from worker.process.keys import cache_access
from worker.process.settings import SettingsError
from worker.wire.credentials import worker_options

from .flags import with_settings
from .progress import terminal_progress
from .talking import CLIENT_SETTINGS, GATEWAY_SETTINGS, command_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from anyio.abc import Process

    from worker.app import App
    from worker.process.settings import Settings
    from worker.supervisor import Supervisor
    from worker.unloaded import Unloaded

    from .flags import Given

log = structlog.get_logger()

#: The device thread holds the interpreter lock while it builds a step's graph; at the default of 5 ms the
#: event loop would wait that long each time that it wants to run.
_SWITCH_INTERVAL_S = 0.001
#: Freed memory that the process keeps for reuse, and prepares at its start; on a Linux CPU only.
_SPARE_BYTES = 2**28
#: How long a gateway or a console may take to end; its clients retry when it runs again.
_BESIDE_S = 3.0
#: The signals that end a worker or make it reload its settings, and the time to handle pending ones.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNAL_S = 0.1
#: How many lines of the log are kept for the console, and how often they are sent to it.
_LOG_LINES = 200
_LOG_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How `serve` runs a worker, apart from the worker's settings.

    `options` are the words of the command line that lead to the same settings. `beside` maps the commands to
    run beside the worker, `gateway` and `console`, to their options. `of` names one of several models; then,
    or with `until_eof`, the worker prints `ready` once it serves, and ends when its standard input does; with
    `until_eof` it prints the steps of its start before that.
    `unloaded` names the model that was unloaded. `log` holds lines not yet sent to the console, `wishes` the
    console's requests.
    """

    options: Sequence[str] = ()
    beside: Mapping[str, Sequence[str]] = field(default_factory=dict)
    of: str | None = None
    until_eof: bool = False
    unloaded: str | None = None
    log: deque[str] = field(default_factory=lambda: deque(maxlen=_LOG_LINES))
    wishes: list[str] = field(default_factory=list)


@click.command()
@click.option("--check", is_flag=True, help="Check what this worker needs, as doctor does, and end.")
@click.option(
    "--gateway",
    "gateway_port",
    metavar="[PORT]",
    type=click.IntRange(0, 65535),
    is_flag=False,
    flag_value=8080,
    help="Run a gateway too, on this machine's loopback address. [default port: 8080]",
)
@click.option(
    "--console",
    "console_port",
    metavar="[PORT]",
    type=click.IntRange(0, 65535),
    is_flag=False,
    flag_value=9423,
    help="Run a console too, a page to chat in, on the loopback address. [default port: 9423]",
)
@click.option("--of", metavar="NAME", hidden=True, help="Serve one of [models], until standard input ends.")
@click.option("--weigh", is_flag=True, hidden=True, help="Print what the model needs, and end.")
@click.option("--until-eof", is_flag=True, hidden=True, help="End when standard input does.")
@click.option("--unloaded", metavar="NAME", hidden=True, help="Do not load the model, which has this name.")
@click.option("--undrafted", is_flag=True, hidden=True, help="Leave the draft model out.")
@with_settings()
def serve(
    given: Given,
    check: bool,
    gateway_port: int | None,
    console_port: int | None,
    of: str | None,
    weigh: bool,
    until_eof: bool,
    unloaded: str | None,
    undrafted: bool,
) -> None:
    """Run a worker, with its own NATS server unless --nats names one. Ctrl-C stops it.

    Log lines go to standard error: as text on a terminal, as JSON in a pipe or a file. `turnkeep serve
    --log-format console 2>&1 | tee log` shows text and keeps it.

    If turnkeep.toml has tables [models.NAME], each of these models gets a worker when it is asked for.
    On SIGHUP a worker reads the settings again and applies max_disk and min_free_disk.
    """
    settings, models = _loaded(given, of)
    if check:
        _check(settings, models)
    if weigh:
        from .size import weigh as run_weigh

        configure(settings.log_format, settings.log_level)
        click.echo(msgspec.json.encode(run_weigh(settings)))
        return
    # Without --data-dir, a child would use the server of NATS_URL.
    own = given.but(data_dir=settings.data_dir, prefix=None if models else settings.prefix)
    told = {"--unloaded": unloaded, "--draft-model": settings.draft_model}
    beside = _beside(own, gateway_port, console_port, told)
    if undrafted:
        settings = given.but(of=of, draft_model="none").load()
    # Other users could read a URL with a token on the command line of a worker; it gets it otherwise.
    options = given.but(nats=settings.nats and given.flags["nats"]).options()
    manner = Manner(options=options, beside=beside, of=of, until_eof=until_eof, unloaded=unloaded)
    if models:
        supervise(models, manner)
    elif unloaded is not None:
        keep_place(settings, manner)
    else:
        run(settings, given.but(of=of).load, manner)


def _loaded(given: Given, of: str | None) -> tuple[Settings, dict[str, Settings]]:
    """Load the settings, and those of each model if there are several."""
    settings = given.but(of=of).load()
    models = given.load_models() if of is None else {}
    if not (models or of) and (given.flags["memory"] or given.flags["unload_after_s"]):
        raise SettingsError(
            "--memory and --unload-after-s are for [models] in turnkeep.toml, which has none; one model alone"
            " has --device-memory, and stays loaded"
        )
    return settings, models


def _check(settings: Settings, models: Mapping[str, Settings]) -> None:
    from .doctor import examine

    worker_options(settings)
    cache_access(settings)
    examine(settings, models, as_json=False)


def _beside(
    own: Given, gateway_port: int | None, console_port: int | None, told: Mapping[str, str | None]
) -> dict[str, list[str]]:
    """Wait until the ports are free; return the options of the gateway and the console beside a worker.

    The console also gets the options `told`, except those that are None or empty.
    """
    from worker.wire.broker import wait_for_port

    found, words = {}, [word for option, value in told.items() if value for word in (option, value)]
    for name, port, settings, options in (
        ("gateway", gateway_port, GATEWAY_SETTINGS, []),
        ("console", console_port, (), words),
    ):
        if port:
            wait_for_port(port, f"choose another with --{name} PORT")
        if port is not None:
            own_options = own.options((*CLIENT_SETTINGS, *settings))
            found[name] = [*own_options, "--listen", str(port), *options]
    return found


def run(settings: Settings, read_again: Callable[[], Settings], manner: Manner) -> None:
    """Run a worker until SIGINT or SIGTERM; a second signal ends the process at once.

    The gateway and the console run in processes of their own, which end with this one. If the console asks
    for another model, or for none, this process restarts itself accordingly.
    Without a terminal, SIGHUP applies the disk limits that `read_again` returns. On a terminal SIGHUP means
    that the terminal was closed, and stops the worker like SIGTERM.
    """
    configure(settings.log_format, settings.log_level, manner.log)
    if manner.of is not None:
        structlog.contextvars.bind_contextvars(model=manner.of)
    elif _for_people(settings) and not manner.until_eof:
        log.info("starting", version=importlib.metadata.version("turnkeep"), data_dir=str(settings.data_dir))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.disable()  # until the start has created its many objects, none of which is garbage
    spare = Spare(_SPARE_BYTES if computes_on_linux_cpu() else 0)
    preload()  # before anything imports MLX

    def loaded() -> None:
        spare.release()
        gc.enable()
        gc.collect()
        gc.freeze()  # else each full collection visits all imported objects: a pause of 30 ms

    async def run() -> None:
        from worker.app import App

        with terminal_progress(click.echo if manner.until_eof else log.info) as progress:
            app = App(settings, progress=progress, loaded=loaded)
            await _run(
                app, settings, lambda: _reload(app, read_again), manner, partial(_restart, app, manner)
            )

    anyio.run(run)
    _begin_again(manner)


def keep_place(settings: Settings, manner: Manner) -> None:
    """Stand in for a worker whose model was unloaded, until a signal or until the console serves a model."""
    configure(settings.log_format, settings.log_level, manner.log)

    async def run() -> None:
        from worker.unloaded import Unloaded

        app = Unloaded(settings)
        await _run(app, settings, lambda: None, manner, partial(_restart, app, manner))

    anyio.run(run)
    _begin_again(manner)


def _begin_again(manner: Manner) -> None:
    """Replace this process (exec) by the command that the console asked for, if any: this frees memory."""
    if manner.wishes:
        command = [*PROGRAM, *again(sys.argv[1:], manner.wishes[-1])]
        os.execv(sys.executable, command)  # noqa: S606  # this program


def again(words: Sequence[str], wish: str) -> list[str]:
    """Return the command line `words` changed for the request `wish`, without earlier requests' changes."""
    verb, _, name = wish.partition(" ")
    changed = [*words]
    if changed[-2:-1] == ["--unloaded"]:
        del changed[-2:]
    if verb == "unload" or not name:
        return [*changed, "--unloaded", name] if name else changed
    if changed[-1:] == ["--undrafted"]:
        del changed[-1:]
    if changed[-2:-1] == ["--model"]:
        del changed[-2:]
    return [*changed, "--model", name, *["--undrafted"][: verb == "serve-undrafted"]]


def supervise(models: dict[str, Settings], manner: Manner) -> None:
    """Run a supervisor of several models until SIGINT or SIGTERM."""
    from worker.supervisor import Supervisor

    settings = next(iter(models.values()))
    configure(settings.log_format, settings.log_level, manner.log)

    async def run() -> None:
        supervisor = Supervisor(models, manner.options)

        def grant(wish: str) -> None:
            supervisor.unload(wish.removeprefix("unload "))

        await _run(supervisor, settings, supervisor.reload, manner, grant)

    anyio.run(run)


def _restart(app: App | Unloaded, manner: Manner, wish: str) -> None:
    """Stop the worker; the process then restarts as the console's request `wish` says."""
    log.info("beginning again", wish=wish)
    manner.wishes.append(wish)
    app.stop()


async def _run(
    app: App | Supervisor | Unloaded,
    settings: Settings,
    reload: Callable[[], None],
    manner: Manner,
    grant: Callable[[str], None],
) -> None:
    """Run `app` until a signal; call `grant` with each request of the console."""
    starting = anyio.CancelScope()
    with anyio.open_signal_receiver(*_SIGNALS) as received:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        async with task_group() as obeying:
            obeying.start_soon(_obey, received, app, starting, reload, manner)
            await _run_all(app, settings, manner, grant, starting)
            if manner.wishes:  # later signals are for the restarted command
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                await anyio.sleep(_SIGNAL_S)
            obeying.cancel_scope.cancel()


async def _run_all(
    app: App | Supervisor | Unloaded,
    settings: Settings,
    manner: Manner,
    grant: Callable[[str], None],
    starting: anyio.CancelScope,
) -> None:
    """Run `app`, and the gateway and the console beside it."""
    async with task_group() as tasks:
        if manner.of is not None or manner.until_eof:
            tasks.start_soon(_serve_a_parent, app, starting)
        elif (
            _for_people(settings)
            and settings.log_level in {"auto", "debug", "info"}
            and manner.unloaded is None
        ):
            tasks.start_soon(_say_what_next, settings, app, "gateway" in manner.beside)
        for name, options in manner.beside.items():
            tasks.start_soon(_run_beside, app, name, options, manner, grant)
        with starting:
            await app.run()
        tasks.cancel_scope.cancel()


def _for_people(settings: Settings) -> bool:
    """Return whether the log is text on a terminal, for a person to read."""
    return settings.log_format != "json" and sys.stderr.isatty()


async def _say_what_next(settings: Settings, app: App | Supervisor | Unloaded, has_gateway: bool) -> None:
    """Once the worker serves, print how to talk with it."""
    await app.ready.wait()
    ways = [command_line(settings, "chat")]
    if has_gateway:
        ways.append(f"{command_line(settings, 'launch', ['data_dir'])} pi")
    click.echo(
        f"In another terminal: {', or '.join(ways)} (Ctrl-C stops the worker, sessions stay)", err=True
    )


async def _run_beside(
    app: App | Supervisor | Unloaded,
    name: str,
    options: Sequence[str],
    manner: Manner,
    grant: Callable[[str], None],
) -> None:
    """Run a gateway or a console once the worker serves; exchange requests and log lines with the console."""

    async def obey(console: Process) -> None:
        with contextlib.suppress(anyio.EndOfStream):
            while True:
                for wish in (await console.stdout.receive()).decode().splitlines():  # type: ignore[union-attr]
                    grant(wish)

    async def tell(console: Process) -> None:
        with contextlib.suppress(anyio.BrokenResourceError):
            while True:
                while manner.log:
                    await console.stdin.send(f"{manner.log.popleft()}\n".encode())  # type: ignore[union-attr]
                await anyio.sleep(_LOG_S)

    await app.ready.wait()
    stdout = subprocess.PIPE if name == "console" else None
    running = child([name, *options, "--until-eof"], patience_s=_BESIDE_S, stdout=stdout)
    async with running as process, task_group() as tasks:
        if name == "console":
            tasks.start_soon(obey, process)
            tasks.start_soon(tell, process)
        code = await process.wait()
        tasks.cancel_scope.cancel()
        told = f"the {name} has ended, the worker goes on"
        log.error(told, code=code)


async def _serve_a_parent(app: App | Supervisor | Unloaded, starting: anyio.CancelScope) -> None:
    """Print `ready` for the parent process once the worker serves; stop when standard input ends."""
    async with task_group() as tasks:
        tasks.start_soon(_say_when_ready, app)
        await anyio.wait_readable(sys.stdin)
        _end(app, starting)
        tasks.cancel_scope.cancel()


async def _say_when_ready(app: App | Supervisor | Unloaded) -> None:
    await app.ready.wait()
    click.echo("ready")


async def _obey(
    received: AsyncIterator[signal.Signals],
    app: App | Supervisor | Unloaded,
    starting: anyio.CancelScope,
    reload: Callable[[], None],
    manner: Manner,
) -> None:
    """On a signal stop the worker, at a second one exit; without a terminal, SIGHUP reloads instead."""
    told = False
    async for number in received:
        if number == signal.SIGHUP and not os.isatty(0):
            reload()
        elif told:  # threads, such as a download, cannot be interrupted
            os._exit(128 + number)
        else:
            told = True
            manner.wishes.clear()
            _end(app, starting)


def _end(app: App | Supervisor | Unloaded, starting: anyio.CancelScope) -> None:
    if app.ready.is_set():
        app.stop()
    else:
        starting.cancel()


def _reload(app: App, read_again: Callable[[], Settings]) -> None:
    try:
        app.reload(read_again())
    except SettingsError as error:
        log.error("the settings stay as they are", reason=str(error))  # noqa: TRY400  # the user's mistake
