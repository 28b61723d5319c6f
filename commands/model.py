"""`turnkeep model`: lists, describes, downloads and removes models on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from worker.observe.progress import terminal_progress
from worker.process.formatting import size

from .flags import as_json, with_settings
from .printing import table

if TYPE_CHECKING:
    from worker.models.catalog import ModelEntry

    from .flags import GivenSettings


@click.group()
def model() -> None:
    """Models: list, describe, download and remove them."""


@model.command("list")
@as_json
@with_settings("data_dir")
def list_(given: GivenSettings, as_json: bool) -> None:
    """List the models on this machine, which --model takes by these names.

    Folders and GGUF files in the data directory's folder `models`, or links there, are listed too.
    """
    from worker.models.catalog import list_models

    found = list_models(
        given.load().data_dir, lambda place, error: click.echo(f"{place.name} is broken: {error}", err=True)
    )
    if as_json:
        click.echo(json.dumps([_plain(entry) for entry in found]))
        return
    rows = [
        (
            entry.name,
            entry.origin,
            entry.dtype,
            size(entry.size_bytes),
            _context(entry),
            ", ".join(_abilities(entry)),
            "yes" if entry.in_use else "",
            str(entry.path),
        )
        for entry in found
    ]
    heads = ("model", "origin", "weights", "size", "context", "can", "in use", "path")
    table(heads, rows, cut="path", same=("in use",))


@model.command()
@click.argument("name")
@as_json
@with_settings("data_dir")
def show(given: GivenSettings, name: str, as_json: bool) -> None:
    """Describe one model, by its name, a part of its name, or its path; its weights are not read."""
    from worker.models.catalog import count_parameters, named, template_support

    entry = named(name, given.load().data_dir)
    num, changed = count_parameters(entry), template_support(entry).in_words()
    if as_json:
        click.echo(json.dumps(_plain(entry) | {"parameters": num, "messages": changed}))
        return
    window = f"some layers see the last {entry.window_tokens} tokens" if entry.window_tokens else "none"
    policies = ", ".join(entry.policies or ("full; the first start tries the others",))
    if entry.instead:
        policies = f"none: this family cannot be used as a GGUF file; see {entry.instead}"
    rows = [
        ("origin", entry.origin),
        ("architecture", entry.architecture),
        ("parameters", f"{num / 1e9:.3g} billion" if num >= 1e9 else f"{num / 1e6:.3g} million"),
        ("weights", f"{entry.dtype}, {size(entry.size_bytes)}"),
        ("context", f"{_context(entry)} tokens"),
        ("tools", "in its template" if entry.tools else "described in the system message"),
        ("messages", "; ".join(changed) or "as they are"),
        ("reasoning", "apart from the text" if entry.reasoning else "none"),
        ("windows", window),
        ("cache policies", policies),
        ("in use", "yes" if entry.in_use else "no"),
        ("path", str(entry.path)),
        *(("converted", str(path)) for path in entry.conversions),
    ]
    table(("model", entry.name), rows)


@model.command()
@click.argument("name", metavar="ID")
@with_settings("data_dir", "dtype")
def pull(given: GivenSettings, name: str) -> None:
    """Download a model from the hub, or what is new in it: org/name, or org/name:Q4_K_M for a GGUF file.

    A stopped download resumes where it was. Every file's checksum is compared with the hub's. The hub's own
    environment variables apply: HF_ENDPOINT for a mirror, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.
    """
    from worker.models import hub
    from worker.models.model import default_dtype
    from worker.models.model_files import ModelError

    settings = given.load()
    if not hub.is_id(name):
        raise ModelError(f"{name} is no id of the hub; give org/name, or org/name:Q4_K_M for a GGUF file")
    dtype = settings.dtype if settings.dtype != "auto" else default_dtype()
    with terminal_progress(lambda what: click.echo(what, err=True)) as progress:
        path = hub.fetch(name, progress, dtype)
    click.echo(path)


@model.command()
@click.argument("name")
@with_settings("data_dir")
def rm(given: GivenSettings, name: str) -> None:
    """Remove a model from this machine, with what was converted from it; of a link, the link alone."""
    from worker.models.catalog import located, remove

    data_dir = given.load().data_dir
    place = located(name, data_dir)
    click.echo(f"removed {place.name}, which frees {size(remove(place, data_dir))}")


@model.command()
@with_settings("data_dir", "model", "dtype")
def path(given: GivenSettings) -> None:
    """Print the MLX folder that a worker with these settings loads; convert or download it first."""
    from worker.models.model import default_dtype, resolve

    settings = given.load()
    dtype = settings.dtype if settings.dtype != "auto" else default_dtype()
    with terminal_progress(lambda what: click.echo(what, err=True)) as progress:
        folder = resolve(settings.model, settings.data_dir, dtype=dtype, progress=progress)
    click.echo(folder)


def _plain(entry: ModelEntry) -> dict[str, Any]:
    """Return a model's entry as values that JSON can represent."""
    paths = {"path": str(entry.path), "conversions": [str(path) for path in entry.conversions]}
    return asdict(entry) | paths


def _context(entry: ModelEntry) -> str:
    return str(entry.context_tokens) if entry.is_bounded else "unbounded"


def _abilities(entry: ModelEntry) -> list[str]:
    if entry.instead:
        return [f"nothing as a GGUF file; see {entry.instead}"]
    found = [name for name in ("tools", "reasoning") if getattr(entry, name)]
    found += [f"window {entry.window_tokens}"] if entry.window_tokens else []
    return found + [policy for policy in entry.policies or () if policy != "full"]
