"""Options that several commands have: settings, each under the name that it has everywhere, and `--json`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worker import settings as settings_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.settings import Settings

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")


def with_settings(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of the named settings (none: all), and `--config`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for setting in reversed(settings_module.describe()):
            if not names or setting.name in names:
                help_text = f"{setting.purpose[0].upper()}{setting.purpose[1:]}. "
                help_text += f"[{setting.variable}; default: {setting.default}]"
                metavar = f"[{setting.shape}]" if "|" in setting.shape else setting.shape
                command = click.option(setting.flag, setting.name, metavar=metavar, help=help_text)(command)
        return click.option(
            "--config", type=click.Path(path_type=Path), help="Settings file. [default: ./turnkeep.toml]"
        )(command)

    return decorate


def read(config: Path | None, flags: dict[str, Any]) -> Settings:
    """Collect the settings of a command that was called with these options. Raises `SettingsError`."""
    return settings_module.load(flags, os.environ, config)
