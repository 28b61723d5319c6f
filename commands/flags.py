"""Options that several commands share: the settings, and how answers are made."""

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
from turnkeep_client.messages import OPTIONS
from worker.process import setting_sources
from worker.process.setting_kinds import POLICY, parse_duration
from worker.process.settings import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from turnkeep_client.sampling import Sampling, SamplingOption
    from worker.process.settings import Settings


#: In the `meta` of click's context: help lists all options.
ALL_OPTIONS: Final = "turnkeep.all_options"
#: The settings and sampling options that `--help` lists; each other one is `RareOption`.
_DAILY: Final = frozenset(
    {
        *("model", "device_memory", "max_disk", "data_dir"),
        *("max_tokens", "temperature", "seed"),
    }
)


class RareOption(click.Option):
    """An option that only `--help-all` lists."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's line in the help; None without `--help-all`."""
        return super().get_help_record(ctx) if ctx.meta.get(ALL_OPTIONS) else None


def add_help_all(command: click.Command) -> None:
    """Add `--help-all` to a command that has rare options."""

    def show(ctx: click.Context, _: click.Parameter, is_given: bool) -> None:
        if is_given:
            ctx.meta[ALL_OPTIONS] = True
            click.echo(ctx.get_help())
            ctx.exit()

    if any(isinstance(one, RareOption) for one in command.params):
        command.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=show,
                help="List all options: also of the connection, as --nats.",
            )
        )


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


def _not_empty(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value == "":  # of a shell's variable that is not set
        raise click.BadParameter("the session's name is empty")
    return value


def session_option(help_text: str, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--session`, passed as `name`; None if left out, unless `more` says otherwise. Never empty."""
    return click.option("--session", "name", metavar="NAME", callback=_not_empty, help=help_text, **more)


def tag_option(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--tag`, passed as the tuple `tags`."""
    return click.option("--tag", "tags", metavar="TAG", multiple=True, help=help_text)


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
    """Raise `TurnkeepError` if a command must not write to `target`.

    Its folder must exist, and itself not, or be a file that `force` allows to overwrite.
    """
    if not target.parent.is_dir():
        raise TurnkeepError(f"there is no folder {target.parent} for the file; make it first")
    if target.exists() and not target.is_file():
        raise TurnkeepError(f"{target} is not a file; choose another name")
    if target.exists() and not force:
        raise TurnkeepError(
            f"there is a file {target} already; choose another name, or overwrite it with --force"
        )


def moment(_: click.Context, __: click.Parameter, value: str | None) -> datetime | None:
    """Parse a time: an age such as `2h`, or a date with an optional time, local if it has no time zone.

    A callback of click: returns None if the option was not given, raises `BadParameter`.
    """
    if value is None:
        return None
    with contextlib.suppress(ValueError, OverflowError):
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
        """Parse an option's value. Raises `BadParameter` if it is not a number of the range."""
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
    """Add `--listen` to a command that serves over HTTP, passed as `listen`, a pair of host and port.

    The default is `port` of 127.0.0.1; `reached` is help text on what an address that others reach means.
    """
    return click.option(
        "--listen",
        metavar="HOST:PORT",
        default=f"127.0.0.1:{port}",
        show_default=True,
        callback=_address,
        help=f"Address to serve on, or a port of 127.0.0.1. {reached}",
    )


def port_option(
    what: str, port: int, help_text: str, *, least: int = 0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--WHAT [PORT]`, passed as `WHAT_port`: None if left out, `port` if the flag has no value."""
    return click.option(
        f"--{what}",
        f"{what}_port",
        metavar="[PORT]",
        type=click.IntRange(least, 65535),
        is_flag=False,
        flag_value=port,
        help=f"{help_text} [default port: {port}]",
    )


def keep_option(
    least_s: float, default_s: float, kept: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--keep-s SECONDS`, passed as `keep_s`, to a command that watches workers; `kept` is help text.

    At least `least_s`, at most a week, `default_s` by default.
    """
    kind = Number(least_s, 7 * 86400)
    return click.option(
        "--keep-s", metavar="SECONDS", type=kind, default=default_s, show_default=True, help=kept
    )


def with_result_timeout(help_text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--timeout SECONDS`, at least 1 and 600 by default, passed as `timeout_s`."""
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
class GivenSettings:
    """The settings file and the options given to a command; the flag `of` names one of several models."""

    config: Path | None
    flags: Mapping[str, Any]

    def but(self, **flags: Any) -> GivenSettings:
        """Return a copy of these options, in which those named in `flags` have the values given there."""
        return replace(self, flags={**self.flags, **flags})

    def as_found(self) -> GivenSettings:
        """Return a copy that loads the same settings file as this one does now, and fails if it is gone."""
        path = Path.cwd() / setting_sources.CONFIG_NAME
        return replace(self, config=path) if self.config is None and path.exists() else self

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
            given = GivenSettings(config, {name: options.pop(name) for name in flags})
            return command(*args, given=given, **options)

        connects = "prefix" in names
        for setting in reversed(added):
            is_of_connection = setting.name.startswith("nats") or setting.name in {"data_dir", "prefix"}
            is_rare = is_of_connection if connects else not names and setting.name not in _DAILY
            help_text = f"{setting.purpose[0].upper()}{setting.purpose[1:]}. "
            help_text += f"[{setting.variable}; default: {setting.default}]"
            metavar = f"[{setting.shape}]" if "|" in setting.shape else setting.shape
            cls = RareOption if is_rare else click.Option
            called = click.option(setting.flag, setting.name, cls=cls, metavar=metavar, help=help_text)(
                called
            )
        if connects:
            help_text = "Which of turnkeep.toml's [models], instead of --prefix. [default: the first]"
            called = click.option("--of", cls=RareOption, metavar="NAME", help=help_text)(called)
        return click.option(
            "--config",
            cls=RareOption if connects else click.Option,
            type=click.Path(path_type=Path),
            help="Settings file. [default: ./turnkeep.toml]",
        )(called)

    return decorate


#: What counts if an option is left out, unless that is what the model's authors recommend.
_DEFAULTS: Final = {"max_tokens": "what fits the context", "seed": "a new one"}


def _sampling_option(one: SamplingOption) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option of a command for a sampling option of the protocol."""
    limits: Any = {"min": one.meta.ge, "max": one.meta.le}
    if one.meta.gt is not None:
        limits |= {"min": one.meta.gt, "min_open": True}
    default = "the model's" if one.is_recommended else _DEFAULTS.get(one.name)
    text = f"{one.meta.description}{f' [default: {default}]' if default else ''}"
    text += " May be repeated." if one.kind in (dict, tuple) else ""
    kinds: dict[type, dict[str, Any]] = {
        int: {"metavar": "N", "type": click.IntRange(**limits)},
        float: {"metavar": "X", "type": Number(**limits)},
        bool: {"is_flag": True, "default": None},
        dict: {"metavar": "ID:BIAS", "multiple": True, "callback": _biases},
        tuple: {"metavar": "TEXT", "multiple": True},
    }
    cls = click.Option if one.name in _DAILY else RareOption
    return click.option(f"--{one.name.replace('_', '-')}", cls=cls, help=text, **kinds[one.kind])


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


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How answers are made: the options that `ask`, `chat` and `run` have in common."""

    #: None is an option that was not given.
    sampling: Sampling
    #: A system message to send first.
    system: str | None
    #: The policy of a session that the first request starts; None is the worker's default.
    cache: Mapping[str, Any] | None
    #: `show`, `hide` or None: shown on a terminal only.
    reasoning: str | None
    #: These go with the first question.
    images: tuple[Path, ...] = ()


def _cache_policy(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> dict[str, Any] | None:
    """Parse a cache policy, written as the setting `cache_policy`, to the fields of an open."""
    if value is None:
        return None
    if value == "full":
        return {"policy": value}
    try:
        policy = POLICY.parse(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} must be full, {POLICY.wants}") from None
    if policy.recall:
        return {"policy": "paged", "resident": policy.most_tokens}
    return {"policy": "sink_window", "sink": policy.sink, "window": policy.window}


_ANSWER_OPTIONS: Final[tuple[Callable[..., Any], ...]] = (
    click.option("--system", metavar="TEXT", help="System message, sent first."),
    click.option(
        "--image",
        "images",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        multiple=True,
        help="An image (PNG, JPEG, WebP, GIF) for the first question; may be given several times.",
    ),
    *map(_sampling_option, OPTIONS.values()),
    click.option(
        "--reasoning",
        cls=RareOption,
        type=click.Choice(["show", "hide"]),
        help="Whether to print the model's reasoning. [default: on a terminal, dimmed]",
    ),
    click.option(
        "--cache-policy",
        "cache",
        cls=RareOption,
        metavar=f"full|{POLICY.shape}",
        callback=_cache_policy,
        help="Tokens of a new session with KV: all, the first and last, or all on SSD and RESIDENT on the"
        " device. [default: the worker's]",
    ),
    click.option(
        "--snapshots",
        cls=RareOption,
        type=click.Choice(["none"]),
        help="Never write the KV of a new session to disk.",
    ),
)


def with_answer_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `AnswerOptions`, passed as `options`."""

    @functools.wraps(command)
    def called(
        *args: Any,
        system: str | None,
        cache: dict[str, Any] | None,
        snapshots: str | None,
        reasoning: str | None,
        images: tuple[Path, ...],
        **given: Any,
    ) -> Any:
        sampling: Any = {name: given.pop(name) for name in OPTIONS}
        if snapshots is not None:
            cache = {**(cache or {}), "snapshots": snapshots}
        options = AnswerOptions(
            sampling=sampling, system=system, cache=cache, reasoning=reasoning, images=images
        )
        return command(*args, options=options, **given)

    for option in reversed(_ANSWER_OPTIONS):
        called = option(called)
    return called
