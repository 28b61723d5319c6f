"""The command `console`: a web page with all workers of a prefix, a tenant's sessions and a chat."""

from __future__ import annotations

import base64
import contextlib
import hmac
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from turnkeep_client.redact import shown
from worker.process.installed import http_libraries
from worker.wire.credentials import own_token

from .flags import keep_option, listen_option, tenant_option, with_settings
from .nats_connection import CLIENT_SETTINGS, command_line, connected, talk, url_of
from .sampling import asked

if TYPE_CHECKING:
    from ops.console.app import Addresses
    from turnkeep_client.client import Client
    from worker.process.settings import Settings

    from .flags import GivenSettings


@click.command()
@listen_option(9423, "The page is not encrypted: beyond this machine, put a proxy before it.")
@keep_option(60, 3600.0, "Length of the history, and time until a silent worker is forgotten.")
@click.option("--read-only", is_flag=True, help="Show everything, and let nothing be done.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser, too.")
@click.option("--until-eof", is_flag=True, hidden=True, help="End when standard input does.")
@tenant_option
@with_settings(*CLIENT_SETTINGS)
def console(
    given: GivenSettings,
    listen: tuple[str, int],
    keep_s: float,
    read_only: bool,
    opens: bool,
    until_eof: bool,
    tenant: str,
) -> None:
    """Serve a web page with a chat, all sessions and all workers.

    The printed address has a token, without which nobody gets in. Needs the extra ops; if it is missing, a
    message says how to install it.
    """
    with http_libraries("ops"):
        from ops.console.serving import run
    from ops.console.model_api import ServedPrefix

    from .servable_models import ServableModels

    settings, models = given.load(), given.load_models()
    options: dict[str, Any] = {"keep_s": keep_s, "read_only": read_only, "opens": opens}
    options |= {"until_eof": until_eof, "addresses": partial(_addresses, settings)}
    options["local_models"] = ServableModels(settings, models)
    options["token"] = token_of(settings, f"console of {tenant}, {'read' if read_only else 'act'}")
    own = next((name for name, one in models.items() if one.prefix == settings.prefix), "")

    async def serve(client: Client) -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = {ServedPrefix(settings.prefix, own): client}
            for name, one in models.items():
                if name != own:
                    another = await stack.enter_async_context(await connected(one, tenant))
                    clients[ServedPrefix(one.prefix, name)] = another
            await run(clients, *listen, sampling=asked, **options)

    talk(settings, tenant, serve)


def _addresses(settings: Settings) -> Addresses:
    """Return the addresses and commands with which users connect to this prefix; the page shows them."""
    from ops.console.app import Addresses

    from .launch import own_gateway

    port = own_gateway(settings.data_dir)
    gateway = f"http://127.0.0.1:{port or 8080}"
    launch, info = (command_line(settings, one, ["data_dir"]) for one in ("launch", "info"))
    return Addresses(shown(url_of(settings)), gateway, port is not None, launch, f"{info} --url")


def token_of(settings: Settings, of: str) -> str:
    """Return a console's access token, derived from the token of the data directory's own NATS server.

    `of` says what the token allows; another text gives another token. The token is the same after a restart,
    so open pages still work; it gives no more rights than the NATS token. If `settings.nats` names another
    server, or there is no NATS token, it is random.
    """
    secret = None if settings.nats else own_token(settings.data_dir)
    if secret is None:
        return secrets.token_urlsafe(32)
    digest = hmac.digest(secret.encode(), of.encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
