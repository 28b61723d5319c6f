"""The command `exporter`: serves the metrics of all workers of a prefix to Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from worker.process.installed import http_libraries

from .flags import keep_option, listen_option
from .nats_connection import with_client

if TYPE_CHECKING:
    from turnkeep_client.client import Client


@click.command()
@listen_option(9422, "Whoever reaches it can read the metrics.")
@keep_option(1, 300.0, "Time until a silent worker is forgotten.")
@with_client
async def exporter(client: Client, listen: tuple[str, int], keep_s: float) -> None:
    """Serve the metrics of all workers to Prometheus, until Ctrl-C.

    Needs the extra ops; if it is missing, a message says how to install it.
    """
    with http_libraries("ops"):
        from ops.exporter import run

    await run(client, *listen, keep_s=keep_s)
