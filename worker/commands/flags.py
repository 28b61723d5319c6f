"""Options that several commands have: settings under the names they have everywhere, and those of answers."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worker import settings as settings_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker.settings import Settings

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
tenant_option = click.option(
    "--tenant",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Tenant that the session belongs to.",
)


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


def with_sampling(max_tokens: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of its answers, as `sampling`, and `system`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def sampled(*args: Any, **options: Any) -> Any:
            sampling = {name: options.pop(name) for name in ("max_tokens", "temperature", "top_p", "seed")}
            return command(*args, sampling={**sampling, "stop": options.pop("stop")}, **options)

        for option in reversed(
            (
                click.option("--system", metavar="TEXT", help="Who the model is to be, or how to answer."),
                click.option(
                    "--max-tokens",
                    metavar="N",
                    type=int,
                    default=max_tokens,
                    show_default=True,
                    help="Most tokens of one answer.",
                ),
                click.option(
                    "--temperature",
                    type=float,
                    default=0.0,
                    show_default=True,
                    help="0 always takes the likeliest token.",
                ),
                click.option(
                    "--top-p",
                    type=float,
                    default=1.0,
                    show_default=True,
                    help="Draw from the likeliest tokens that have this probability together.",
                ),
                click.option(
                    "--seed", metavar="N", type=int, help="Draw alike each time. [default: another each time]"
                ),
                click.option(
                    "--stop", metavar="TEXT", multiple=True, help="End before this text; may be repeated."
                ),
            )
        ):
            sampled = option(sampled)
        return sampled

    return decorate


def read(config: Path | None, flags: dict[str, Any]) -> Settings:
    """Collect the settings of a command that was called with these options. Raises `SettingsError`."""
    return settings_module.load(flags, os.environ, config)
