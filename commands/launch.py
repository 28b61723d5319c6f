"""The command `launch`: starts a coding agent that talks to the gateway."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import click

from turnkeep_client.errors import TurnkeepError
from worker.process.datadir import starting_pid

from .agents import AGENTS, INSTALLS, GatewayAccess, own_prompt_tokens, start_of
from .flags import with_settings
from .gateway_note import noted_gateway
from .nats_connection import command_line
from .screen import complain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .flags import GivenSettings

#: How long to wait for the gateway's list of models.
_PATIENCE_S: Final = 10.0
_POLL_S: Final = 0.25
_NO_KEY: Final = "none"
_PORT: Final = 8080


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--gateway",
    "url",
    metavar="URL",
    help=f"Where the gateway is. [default: the data directory's, else http://127.0.0.1:{_PORT}]",
)
@click.option(
    "--key",
    metavar="KEY",
    envvar="TURNKEEP_GATEWAY_KEY",
    default=_NO_KEY,
    help="A key of the gateway, if it wants one. [TURNKEEP_GATEWAY_KEY]",
)
@click.option("--of", metavar="NAME", help="Which of the gateway's models to use. [default: its first one]")
@click.option(
    "--print",
    "only_print",
    is_flag=True,
    help="Print the command instead, for a shell. Goes before the agent's name.",
)
@with_settings("data_dir")
@click.argument("agent")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    given: GivenSettings,
    url: str | None,
    key: str,
    of: str | None,
    only_print: bool,
    agent: str,
    arguments: tuple[str, ...],
) -> None:
    """Start a coding agent on the gateway: claude, codex, pi and more.

    AGENT is aider, claude, cn, codex, opencode, pi, or another program. The gateway must run: `turnkeep serve
    --gateway` starts one.

    The agent's environment and arguments name the gateway and its model; the user's configuration is not
    changed. All arguments after the agent's name are the agent's, as in `turnkeep launch pi -p "Say hello"`.
    """
    settings = given.load()
    here = noted_gateway(settings.data_dir)
    url = url or here or f"http://127.0.0.1:{_PORT}"
    try:
        door = _awaited_door(url.rstrip("/").removesuffix("/v1"), key, of, settings.data_dir, here)
    except _NoGatewayError as error:
        starts = command_line(settings, "gateway", ["data_dir"]) + _port_of(url)
        raise TurnkeepError(
            f"{error}; `{starts}` starts one, and --data-dir or --gateway names another"
        ) from None
    start = start_of(Path(agent).name, door)
    found = agent if only_print else _program(agent)
    if door.context_tokens < (needed := own_prompt_tokens(Path(agent).name, arguments)):
        complain(
            f"{agent}'s own prompt takes about {needed:,} tokens, and {door.model} sees only"
            f" {door.context_tokens:,}; {_advice(settings.data_dir, needed)}"
        )
    folder = settings.data_dir / "agents"
    for name, text in start.files.items():
        _write(folder / name, text)
    placed = [argument.replace("{folder}", str(folder)) for argument in start.arguments]
    command = [found, *placed, *arguments[arguments[:1] == ("--",) :]]
    if only_print:
        click.echo(_as_shell(start.environment, command))
        return
    os.execve(found, command, {**os.environ, **start.environment})  # noqa: S606  # the user's own program


def _program(agent: str) -> str:
    found = shutil.which(agent)
    if found is None:
        install = INSTALLS.get(Path(agent).name)
        advice = f"`{install}` installs it" if install else f"known agents are {', '.join(AGENTS)}"
        raise TurnkeepError(f"there is no program {agent!r} on the PATH; {advice}")
    return found


def _advice(data_dir: Path, needed: int) -> str:
    """Suggest models on this machine with a context of `needed` tokens, else known ones that fit on it."""
    from worker.models.catalog import list_models
    from worker.models.known import fits, known, needed_bytes

    here = [one.name for one in list_models(data_dir) if one.context_tokens >= needed and not one.instead]
    if here:
        return f"serve one that is here: --model {' or '.join(here[:3])}"
    known_ = [one for one in known() if fits(needed_bytes(one.weights_gb * 1e9, one.parameters_b * 1e9))]
    names = " or ".join(one.id for one in known_[-2:])
    return f"serve {f'--model {names}' if names else 'another model'}, or shorten it as docs/agents.md says"


def _awaited_door(url: str, key: str, wanted: str | None, data_dir: Path, here: str | None) -> GatewayAccess:
    """Return the result of `_door`; wait while a worker is starting whose gateway, `here`, is at `url`."""
    is_told = False
    while True:
        try:
            return _door(url, key, wanted)
        except (_NoGatewayError, _NoWorkerError) as error:
            if here is not None and url.rpartition(":")[2] != here.rpartition(":")[2]:
                raise TurnkeepError(f"{error}; this worker's is at {here}") from None
            pid = starting_pid(data_dir)
            if here is None or pid is None:
                raise
            if not is_told:
                click.echo(
                    f"waiting for the gateway of the worker that is starting (pid {pid}) ...", err=True
                )
            is_told = True
            time.sleep(_POLL_S)


class _NoGatewayError(TurnkeepError):
    pass


class _NoWorkerError(TurnkeepError):
    pass


def _door(url: str, key: str, wanted: str | None) -> GatewayAccess:
    """Return the gateway at `url` with its model `wanted`, or its first one. Raises `TurnkeepError`."""
    if not url.startswith(("http://", "https://")):
        raise TurnkeepError(f"{url!r} is no URL of a gateway; it is like http://127.0.0.1:{_PORT}")
    if not (key.isascii() and key.isprintable()):
        raise TurnkeepError("the key is not printable ASCII, as a gateway's keys are")
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})  # noqa: S310  # see above
    try:
        is_here = urlsplit(url).hostname in {"127.0.0.1", "localhost", "::1"}  # which no proxy reaches
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if is_here else None))
        with opener.open(request, timeout=_PATIENCE_S) as answer:
            models = {one["id"]: one for one in json.load(answer)["data"]}
        if wanted is not None and wanted not in models:
            raise TurnkeepError(f"the gateway at {url} has no model {wanted!r}; it has {', '.join(models)}")
        model = models[wanted] if wanted else [*models.values()][0]  # noqa: RUF015  # an IndexError if empty
        if "context_window" not in model and model["owned_by"] == "turnkeep":
            raise TurnkeepError(f"no worker of the model {model['id']} answers the gateway at {url}")
        return GatewayAccess(url, key, model["id"], int(model["context_window"]), model["vision"])
    except urllib.error.HTTPError as error:
        kind = _NoWorkerError if error.code == HTTPStatus.SERVICE_UNAVAILABLE else TurnkeepError
        raise kind(f"the gateway at {url} refuses: {_reason(error)}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or reason
        raise _NoGatewayError(f"no gateway answers at {url} ({why})") from None
    except (ValueError, LookupError, TypeError, HTTPException):
        raise TurnkeepError(f"what answers at {url} is no gateway of Turnkeep") from None


def _port_of(url: str) -> str:
    try:
        port = urlsplit(url).port
    except ValueError:  # the port is above 65535
        return ""
    return "" if port in {None, _PORT} else f" --listen {port}"


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{error.code} {error.reason}"


def _write(path: Path, text: str) -> None:
    """Write a file that only the user can read, since it may contain a key."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(text)


def _as_shell(environment: Mapping[str, str], command: Sequence[str]) -> str:
    return shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *command])
