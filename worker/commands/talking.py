"""Connects a command to NATS: runs a client with the settings' credentials while the command runs."""

from __future__ import annotations

import contextlib
import difflib
import errno
import math
import os
import shlex
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

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
from worker.process.datadir import TOKEN_NAME, starting_pid
from worker.process.installed import program
from worker.process.settings import SettingsError, load_models
from worker.wire.credentials import CREDENTIAL_SETTINGS, client_options, over_tls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from turnkeep_client.client import Client
    from turnkeep_client.session import Session
    from worker.process.settings import Settings

#: The settings of a command that talks to NATS.
CLIENT_SETTINGS: Final = ("data_dir", "nats", "nats_port", "prefix", *CREDENTIAL_SETTINGS)
_SECRETS: Final = frozenset({"nats_password", "nats_token"})
#: How long a worker may take to answer, which may have to load its model first.
_CONTROL_S: Final = 60.0
#: Between two looks for the server of a worker that starts.
_STARTING_S: Final = 0.2
#: How long a `serve` may take until it locks its data directory.
_IMPORTS_S: Final = 10.0
_TERMINATED: Final = 143

_T = TypeVar("_T")


async def connected(settings: Settings, tenant: str, prefix: str | None = None) -> Client:
    """Connect a client with these settings; `prefix`, if given, replaces the prefix of the settings.

    Waits for the server of a worker that has just been started. Requests wait without limit: who is tired of
    it presses Ctrl-C, or ends the HTTP request.
    """
    import asyncio

    from turnkeep_client.client import connect

    url = url_of(settings)
    is_told = False
    try:
        while True:
            try:
                return await connect(
                    url,
                    tenant=tenant,
                    prefix=prefix or settings.prefix,
                    control_timeout_s=_CONTROL_S,
                    timeout_s=math.inf,
                    **client_options(settings),
                )
            except NoServerError:
                starting = (
                    None
                    if settings.nats
                    else starting_pid(settings.data_dir) or _just_begun(settings.data_dir)
                )
                if starting is None:
                    raise
                if not is_told:
                    click.echo(f"waiting for the worker that is starting (pid {starting}) ...", err=True)
                is_told = True
                await asyncio.sleep(_STARTING_S)
    except NotPermittedError as error:
        if settings.nats is not None or "refuses the credentials" not in str(error):
            raise
        path = settings.data_dir / TOKEN_NAME
        why = f"refuses the token in {path}" if path.exists() else f"wants a token, and there is no {path}"
        raise NotPermittedError(
            f"the NATS server at {url} {why}; name its worker's data directory by --data-dir"
        ) from None


def _just_begun(data_dir: Path) -> int | None:
    """Return a `serve` on a data directory that began a moment ago, and may not have locked it yet."""
    import psutil

    variable = "TURNKEEP_DATA_DIR"
    for process in psutil.process_iter(["cmdline", "create_time"]):
        words = process.info["cmdline"] or []
        is_serve = (
            any(Path(one).name in {"turnkeep", "worker"} for one in words[:4]) and "serve" in words[1:5]
        )
        if not is_serve or time.time() - process.info["create_time"] > _IMPORTS_S:
            continue
        with contextlib.suppress(psutil.Error):
            given = next((after for one, after in pairwise(words) if one == "--data-dir"), None)
            given = given or process.environ().get(variable)
            is_same = Path(given).absolute() == data_dir.absolute() if given else variable not in os.environ
            if is_same:
                return process.pid
    return None


def url_of(settings: Settings) -> str:
    """Return the address of the NATS server."""
    return over_tls(settings, settings.nats or f"nats://127.0.0.1:{settings.nats_port}")


def talk(settings: Settings, tenant: str, say: Callable[[Client], Coroutine[Any, Any, _T]]) -> _T:
    """Connect a client and run `say` with it, until it ends, or SIGTERM or SIGHUP arrives."""
    import asyncio  # here, as `--help` needs none

    async def run() -> _T:
        # A signal cancels the task, so that an answer ends, and changed terminal settings are restored.
        task = asyncio.current_task()
        if task and threading.current_thread() is threading.main_thread():  # others cannot
            for ends in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(ends) != signal.SIG_IGN:  # as nohup has it for SIGHUP
                    asyncio.get_running_loop().add_signal_handler(ends, task.cancel)
        async with await connected(settings, tenant) as client:
            return await say(client)

    try:
        return asyncio.run(run())
    except NoServerError as error:
        helps = f"start a worker with: {command_line(settings, 'serve')}"
        if settings.nats is not None:
            helps = "start it, or name another one with --nats"
        raise NoWorkerError(f"{error}; {helps}") from None
    except NoWorkerError as error:
        raise NoWorkerError(f"{error}; start a worker with: {command_line(settings, 'serve')}") from None
    except asyncio.CancelledError:
        sys.exit(_TERMINATED)
    except OSError as error:
        if error.errno != errno.EIO:  # printed to a closed terminal, before SIGHUP came
            raise
        sys.exit(_TERMINATED)


@contextlib.asynccontextmanager
async def named(client: Client, name: str) -> AsyncIterator[Session]:
    """Enter with the session of this name; if there is none, the error suggests the names nearest to it."""
    try:
        yield client.session(name)
    except RequestFailedError as error:
        if error.code != "unknown_session":
            raise
        raise await no_session(client, name) from None


async def no_session(client: Client, name: str) -> TurnkeepError:
    """Return the error for a name that no open session has."""
    with contextlib.suppress(TurnkeepError):  # of a user who may not read the log
        there = {one.name: one.is_closed for one in await client.sessions()}
        if there.get(name):
            return TurnkeepError(f"session {name} was closed or removed; turnkeep open {name} starts it anew")
        is_open = [one for one, is_closed in there.items() if not is_closed and one != name]
        if near := difflib.get_close_matches(name, is_open):
            return TurnkeepError(f"there is no session {name}; did you mean {' or '.join(near)}?")
    tenant = "" if client.tenant == DEFAULT_TENANT else f" of the tenant {client.tenant}"
    return TurnkeepError(f"there is no session {name}{tenant}; see turnkeep sessions")


def _own_prefixes() -> list[str]:
    """List the prefixes of the models that a `turnkeep.toml` in this folder has, if it has several."""
    with contextlib.suppress(SettingsError):
        return [one.prefix for one in load_models({}, os.environ).values()]
    return []


def command_line(settings: Settings, command: str) -> str:
    """Return the shell command that runs `command` with these settings, without secrets in it."""
    standard, words = type(settings)(), [program(), command]
    # A supervisor knows the prefixes of its models itself, and takes any other for that of a single one.
    is_named = command == "serve" and settings.prefix in _own_prefixes()
    for name in CLIENT_SETTINGS:
        if name == "prefix" and is_named:
            continue
        value = getattr(settings, name)
        if name not in _SECRETS and value != getattr(standard, name):
            words += [f"--{name.replace('_', '-')}", shown(value) if name == "nats" else str(value)]
    return shlex.join(words)
