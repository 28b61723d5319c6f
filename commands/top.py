"""The command `top`: all workers of a prefix on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .flags import tenant_option, with_settings
from .talking import CLIENT_SETTINGS, talk

if TYPE_CHECKING:
    from .flags import Given


@click.command()
@tenant_option
@with_settings(*CLIENT_SETTINGS)
def top(given: Given, tenant: str) -> None:
    """Watch all workers of a prefix live on the terminal; q ends it."""
    from ops.top import run

    settings = given.load()
    talk(settings, tenant, lambda client: run(client, f"turnkeep top  --prefix {settings.prefix}"))
