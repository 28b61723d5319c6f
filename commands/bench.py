"""The command `turnkeep bench`.

Adds the credentials for the servers at --nats, since the package `bench` does not read settings.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from bench.cli import bench
from worker.models.blas import preload
from worker.wire.credentials import CREDENTIAL_SETTINGS, nats_options, over_tls

from .flags import with_settings

if TYPE_CHECKING:
    from worker.process.settings import Settings

    from .flags import Given


@click.command()
@with_settings(*CREDENTIAL_SETTINGS)
def _group(given: Given) -> None:
    preload()  # the programs compared with the worker inherit its choice of OpenBLAS kernels
    click.get_current_context().obj = partial(_login, given.load())


def _login(settings: Settings, url: str) -> dict[str, Any]:
    """Return nats-py's options for the servers at `url`: the URL and the credentials."""
    return {"nats": over_tls(settings, url), "login": nats_options(replace(settings, nats=url))}


bench.params, bench.callback = _group.params, _group.callback
