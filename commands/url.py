"""The command `url`: prints the URL of the NATS server of a data directory's worker, for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from worker.process.datadir import TOKEN_NAME, noted_nats
from worker.process.settings import SettingsError
from worker.wire.credentials import own_token

from .flags import with_settings

if TYPE_CHECKING:
    from .flags import Given


@click.command()
@with_settings("data_dir")
def url(given: Given) -> None:
    """Print the URL of the worker's own NATS server for other programs; its token is part of it."""
    settings = given.load()
    token = own_token(settings.data_dir)
    if token is None:
        raise SettingsError(
            f"there is no {settings.data_dir / TOKEN_NAME}; start its worker, or name another --data-dir"
        )
    nats = noted_nats(settings.data_dir) or settings.own_port
    if isinstance(nats, str):
        raise SettingsError(
            f"the worker of {settings.data_dir} has no NATS server of its own; it uses {nats}"
        )
    click.echo(f"nats://{token}@127.0.0.1:{nats}")
