"""Options that several commands share: the settings, and the sampling options."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from turnkeep_client.errors import TurnkeepError
from worker.process import setting_sources
from worker.process.setting_kinds import parse_duration
from worker.process.settings import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from worker.process.settings import Settings


class _Formatter(click.HelpFormatter):
    """Formats `--help`; lists the options of the NATS connection last, in a section of their own."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Write options, or commands, in two columns."""
        rows = list(rows)
        nats = [row for row in rows if row[0].startswith("--nats")]
        if len(nats) < _MIN_SECTION:
            super().write_dl(rows, col_max, col_spacing)
            return
        super().write_dl([row for row in rows if row not in nats], col_max, col_spacing)
        self.dedent()
        with self.section("Connection to NATS"):
            super().write_dl(nats, col_max, col_spacing)
        self.indent()


class HelpContext(click.Context):
    """The context of a command whose `--help` is written by `_Formatter`."""

    formatter_class = _Formatter


#: The fewest options of the NATS connection that get a section of their own.
_MIN_SECTION: Final = 3

force_option = click.option("--force", is_flag=True, help="Overwrite the file if it is there already.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
tenant_option = click.option(
    "--tenant",
    metavar="NAME",
    default="default",
    show_default=True,
    help="Tenant that the session belongs to.",
)
#: For commands that read the log of many tenants; they connect as the default tenant.
tenants_option = click.option(
    "--tenant", "tenants", metavar="NAME", default="*", help="Only of this tenant. [default: all]"
)


def tag_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--tag`, passed as the tuple `tags`."""
    return click.option("--tag", "tags", metavar="TAG", multiple=True, help=help_text)


reasoning_option = click.option(
    "--reasoning",
    type=click.Choice(["show", "hide"]),
    help="Whether to print the model's reasoning. [default: on a terminal, dimmed]",
)


tool_option = click.option(
    "--tool",
    "tools",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A tool that the model may call, as JSON in OpenAI's shape or its function alone, or a list of"
    " these; may be given several times.",
)


def check_target(target: Path, *, force: bool) -> None:
    """Raise `TurnkeepError` if the file's folder does not exist, or the file exists, without `force`."""
    if not target.parent.is_dir():
        raise TurnkeepError(f"there is no folder {target.parent} for the file; make it first")
    if target.exists() and not force:
        raise TurnkeepError(
            f"there is a file {target} already; choose another name, or overwrite it with --force"
        )


def moment(_: click.Context, __: click.Parameter, value: str | None) -> datetime | None:
    """Parse a time: an age such as `2h`, or a date with an optional time, local if it has no time zone."""
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(value).astimezone()
    try:
        return datetime.now(UTC) - timedelta(seconds=parse_duration(value))
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is no time; it must be like 2h, 3d or 2026-11-20T08:00"
        ) from None


class Number(click.FloatRange):
    """An option's number within a range; unlike click's own type it rejects NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse an option's value."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


_ADDRESS: Final = re.compile(r"((?P<host>\[[^\[\]]+\]|[^\[\]:]+):)?(?P<port>[0-9]{1,5})")


def _address(_: click.Context, __: click.Parameter, value: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(value)
    if found is None or int(found["port"]) > 65535:
        raise click.BadParameter(
            f"{value!r} is no address; it must be like 0.0.0.0:8080 or [::1]:8080, or a port of 127.0.0.1"
        )
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


def listen_option(port: int, reached: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--listen` to a command that serves over HTTP; its value is passed as host and port.

    The default is `port` of the loopback address; `reached` is help text on other addresses.
    """
    return click.option(
        "--listen",
        metavar="HOST:PORT",
        default=f"127.0.0.1:{port}",
        show_default=True,
        callback=_address,
        help=f"Address to serve on, or a port of 127.0.0.1. {reached}",
    )


def keep_option(
    least_s: float, default_s: float, kept: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--keep-s`, at least `least_s`, to a command that watches workers; `kept` is its help text."""
    kind = Number(least_s, 7 * 86400)
    return click.option(
        "--keep-s", metavar="SECONDS", type=kind, default=default_s, show_default=True, help=kept
    )


def with_result_timeout(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--timeout`, passed as `timeout_s`."""
    return click.option(
        "--timeout",
        "timeout_s",
        metavar="SECONDS",
        type=Number(1),
        default=600.0,
        show_default=True,
        help=help_text,
    )


@dataclass(frozen=True)
class Given:
    """The settings file and the options given to a command; the flag `of` names one of several models."""

    config: Path | None
    flags: Mapping[str, Any]

    def but(self, **flags: Any) -> Given:
        """Return a copy of these options, in which those named in `flags` have the values given there."""
        return replace(self, flags={**self.flags, **flags})

    def load(self) -> Settings:
        """Load the settings, of the model `of` if there are several. Raises `SettingsError`."""
        own = {name: value for name, value in self.flags.items() if name != "of"}
        return setting_sources.load(own, os.environ, self.config, of=self.flags.get("of"))

    def load_models(self) -> dict[str, Settings]:
        """Load the settings of each of several models, or of the one that the flag `of` names.

        Empty if the settings name one model only. Raises `SettingsError`.
        """
        if (of := self.flags.get("of")) is not None:
            return {of: self.load()}
        own = {name: value for name, value in self.flags.items() if name != "of"}
        return setting_sources.load_models(own, os.environ, self.config)

    def options(self, names: Collection[str] | None = None) -> list[str]:
        """Return the given options as words of a command line: those in `names`, or all."""
        given = {"config": self.config}
        given |= {name: self.flags[name] for name in self.flags if names is None or name in names}
        return [
            word
            for name, value in given.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]


def with_settings(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--config` and an option for each named setting (without names: for all), passed as `given`.

    If `prefix` is among the names, also add `--of`, a flag of `given`.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        added = [one for one in describe() if not names or one.name in names]
        flags = [one.name for one in added] + ["of"] * ("prefix" in names)

        @functools.wraps(command)
        def called(*args: Any, config: Path | None, **options: Any) -> Any:
            given = Given(config, {name: options.pop(name) for name in flags})
            return command(*args, given=given, **options)

        for setting in reversed(added):
            help_text = f"{setting.purpose[0].upper()}{setting.purpose[1:]}. "
            help_text += f"[{setting.variable}; default: {setting.default}]"
            metavar = f"[{setting.shape}]" if "|" in setting.shape else setting.shape
            called = click.option(setting.flag, setting.name, metavar=metavar, help=help_text)(called)
        if "prefix" in names:
            help_text = "Which of turnkeep.toml's [models], instead of --prefix. [default: the first]"
            called = click.option("--of", metavar="NAME", help=help_text)(called)
        return click.option(
            "--config", type=click.Path(path_type=Path), help="Settings file. [default: ./turnkeep.toml]"
        )(called)

    return decorate


#: The same ranges as in the protocol's messages; a test compares both.
_TOKENS: Final = click.IntRange(0, 2**31 - 1)
_PENALTY: Final = Number(-2, 2)
_SAMPLING: tuple[tuple[str, str, click.ParamType[Any], str], ...] = (
    ("--max-tokens", "N", _TOKENS, "Maximum tokens of one answer. [default: what fits the context]"),
    ("--temperature", "T", Number(0, 100), "0 always takes the most likely token. [default: the model's]"),
    (
        "--top-p",
        "P",
        Number(0, 1),
        "Only the most likely tokens with this total probability. [default: the model's]",
    ),
    ("--top-k", "N", _TOKENS, "Only the N most likely tokens; 0 is all. [default: the model's]"),
    (
        "--min-p",
        "P",
        Number(0, 1),
        "Only tokens at least P times as likely as the likeliest. [default: the model's]",
    ),
    (
        "--repetition-penalty",
        "X",
        Number(0, 100, min_open=True),
        "Above 1: repeat fewer tokens. [default: the model's]",
    ),
    ("--presence-penalty", "X", _PENALTY, "Above 0: repeat fewer of the answer's tokens."),
    ("--frequency-penalty", "X", _PENALTY, "The same, times how often a token occurs."),
    ("--min-tokens", "N", _TOKENS, "No end of the answer before N tokens."),
    ("--seed", "N", click.IntRange(0, 2**63 - 1), "Seed of the sampling. [default: a new one]"),
)


def _biases(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> dict[int, float] | None:
    """Parse `ID:BIAS` pairs; None if there are none."""
    found: dict[int, float] = {}
    for pair in given:
        token, _, bias = pair.partition(":")
        try:
            number, value = int(token), float(bias)
        except ValueError:
            number, value = -1, 0.0
        if not (0 <= number < 2**31 and -100 <= value <= 100):
            raise click.BadParameter(
                f"{pair!r} must be a token id, a colon and a number from -100 to 100: 42:-100"
            )
        found[number] = value
    return found or None


def with_sampling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling options, passed as `sampling` (None: not given), and `--system`."""
    names = [flag.removeprefix("--").replace("-", "_") for flag, *_ in _SAMPLING]

    @functools.wraps(command)
    def sampled(*args: Any, **options: Any) -> Any:
        sampling = {name: options.pop(name) for name in (*names, "stop", "logit_bias", "ignore_eos")}
        return command(*args, sampling=sampling, **options)

    sampled = click.option(
        "--logit-bias",
        metavar="ID:BIAS",
        multiple=True,
        callback=_biases,
        help="Add to the logit of a token id, -100 to 100; may be repeated.",
    )(sampled)
    sampled = click.option(
        "--ignore-eos", is_flag=True, default=None, help="Go on behind the model's end of the answer."
    )(sampled)
    sampled = click.option(
        "--stop", metavar="TEXT", multiple=True, help="End before this text; may be repeated."
    )(sampled)
    for flag, metavar, kind, purpose in reversed(_SAMPLING):
        sampled = click.option(flag, metavar=metavar, type=kind, help=purpose)(sampled)
    return click.option("--system", metavar="TEXT", help="System message, sent first.")(sampled)


class SpanType(click.ParamType[tuple[int, int]]):
    """A range of positions, written START-END; END is not included."""

    name = "span"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Parse an option's value."""
        start, _, end = str(value).partition("-")
        if not (start.isdecimal() and end.isdecimal()):
            self.fail(f"{value!r} is not START-END, such as 0-200", param, ctx)
        return int(start), int(end)
