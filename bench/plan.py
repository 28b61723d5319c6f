"""Turns a plan, an annotated dataclass, into the options of a bench's command and the settings in its report.

A setting is defined only as a field of the plan, together with its value in the short run (`smoke`).

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Plan:
        "What `--help` says."
        rounds: Annotated[int, Option("How often.", smoke=1)] = 5

gives `--rounds N`: 5 by default, and 1 under `--smoke` unless the command line has `--rounds`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import click

from turnkeep_client.subjects import DEFAULT_PREFIX

from .corpus import CORPORA

COUNT: Final = click.IntRange(min=1)
POSITIVE: Final = click.FloatRange(min=0, min_open=True)
_UNSET: Final = object()

Setting = str | int | float | bool | tuple[int | float | str, ...] | None


@dataclass(frozen=True, slots=True)
class Option:
    """The command-line option of a plan's field. `smoke` is its value under `--smoke`, and may be None.

    `type` is a click type, where the annotation is not enough: numbers are above 0, a tuple of numbers is
    joined by commas, a tuple of strings is a repeatable option, a bool a flag.
    """

    help: str
    smoke: Any = _UNSET
    type: Any = None
    metavar: str | None = None


#: Fields that several benches share.
Corpus = Annotated[
    str,
    Option("What is said.", smoke="built-in", type=click.Choice(tuple(CORPORA))),
]
TextFile = Annotated[
    Path | None,
    Option(
        "A file of text, in the place of a corpus.",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
    ),
]
Seed = Annotated[int, Option("Of every order that is drawn.", type=click.INT)]
TurnTimeout = Annotated[float, Option("A turn that takes longer has failed.", metavar="SECONDS")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The options of every bench: the worker to measure, and the folder for the report.

    The worker is the one at `nats`, or one that the bench starts; `program` is the module to start, with its
    arguments before `serve`.
    """

    out: Annotated[Path | None, Option("Folder for the JSON report and its page.")] = None
    checkpoint: Annotated[
        float, Option("How often the report is written while the bench runs.", metavar="SECONDS")
    ] = 600.0
    model: Annotated[
        str | None, Option("Model of the bench's own worker. [default: packaged]", metavar="NAME")
    ] = None
    nats: Annotated[
        str | None, Option("Measure the worker there. [default: one made for it]", metavar="URL")
    ] = None
    prefix: Annotated[str, Option("First part of that worker's subjects.")] = DEFAULT_PREFIX
    tenant: Annotated[str, Option("Tenant of the bench's sessions.")] = "bench"
    program: tuple[str, ...] = ("worker",)
    login: dict[str, Any] = field(default_factory=dict, repr=False)  # what nats-py takes besides `nats`


#: The options for a worker that runs already.
REMOTE: Final = ("nats", "prefix", "tenant")


class Numbers(click.ParamType[Any]):
    """Numbers above 0, joined by commas; returns them sorted, without duplicates."""

    name = "N,..."

    def __init__(self, kind: type[int | float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the numbers."""
        if isinstance(value, tuple):
            return value
        try:
            found = {self._kind(part) for part in str(value).split(",")}
        except ValueError:
            found = set()
        if not found or not all(0 < number < math.inf for number in found):
            what = "whole numbers" if self._kind is int else "numbers"
            self.fail(f"{value!r} is not valid: it must be {what} above 0, joined by commas", param, ctx)
        return tuple(sorted(found))


def options(plan: type[Any]) -> list[click.Option]:
    """Return the options of a plan."""
    found = []
    for name, hint, option, default in _fields(plan):
        kind = _bare(hint)
        flag = kind is bool
        several = get_origin(kind) is tuple and get_args(kind)[0] is str
        joined = isinstance(default, tuple) and not several
        shown: Any = ",".join(map(str, default)) if joined else default
        found.append(
            click.Option(
                [f"--{name.replace('_', '-')}", name],
                type=None if flag else option.type or _click_type(kind),
                is_flag=flag,
                required=default is MISSING,
                multiple=several,
                default=None if default is MISSING else shown,
                show_default=not flag and default is not None,
                metavar=option.metavar,
                help=option.help,
            )
        )
    return found


def make(plan: type[Any], given: Mapping[str, Any], *, named: set[str], smoke: bool) -> Any:
    """Make a plan from options' values and defaults. `named` are the options given on the command line."""
    values = dict(given)
    if smoke:
        for name, _, option, _ in _fields(plan):
            if name not in named and option.smoke is not _UNSET:
                values[name] = option.smoke
    return plan(**values)


def settings(plan: Any) -> dict[str, Setting]:
    """Return a plan's settings for a report."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _fields(plan: type[Any]) -> list[tuple[str, Any, Option, Any]]:
    hints = get_type_hints(plan, include_extras=True)
    found = []
    for one in fields(plan):
        if get_origin(hints[one.name]) is Annotated:
            kind, option = get_args(hints[one.name])[:2]
            found.append((one.name, kind, option, one.default))
    return found


def _bare(kind: Any) -> Any:
    """Return `int` for `int | None`."""
    some = [one for one in get_args(kind) if one is not type(None)]
    return some[0] if some and get_origin(kind) is not tuple else kind


def _click_type(kind: Any) -> Any:
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return click.STRING if inner is str else Numbers(inner)
    return {int: COUNT, float: POSITIVE, Path: click.Path(path_type=Path), str: click.STRING}[kind]
