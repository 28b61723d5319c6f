"""The command `gateway`: serves OpenAI's and Anthropic's APIs over HTTP, as a client of the worker."""

from __future__ import annotations

import ipaddress
import logging
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click

from turnkeep_client.errors import NoServerError
from turnkeep_client.subjects import DEFAULT_TENANT
from worker.process.installed import http_libraries
from worker.process.settings import default_worker

from .flags import listen_option, with_settings
from .gateway_note import noted
from .nats_connection import CLIENT_SETTINGS, GATEWAY_SETTINGS, connected, instead, run_until_signal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.keys import Keys
    from turnkeep_client.client import Client
    from worker.process.settings import Settings

    from .flags import GivenSettings

#: How long a server that stops waits for running answers. Their clients can send the request again later.
#: One beside a worker stops with it: no answer goes on.
_DRAIN_S: Final = 10
_DRAIN_BESIDE_S: Final = 1


@click.command()
@listen_option(8080, "Whoever reaches it may use it, unless --keys asks for a key.")
@click.option(
    "--keys",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="API keys: lines of a key, its tenant and perhaps limits. [default: no key is needed]",
)
@click.option(
    "--cors",
    metavar="ORIGIN",
    multiple=True,
    callback=lambda _context, _option, given: [_origin(one) for one in given],
    help="A site whose pages may ask, as https://chat.example; several times for several."
    " [default: pages of this machine only]",
)
@click.option(
    "--explain",
    is_flag=True,
    help="Say in a header, and in the log, which conversation was found, and where the request differs.",
)
@click.option("--until-eof", is_flag=True, hidden=True, help="End when standard input does.")
@with_settings(*CLIENT_SETTINGS, *GATEWAY_SETTINGS)
def gateway(
    given: GivenSettings,
    listen: tuple[str, int],
    keys: Path | None,
    cors: list[str],
    explain: bool,
    until_eof: bool,
) -> None:
    """Serve OpenAI's and Anthropic's APIs over HTTP, also to a team.

    `turnkeep serve --gateway` runs both. Ctrl-C stops it.

    Conversations are found again by their content, also after a restart, and only what is new is prefilled.
    If turnkeep.toml has several models, a request chooses by its model.
    While no NATS server runs, requests get status 503, and are served once one does.
    Needs the extra gateway; if it is missing, a message says how to install it.
    """
    from gateway.keys import Keys

    settings, models = given.load(), given.load_models()
    if explain:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("gateway").setLevel(logging.INFO)
    known = Keys.read(keys) if keys else None
    asked = {"cors": cors, "explain": explain}
    run_until_signal(settings, lambda: _serve(settings, models, known, listen, until_eof=until_eof, **asked))


async def _serve(
    settings: Settings,
    models: Mapping[str, Settings],
    keys: Keys | None,
    listen: tuple[str, int],
    *,
    until_eof: bool,
    **asked: Any,
) -> None:
    """Serve until a signal; `asked` are options of `Gateway`. With `until_eof` also until input ends."""
    with http_libraries("gateway"):
        from gateway.app import Gateway
        from gateway.keys import Keys
        from ops.http_server import end_at_eof, listening, serve, server, url_of

    async def connect(tenant: str, model: str) -> Client:
        return await connected(models.get(model, settings), tenant, waits=False)

    try:  # so that bad credentials end the command
        await (await connected(settings, DEFAULT_TENANT, waits=False)).close()
    except NoServerError as error:
        click.echo(f"{error}; {instead(settings)}; until then requests get status 503", err=True)
    listener = listening(*listen)
    url = url_of(listener)
    click.echo(greeting(url, has_keys=keys is not None), err=True)
    gateway = Gateway(
        connect,
        keys or Keys(),
        models=[*models],
        idle_s=settings.gateway_ttl_s or math.inf,
        image_hosts=settings.gateway_image_hosts.split(","),
        name=f"{default_worker()[:50]}-{listener.getsockname()[1]}",
        **asked,
    )
    running = server(gateway.app, _DRAIN_BESIDE_S if until_eof else _DRAIN_S)
    if until_eof:
        end_at_eof(running)
    async with gateway.open(lambda: running.should_exit):
        with noted(settings.data_dir, url):
            await serve(running, listener, gateway.publish())


def _origin(given: str) -> str:
    """Normalise a web origin to the form that browsers send. Raises `BadParameter`."""
    origin = given.rstrip("/").lower()
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@]+", origin):
        raise click.BadParameter(f"{given!r} is no origin; one is like https://chat.example")
    return origin


def greeting(url: str, *, has_keys: bool) -> str:
    """Return the line that gives the gateway's URL, and warns if other machines may use it without a key."""
    is_open = not (has_keys or ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback)
    warning = "; whoever reaches this port may use it: --keys asks for a key" if is_open else ""
    return f"the gateway is at {url}/v1{warning}"
