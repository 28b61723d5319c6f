"""The command `console`: a web page with all workers of a prefix, a tenant's sessions and a chat."""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import shown
from worker.process.installed import http_libraries
from worker.wire.credentials import own_token

from .flags import keep_option, listen_option, tenant_option, with_settings
from .gateway_note import noted_gateway
from .nats_connection import CLIENT_SETTINGS, command_line, connected, talk, url_of
from .sampling import asked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from ops.console.app import Addresses, Console
    from ops.console.model_api import ServedPrefix
    from turnkeep_client.client import Client
    from worker.process.settings import Settings

    from .flags import GivenSettings

#: How long streams may take to end when the server stops; pages reopen them after a restart.
_DRAIN_S: Final = 3


class ConsoleError(TurnkeepError):
    """The console cannot run; the message says how to fix that."""


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
        from ops.console.app import Console
    from ops.console.live import LiveFigures

    from .servable_models import ServableModels

    settings, models = given.load(), given.load_models()
    local_models, addresses = ServableModels(settings, models), partial(_addresses, settings)
    token = token_of(settings, f"console of {tenant}, {'read' if read_only else 'act'}")

    async def run(client: Client) -> None:
        async with _clients(client, settings, models) as clients:
            consoles = [
                Console(
                    *(one, LiveFigures(one, keep_s), asked, addresses, local_models),
                    clients=clients,
                    prefix=served.prefix,
                    read_only=read_only,
                )
                for served, one in clients.items()
            ]
            await _serve(consoles, listen, token, opens=opens, until_eof=until_eof)
            for one in clients.values():
                if one.closed:
                    raise ConsoleError(one.why_closed)

    talk(settings, tenant, run)


@contextlib.asynccontextmanager
async def _clients(
    client: Client, settings: Settings, models: Mapping[str, Settings]
) -> AsyncIterator[dict[ServedPrefix, Client]]:
    """Yield the client of the settings' prefix, and after it those of the other models' prefixes."""
    from ops.console.model_api import ServedPrefix

    own = next((name for name, one in models.items() if one.prefix == settings.prefix), "")
    clients = {ServedPrefix(settings.prefix, own): client}
    async with contextlib.AsyncExitStack() as stack:
        for name, one in models.items():
            if name != own:
                another = await connected(one, client.tenant)
                clients[ServedPrefix(one.prefix, name)] = await stack.enter_async_context(another)
        yield clients


async def _serve(
    consoles: Sequence[Console], listen: tuple[str, int], token: str, *, opens: bool, until_eof: bool
) -> None:
    """Serve until a signal or, with `until_eof`, the end of standard input; `opens` the page in a browser.

    With `until_eof`, standard input is the worker's log, which the first console shows. Raises
    `TurnkeepError`.
    """
    with http_libraries("ops"):
        from ops import http_server
        from ops.console.app import behind_token

    with contextlib.closing(http_server.listening(*listen)) as listener, contextlib.ExitStack() as stack:
        running = http_server.server(behind_token(consoles, token), _DRAIN_S)
        for one in consoles:
            one.end_streams_when(lambda: running.should_exit)
        if until_eof:
            http_server.end_at_eof(running, consoles[0].log.add)
        url = f"{http_server.url_of(listener)}/?token={token}"
        click.echo(f"the console is at {url}", err=True)
        if opens:
            stack.enter_context(_opened(url))
        parts = [part for one in consoles for part in (one.live.listen(), one.live.keep())]
        await http_server.serve(running, listener, *parts)


@contextlib.contextmanager
def _opened(url: str) -> Iterator[None]:
    """Open `url`, which has a token, in the browser; enter the block at once.

    The browser's arguments, which other users can see, name a file that redirects to the URL. The file lasts
    as long as the block. A browser in a terminal may run as long as the block too, so a daemon thread waits
    for its end.
    """
    made, name = tempfile.mkstemp(prefix="turnkeep-", suffix=".html")  # with mode 0600
    page = Path(name)

    def show() -> None:
        if sys.platform == "darwin":  # where `webbrowser` asks by AppleScript, which opens no files
            has_opened = subprocess.run(["open", page], check=False, capture_output=True).returncode == 0
        else:
            has_opened = webbrowser.open(page.as_uri())
        if not has_opened:
            click.echo("turnkeep: no browser was found; open this address in one", err=True)

    try:
        with os.fdopen(made, "w") as file:
            file.write(f'<meta http-equiv="refresh" content="0; url={url}">\n')
        threading.Thread(target=show, daemon=True).start()
        yield
    finally:
        page.unlink(missing_ok=True)


def _addresses(settings: Settings) -> Addresses:
    """Return the addresses and commands with which users connect to this prefix; the page shows them."""
    from ops.console.app import Addresses

    here = noted_gateway(settings.data_dir)
    launch, info = (command_line(settings, one, ["data_dir"]) for one in ("launch", "info"))
    gateway = here or "http://127.0.0.1:8080"
    return Addresses(shown(url_of(settings)), gateway, here is not None, launch, f"{info} --url")


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
