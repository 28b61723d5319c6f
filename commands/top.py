"""The command `top`: all workers of a prefix on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from turnkeep_client.subjects import DEFAULT_TENANT

from .flags import with_settings
from .nats_connection import CLIENT_SETTINGS, talk

if TYPE_CHECKING:
    from .flags import GivenSettings


@click.command()
@with_settings(*CLIENT_SETTINGS)
def top(given: GivenSettings) -> None:
    """Watch load, speed and memory of all workers, on the terminal."""
    from ops.top import run

    settings = given.load()
    talk(settings, DEFAULT_TENANT, lambda client: run(client, f"turnkeep top  --prefix {settings.prefix}"))
