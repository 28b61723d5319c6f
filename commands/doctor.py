"""The command `doctor`: prints whether a worker could run here; the module `checks` has the checks."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, NoReturn

import click

from worker.observe.logs import logs_on_stderr
from worker.process.cache_parts import cache_codec, remote_tier
from worker.process.contradictions import check_together

from .flags import as_json, with_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker.process.settings import Settings

    from .flags import GivenSettings
    from .ports import Beside


@click.command()
@as_json
@with_settings()
def doctor(given: GivenSettings, as_json: bool) -> None:
    """Find out why no worker can run here, and the remedy; info asks one."""
    examine(given.load(), given.load_models(), None, as_json=as_json)


@logs_on_stderr()
def examine(
    settings: Settings, models: Mapping[str, Settings], beside: Beside | None, *, as_json: bool
) -> NoReturn:
    """Run `checks`, print their results, and exit: with code 1 if a check failed.

    Raises `TurnkeepError` for settings that contradict each other, and for a key or a remote tier that cannot
    be used.
    """
    from .checks import checks, exit_code, show

    for one in models.values() or (settings,):
        check_together(one)
        remote_tier(one, cache_codec(one), must_answer=True)
    found = checks(settings, models, beside)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in found]))
    else:
        show(found)
    sys.exit(exit_code(found))
