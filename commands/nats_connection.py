"""Connects commands to NATS, with the credentials in the settings, and finds the server of a local worker."""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import math
import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

import click

from turnkeep_client.errors import (
    NoServerError,
    NotPermittedError,
    NoWorkerError,
    RequestFailedError,
    TurnkeepError,
)
from turnkeep_client.redact import shown
from turnkeep_client.subjects import DEFAULT_TENANT
from turnkeep_client.writes import LIKELY
from worker.process.datadir import (
    TOKEN_NAME,
    holder,
    is_same,
    noted_nats,
    starting_pid,
)
from worker.process.installed import program
from worker.process.setting_sources import load_models
from worker.process.settings import SettingsError, default_data_dir
from worker.wire.credentials import CREDENTIAL_SETTINGS, client_options, over_tls

from .flags import with_settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.session import Session
    from worker.process.settings import Settings

    from .flags import GivenSettings

#: The settings of a command that talks to NATS.
CLIENT_SETTINGS: Final = ("data_dir", "nats", "nats_port", "prefix", *CREDENTIAL_SETTINGS)
#: The settings of a gateway, beside those.
GATEWAY_SETTINGS: Final = ("gateway_ttl_s",)
#: Settings that no other command is advised to use: each NATS user has its own. The CA is everybody's.
_OF_A_USER: Final = frozenset(CREDENTIAL_SETTINGS) - {"nats_ca"}
#: How long a worker may take to reply; it may have to load its model first.
_CONTROL_S: Final = 60.0
#: The pause between two attempts to connect to the server of a starting worker.
_STARTING_S: Final = 0.2
#: How long a `serve` may take until it locks its data directory.
_IMPORTS_S: Final = 10.0
_TERMINATED: Final = 143

_T = TypeVar("_T")


def _starting(settings: Settings) -> int | None:
    """Return the process id of a worker that is starting with these settings."""
    if settings.nats or _is_elsewhere(settings):
        return None
    return starting_pid(settings.data_dir) or _just_begun(settings.data_dir)


async def connected(
    settings: Settings, tenant: str, prefix: str | None = None, *, waits: bool = True
) -> Client:
    """Connect a client with these settings; `prefix`, if given, replaces the prefix of the settings.

    If it `waits`, it waits for the server of a worker that has just been started, and says so. Requests wait
    without limit: a user ends the wait by Ctrl-C, or by ending the HTTP request. Raises `NoServerError` and
    `NotPermittedError`.
    """
    import asyncio

    from turnkeep_client.client import connect

    is_told = False
    try:
        while True:
            try:
                here = located(settings)
                return await connect(
                    url_of(here),
                    tenant=tenant,
                    prefix=prefix or settings.prefix,
                    control_timeout_s=_CONTROL_S,
                    timeout_s=math.inf,
                    **client_options(here),
                )
            except NoServerError:
                if (starting := _starting(settings) if waits else None) is None:
                    raise
                if not is_told:
                    click.echo(f"waiting for the worker that is starting (pid {starting}) ...", err=True)
                is_told = True
                await asyncio.sleep(_STARTING_S)
    except NotPermittedError as error:
        if "refuses the credentials" not in str(error):
            raise
        raise _refused(here) or error from None


def _refused(here: Settings) -> NotPermittedError | None:
    """Return an error that says where to find the token of the server that refused the credentials.

    Returns None if that server is not one of a worker on this machine.
    """
    if here.nats is not None:
        if _port_here(here.nats) != noted_nats(here.data_dir):
            return None
        return NotPermittedError(
            f"the NATS server at {shown(here.nats)} wants its token; it is that of this machine's own"
            " worker: leave out --nats or NATS_URL"
        )
    path = here.data_dir / TOKEN_NAME
    why = f"refuses the token in {path}" if path.exists() else f"wants a token, and there is no {path}"
    return NotPermittedError(
        f"the NATS server at {url_of(here)} {why}; name its worker's data directory by --data-dir"
    )


def _port_here(url: str) -> int | None:
    """Return the port in the URL of a NATS server on this machine; None for any other URL."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        if parts.hostname in {"127.0.0.1", "localhost"}:
            return parts.port or 4222
    return None


def _just_begun(data_dir: Path) -> int | None:
    """Return the pid of a `serve` that has just started and may not have locked its data directory yet."""
    import psutil

    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = process.info["cmdline"] or []
        is_serve = (
            any(Path(one).name in {"turnkeep", "commands"} for one in words[:4]) and "serve" in words[1:5]
        )
        if not is_serve or time.time() - process.info["create_time"] > _IMPORTS_S:
            continue
        with contextlib.suppress(psutil.Error):
            named = ((*one.partition("=")[::2], after) for one, after in pairwise([*words, ""]))
            given = next((value or after for one, value, after in named if one == "--data-dir"), None)
            given = given or process.environ().get("TURNKEEP_DATA_DIR") or default_data_dir()
            if is_same(Path(given), data_dir):
                return process.pid
    return None


def located(settings: Settings) -> Settings:
    """Return the settings; if they name no NATS server, with the one that the data directory notes."""
    if settings.nats is not None or settings.nats_port is not None:
        return settings
    nats = noted_nats(settings.data_dir)
    return replace(settings, nats=nats) if isinstance(nats, str) else replace(settings, nats_port=nats)


def url_of(settings: Settings) -> str:
    """Return the URL of the NATS server to which a client with these settings connects."""
    here = located(settings)
    return over_tls(here, here.nats or f"nats://127.0.0.1:{here.own_port}")


def _is_elsewhere(settings: Settings) -> bool:
    """Return whether the data directory's running worker uses another NATS server than the settings name."""
    used = noted_nats(settings.data_dir) if holder(settings.data_dir) else None
    return used not in {None, located(settings).nats_place}


def instead(settings: Settings) -> str:
    """Return advice to the user, a part of a sentence, for when no server answers as the settings say."""
    if settings.nats is not None:
        return "start it, or name another one with --nats or NATS_URL"
    if _is_elsewhere(settings):
        at = url_of(replace(settings, nats_port=None))
        return f"the one of {settings.data_dir} is at {at}: leave out --nats-port"
    return f"start a worker with: {command_line(settings, 'serve')}"


def talk(settings: Settings, tenant: str, say: Callable[[Client], Coroutine[Any, Any, _T]]) -> _T:
    """Connect a client, run `say` with it and return its result; ends as `run_until_signal`.

    A request that the log does not store is told on standard error while `say` waits for it.
    """
    from worker.process.concurrency import background  # here, since `--help` needs no event loop

    async def run() -> _T:
        async with (
            await connected(settings, tenant) as client,
            background(functools.partial(_warn_if_unstored, client)),
        ):
            return await say(client)

    return run_until_signal(settings, run)


async def _warn_if_unstored(client: Client) -> NoReturn:
    """Say, each time that it begins, that the log does not store what the client has sent."""
    import asyncio

    from .screen import complain  # here, as `serve` starts without rich

    was_stored = True
    while True:
        await asyncio.sleep(1)
        if was_stored and not client.stores:
            complain(f"the NATS server has not stored the request; {LIKELY} Still waiting")
        was_stored = client.stores


def run_until_signal(settings: Settings, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run `work`, which connects with these settings, and return its result.

    SIGTERM and SIGHUP cancel it and exit the program with code 143. A `NoWorkerError` gets advice.
    """
    import asyncio  # imported here, since `--help` needs no asyncio

    async def run() -> _T:
        # A signal cancels the task, so that an answer ends, and changed terminal settings are restored.
        if task := asyncio.current_task():
            for ends in _ending():
                asyncio.get_running_loop().add_signal_handler(ends, task.cancel)
        return await work()

    try:
        return asyncio.run(run())
    except NoServerError as error:
        raise NoWorkerError(f"{error}; {instead(settings)}") from None
    except NoWorkerError as error:
        helps = f"start a worker with: {command_line(settings, 'serve')}"
        if settings.nats is None and (held := holder(settings.data_dir)) is not None:
            helps = (
                f"the worker here (pid {held.pid}) loads its model, is busy or stuck, or has another --prefix"
            )
            helps += ": see its log"
        raise NoWorkerError(f"{error}; {helps}") from None
    except asyncio.CancelledError:
        _end_terminated()
    except OSError as error:
        if error.errno != errno.EIO:  # EIO: output to a closed terminal, before SIGHUP came
            raise
        _end_terminated()


@contextlib.contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP end the block like Ctrl-C, so that what it has started is stopped.

    At a Ctrl-C an event loop cancels its main task; another exception would leave the loop with a traceback.
    """
    ends, came = _ending(), False

    def interrupt(*_: object) -> None:
        nonlocal came
        came = True
        for one in ends:
            signal.signal(one, signal.SIG_IGN)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as for a shell's background job
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)

    for one in ends:
        signal.signal(one, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if came:
            sys.exit(_TERMINATED)
        raise


def _ending() -> list[signal.Signals]:
    """Return SIGTERM and SIGHUP, without those that are ignored; outside the main thread nothing."""
    if threading.current_thread() is not threading.main_thread():  # only there signals can be handled
        return []
    found = (signal.SIGTERM, signal.SIGHUP)
    return [one for one in found if signal.getsignal(one) != signal.SIG_IGN]  # nohup ignores SIGHUP


def with_client(command: Callable[..., Coroutine[Any, Any, int | None]]) -> Callable[..., None]:
    """Add the options of the connection, and call the command with a connected client as its first argument.

    `tenant_option`, if the command has it, names the client's tenant. The command's return value is the exit
    code.
    """

    @with_settings(*CLIENT_SETTINGS)
    @functools.wraps(command)
    def called(given: GivenSettings, tenant: str = DEFAULT_TENANT, **options: Any) -> None:
        if code := talk(given.load(), tenant, lambda client: command(client, **options)):
            sys.exit(code)

    return called


def _end_terminated() -> NoReturn:
    """Exit with the code of SIGTERM; the terminal may be closed."""
    from .screen import drop_unwritable  # here, as `serve` starts without rich

    drop_unwritable()
    sys.exit(_TERMINATED)


@contextlib.asynccontextmanager
async def named(client: Client, name: str, cache: Mapping[str, Any] | None = None) -> AsyncIterator[Session]:
    """Yield the session `name`; if the block raises `unknown_session`, raise an error with similar names.

    With `cache`, its first request starts the session under this cache policy.
    """
    try:
        yield client.session(name, cache=cache)
    except RequestFailedError as error:
        if error.code != "unknown_session":
            raise
        raise await no_session(client, name) from None


async def no_session(client: Client, name: str) -> TurnkeepError:
    """Return the error for a name that no open session has; it suggests similar names."""
    with contextlib.suppress(TurnkeepError):  # the user may not be permitted to read the log
        there = {one.name: one.is_closed for one in await client.sessions()}
        if there.get(name):
            return TurnkeepError(
                f"session {name} was closed or removed; turnkeep chat --session {name} starts it anew"
            )
        is_open = [one for one, is_closed in there.items() if not is_closed and one != name]
        if near := difflib.get_close_matches(name, is_open):
            return TurnkeepError(f"there is no session {name}; did you mean {' or '.join(near)}?")
    tenant = "" if client.tenant == DEFAULT_TENANT else f" of the tenant {client.tenant}"
    return TurnkeepError(f"there is no session {name}{tenant}; see turnkeep sessions")


def _own_prefixes() -> list[str]:
    """List the prefixes of the models in this folder's `turnkeep.toml`; empty without tables of models."""
    with contextlib.suppress(SettingsError):
        return [one.prefix for one in load_models({}, os.environ).values()]
    return []


def command_line(settings: Settings, command: str, names: Sequence[str] = CLIENT_SETTINGS) -> str:
    """Return the shell command that runs `command` with the settings of these names, without credentials."""
    standard, words = type(settings)(), [command]
    # A supervisor derives its models' prefixes itself; with --prefix, `serve` would serve a single model.
    is_named = command == "serve" and settings.prefix in _own_prefixes()
    for name in names:
        if name == "prefix" and is_named:
            continue
        value = getattr(settings, name)
        if name not in _OF_A_USER and value != getattr(standard, name):
            words += [f"--{name.replace('_', '-')}", shown(value) if name == "nats" else str(value)]
    return f"{program()} {shlex.join(words)}"
