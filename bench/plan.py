"""Turns a plan, an annotated dataclass, into the options of a bench's command and the settings in its report.

A setting is defined only as a field of the plan, together with its value in the short run (`smoke`).

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Plan:
        "What `--help` says."
        rounds: Annotated[int, Option("How often.", smoke=1)] = 5

gives `--rounds N`: 5 by default, and 1 under `--smoke` unless the command line has `--rounds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import click

from .corpus import CORPORA

COUNT: Final = click.IntRange(min=1)
POSITIVE: Final = click.FloatRange(min=0, min_open=True)

Setting = str | int | float | bool | tuple[int | str, ...] | None


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line option of a plan's field."""

    #: The help text.
    help: str
    #: The value under `--smoke`; None if that is the default.
    smoke: Any = None
    #: A click type. Without it the field's annotation decides: numbers must be above 0, a tuple of numbers
    #: is joined by commas, and a tuple of strings is a repeatable option.
    type: Any = None
    metavar: str | None = None


#: A field that several benches share.
_CORPUS: Final = Option("What users say.", smoke="built-in", type=click.Choice(tuple(CORPORA)))
Corpus = Annotated[str, _CORPUS]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonOptions:
    """The options of every bench: the model of its worker, and the folder for the report."""

    out: Annotated[Path | None, Option("Folder for the JSON report and its page.")] = None
    checkpoint: Annotated[float, Option("How often the report is saved.", metavar="SECONDS")] = 600.0
    model: Annotated[str | None, Option("Model of the worker. [default: packaged]", metavar="NAME")] = None


class Numbers(click.ParamType[Any]):
    """A click type: counts joined by commas. The option's value is a sorted tuple without duplicates."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the numbers; values of `--smoke` are tuples already."""
        if isinstance(value, tuple):
            return value
        return tuple(sorted({COUNT.convert(part, param, ctx) for part in value.split(",")}))


_TYPES: Final[dict[Any, Any]] = {
    int: COUNT,
    float: POSITIVE,
    str: click.STRING,
    Path: click.Path(path_type=Path),
    tuple[int, ...]: Numbers(),
    tuple[str, ...]: click.STRING,
}


def options(plan: type[Any]) -> list[click.Option]:
    """Return the click options of a plan's fields."""
    found = []
    for name, kind, option, default in _fields(plan):
        several = kind == tuple[str, ...]
        joined = isinstance(default, tuple) and not several
        found.append(
            click.Option(
                [f"--{name.replace('_', '-')}", name],
                type=option.type or _TYPES[kind],
                multiple=several,
                default=",".join(map(str, default)) if joined else default,
                show_default=default is not None,
                metavar=option.metavar,
                help=option.help,
            )
        )
    return found


def short_form(plan: type[Any]) -> dict[str, Any]:
    """Return the settings that `--smoke` changes, with their values."""
    return {name: option.smoke for name, _, option, _ in _fields(plan) if option.smoke is not None}


def smoke(plan: type[Any]) -> click.Option:
    """Return the flag `--smoke`, which sets the short run's values; values on the command line win."""

    def shorten(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted:
            context.default_map = short_form(plan)

    how: Any = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": shorten}
    return click.Option(["--smoke"], help="A short form only, to see that everything works.", **how)


def _fields(plan: type[Any]) -> Iterator[tuple[str, Any, Option, Any]]:
    """Yield the name, the type without `None`, the option and the default of each annotated field."""
    hints = get_type_hints(plan, include_extras=True)
    for one in fields(plan):
        if get_origin(hints[one.name]) is Annotated:
            kind, option = get_args(hints[one.name])[:2]
            yield one.name, get_args(kind)[0] if type(None) in get_args(kind) else kind, option, one.default
