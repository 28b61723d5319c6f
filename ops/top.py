"""`turnkeep top`: shows the workers of a subject prefix live on a terminal, from their metrics messages.

Owns the terminal and the tasks; `screen` draws, `fleet` keeps the messages.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from rich.console import Console
from rich.live import Live

from turnkeep_client.errors import NotPermittedError, TurnkeepError

from .concurrency import until_one_ends
from .fleet import Fleet, Gateways
from .screen import draw

if TYPE_CHECKING:
    from turnkeep_client.client import Client

#: The time that rates and percentiles cover, and the time for which silent workers are still shown.
WINDOW_S: Final = 60.0
_FORGET_S: Final = 300.0
_DRAW_S: Final = 0.5


async def run(client: Client, title: str) -> None:
    """Show the workers until Ctrl-C. Raises `TurnkeepError` without a terminal or connection."""
    if not sys.stdout.isatty():
        raise TurnkeepError("top needs a terminal; turnkeep info --json prints one metrics message")
    fleet, gateways = Fleet(_FORGET_S, window_s=WINDOW_S), Gateways()

    async def listen() -> NoReturn:
        async for metrics in client.metrics():
            fleet.hear(metrics)
        raise TurnkeepError(client.why_closed)

    async def listen_to_gateways() -> NoReturn:
        try:
            async for metrics in client.gateways():
                gateways.hear(metrics)
        except NotPermittedError:
            await asyncio.Event().wait()  # so gateways are not shown
        raise TurnkeepError(client.why_closed)

    async def show() -> NoReturn:
        console = Console()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:  # ages grow, and the terminal may change its size
                state = "" if client.connected else "  (no connection to NATS)"
                width = console.size.width
                picture = draw(fleet.sightings(), gateways.now(), columns=width, title=title + state)
                live.update(picture, refresh=True)
                await asyncio.sleep(_DRAW_S)

    await until_one_ends(listen(), listen_to_gateways(), show())
