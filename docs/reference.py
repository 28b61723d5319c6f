"""Writes the pages of docs/reference from the code: commands, settings, messages, metrics, errors, models.

`make site` runs it before each build, so the pages are never older than the code, and not in the repository.
"""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from commands import cli
from commands.flags import ALL_OPTIONS
from gateway.app import Gateway
from gateway.http.guide import openapi
from gateway.keys import Keys
from gateway.metrics import Counters
from ops.exposition import families
from turnkeep_client import errors
from turnkeep_client.asyncapi import CONTROL_REPLIES, CONTROLS, REQUESTS, RESULTS
from turnkeep_client.messages import OPTIONS, Chunk, DeadLetter, GatewayMetrics, Generate, Metrics
from turnkeep_client.wire import Backlog
from worker.models.answer_markup import FAMILIES
from worker.models.template_support import INSTEAD
from worker.process.settings import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from turnkeep_client import Client

FOLDER = Path(__file__).with_name("reference")
WIDTH = 100


def commands() -> str:
    """What `--help-all` says of each command."""
    blocks = [f"## {name}\n\n```text\n{text}\n```" for name, text in _helped(cli.main, "turnkeep", None)]
    return "\n\n".join(["# Commands", "What `--help-all` says.", *blocks])


def _helped(command: click.Command, name: str, parent: click.Context | None) -> Iterator[tuple[str, str]]:
    context = command.context_class(
        command, parent, name.rpartition(" ")[2], terminal_width=WIDTH, max_content_width=WIDTH
    )
    context.meta[ALL_OPTIONS] = True
    yield name, command.get_help(context)
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            if (found := command.get_command(context, inner)) is not None and not found.hidden:
                yield from _helped(found, f"{name} {inner}", context)


def settings() -> str:
    """All settings of a worker."""
    rows = (
        (
            f"`{one.name}`",
            f"`{one.default}`",
            f"{one.purpose}: {one.wants}",
        )
        for one in describe()
    )
    text = (
        'A setting has one name in `turnkeep.toml` (`max_disk = "8GiB"`), in the environment'
        " (`TURNKEEP_MAX_DISK=8GiB`) and as an option (`--max-disk 8GiB`). The later of these counts."
    )
    return f"# Settings\n\n{text}\n\n" + _table("setting|default|what it is", rows)


def messages() -> str:
    """The fields of all messages."""
    parts = ["# Messages", "What they mean: [the protocol](../protocol.md)."]
    groups: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("Requests, on `in`", REQUESTS),
        ("Results, on `out`", RESULTS),
        ("Others of a session", (Chunk, DeadLetter)),
        ("Control, on `ctl`", CONTROLS),
        ("Replies on `ctl`", tuple(kind for kind in CONTROL_REPLIES if kind not in (*RESULTS, Metrics))),
        ("On `_metrics`", (Metrics,)),
        ("On `_gateways`", (GatewayMetrics,)),
    )
    kinds = [kind for _, group in groups for kind in group]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="{name}")
    named = {kind.__name__ for kind in kinds}
    shared = {name: one for name, one in schemas.items() if name not in named and "properties" in one}
    for title, group in groups:
        parts += [f"## {title}", *(_fields(kind.__name__, schemas[kind.__name__]) for kind in group)]
    parts += ["## Parts of messages", *(_fields(name, one) for name, one in sorted(shared.items()))]
    forms = "\n".join(f"- {words}" for words in (*INSTEAD.values(), "two messages of a role in a row joined"))
    parts += [
        "## What a template gets instead",
        "Of each kind that the model's template cannot render:",
        forms,
    ]
    return "\n\n".join(parts)


def _fields(name: str, schema: dict[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = (
        (
            f"`{field}`",
            _type(one),
            "yes" if field in needed else "",
            f"`{msgspec.json.encode(one['default']).decode()}`" if one.get("default") is not None else "",
            _description(one),
        )
        for field, one in schema["properties"].items()
    )
    text = inspect.cleandoc(schema.get("description", ""))
    table = _table("field|type|required|default|what it is", rows)
    return f"### {name}\n\n{text}\n\n{table}"


def _description(schema: dict[str, Any]) -> str:
    """Return what a field, or an item of it, is; an empty text if its type does not say it."""
    inner = [*schema.get("anyOf", ()), *filter(None, [schema.get("items")])]
    return str(schema.get("description") or next(filter(None, map(_description, inner)), ""))


def _type(schema: dict[str, Any]) -> str:
    """Say a JSON schema's type in a few words."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "$ref" in schema:
        return f"[{schema['$ref']}](#{schema['$ref'].lower()})"
    if "enum" in schema:
        return ", ".join(f"`{msgspec.json.encode(one).decode()}`" for one in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        items = schema.get("items") or {}
        return f"array of {_type(items)}" if items else "array"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    limits = (("from", "minimum"), ("above", "exclusiveMinimum"), ("to", "maximum"))
    said = [f"{word} {schema[key]}" for word, key in limits if key in schema]
    return " ".join([kind, *said])


def sampling() -> str:
    """The table of sampling options."""
    _, schemas = msgspec.json.schema_components([Generate], ref_template="{name}")
    fields = schemas["Generate"]["properties"]
    apis = {"responses": "`/v1/responses`", "anthropic": "`/v1/messages`", "ollama": "Ollama"}
    rows = (
        (
            f"`{name}`",
            _type(fields[name]),
            "yes" if one.is_recommended else "",
            ", ".join(
                f"{title}: `{one.name_in(api)}`" for api, title in apis.items() if one.name_in(api) != name
            ),
            str(one.meta.description),
        )
        for name, one in OPTIONS.items()
    )
    text = (
        "The fields of a [generate](messages.md#generate) that decide how an answer is sampled. Options of"
        " `ask`, `chat` and `run` (`--top-p`) and fields of [HTTP APIs](../gateway.md) have the same names."
    )
    head = "option|type|a model may recommend it|other names|what it is"
    return f"# Sampling options\n\n{text}\n\n" + _table(head, rows)


def metrics() -> str:
    """All figures of the exporter."""
    rows = (
        (
            f"`{one.name}_total`" if one.type == "counter" else f"`{one.name}`",
            one.type,
            one.documentation.removesuffix("."),
            ", ".join(f"`{name}`" for name in getattr(one, "_labelnames", ())[3:]),
        )
        for one in families([], Backlog(0, 0, 0), connected=True)
    )
    text = (
        "The figures of `turnkeep exporter` ([Running it](../operating.md#metrics-for-prometheus)). Those of"
        " a worker have the labels `worker`, `model` and `device`."
    )
    return f"# Metrics\n\n{text}\n\n" + _table("name|type|what it is|further labels", rows)


def http() -> str:
    """The gateway's paths, the fields of its requests, and its metrics."""

    async def connect(*_: str) -> Client:
        raise NotImplementedError

    document = openapi(Gateway(connect, Keys(), idle_s=0).routes)
    paths, schemas = document["paths"], document["components"]["schemas"]
    found = ((path, method.upper(), one) for path, named in paths.items() for method, one in named.items())
    by_kind: dict[str, list[str]] = {}
    rows = []
    for path, method, one in found:
        rows.append((f"`{method} {path}`", one["summary"]))
        if (body := one.get("requestBody")) is not None:
            kind = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            by_kind.setdefault(kind, []).append(f"`{path}`")
    fields = (
        (", ".join(of), ", ".join(f"`{name}`" for name in schemas[kind]["properties"] if name not in OPTIONS))
        for kind, of in by_kind.items()
    )
    lines = Counters().page(0).decode().splitlines()
    helps = [line.split(" ", 3)[2:] for line in lines if line.startswith("# HELP")]
    types = [line.split(" ")[3] for line in lines if line.startswith("# TYPE")]
    counts = ((f"`{name}`", kind, told) for (name, told), kind in zip(helps, types, strict=True))
    return "\n\n".join(
        [
            "# HTTP",
            "What each path does: [the gateway](../gateway.md).",
            "## Paths",
            _table("path|", rows),
            "## Fields of requests",
            "Beside the [sampling options](sampling.md). Some are refused by name.",
            _table("path|fields", fields),
            "## Metrics of a gateway",
            _table("name|type|what it is", counts),
        ]
    )


def error_codes() -> str:
    """Error codes, the client's exceptions, exit codes."""
    codes = ((f"`{one}`", "yes" if one in errors.RETRYABLE else "no") for one in errors.ERROR_CODES)
    kinds = (
        (f"`{name}`", inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " "))
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.TurnkeepError)
    )
    exits = inspect.cleandoc(cli.__doc__ or "").partition("Exit codes: ")[2].partition(".")[0]
    rows = (one.replace("\n", " ").strip().split(" ", 1) for one in exits.split(","))
    return "\n\n".join(
        [
            "# Errors",
            "## Codes of a `failed`",
            "What helps: [the protocol](../protocol.md#errors).",
            _table("code|may succeed later under a new id", codes),
            "## Exceptions of the Python client",
            _table("exception|when", kinds),
            "## Exit codes of commands",
            _table("code|what it means", rows),
        ]
    )


def architectures() -> str:
    """Write the page `architectures`: what a worker can do with each architecture of models, and their calls.

    The first table is `architectures.csv`, which `tests/device/architectures.py` writes from trials with tiny
    models. The second one has the marks that each family writes before a call and before its arguments.
    """
    rows = csv.reader(FOLDER.with_name("architectures.csv").read_text().splitlines())
    head = "|".join(next(rows))
    text = """
A worker finds this out by trials when it loads a model. These results are from a CPU, with tiny random
models. Architectures that are not listed were not tried.

- **answers**: *one pass* runs all answers and prompts together; *merged* decodes answers together in
  padded caches, and prefills prompts one after the other; *one by one* runs each session alone. Models with
  recurrent layers cannot share a pass, nor can models whose attention computes scores itself
  (`deepseek_v3`, `gemma2`).
- **sink_window**, **paged**: whether sessions may have these
  [cache policies](../protocol.md#cache-policies). If not, an `open` with the policy is refused; if both are
  impossible, the worker's log says so at the start.
- **restored**: whether a session restored in the middle of a block continues with the same bits.
- **16 bits**: the same in bfloat16. MLX multiplies the experts of mixtures (`GatherMM`) only in float32 on
  a CPU, where a worker loads them in float32.
"""
    calls = (
        (f"`{family}`", _code(one.calls[0]), _code(one.form[0].strip() + ("..." if one.form[0] else "")))
        for family, one in FAMILIES.items()
    )
    return "\n".join(
        [
            f"# Architectures of models\n{text}",
            _table(head, ((f"`{one[0]}`", *one[1:]) for one in rows)),
            "\n## How calls are written\n",
            "Which of these a model uses: [models](../models.md#how-calls-and-reasoning-are-written).\n",
            _table("family|before the calls|before a call's arguments", calls),
        ]
    )


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("\n", " ") if text else ""


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    heads = head.split("|")
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads), *body])


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "settings.md": settings,
    "messages.md": messages,
    "sampling.md": sampling,
    "metrics.md": metrics,
    "http.md": http,
    "errors.md": error_codes,
    "architectures.md": architectures,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, write in PAGES.items():
        (FOLDER / page).write_text(write() + "\n")
