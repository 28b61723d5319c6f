"""The command line. Every error that a user can cause or fix is one line on standard error.

Exit codes: 0 done, 1 the command failed, 2 wrong usage or settings, 130 interrupted, 143 terminated. Commands
that talk to a worker are ordinary clients; only `serve`, `model`, `cache` and `doctor` use this machine.
"""

from __future__ import annotations

import base64
import hmac
import importlib.metadata
import json
import secrets
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import redact, shown
from worker.process.datadir import TOKEN_NAME, noted_nats
from worker.process.installed import as_installed
from worker.process.keys import cache_access
from worker.process.settings import SettingsError
from worker.wire.credentials import own_token, worker_options

from .flags import (
    HelpContext,
    Number,
    SpanType,
    as_json,
    listen_option,
    load_models,
    load_settings,
    options_of,
    reasoning_option,
    tag_option,
    tenant_option,
    tool_option,
    with_sampling,
    with_settings,
)
from .talking import CLIENT_SETTINGS, talk

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from click.shell_completion import CompletionItem

    from turnkeep_client.client import Client
    from turnkeep_client.session import Sampling
    from worker.process.settings import Settings

_INTERRUPTED = 130


#: Commands of other modules, which are imported when the command is run: module, attribute, first sentence.
_ELSEWHERE: Final = {
    "bench": ("commands.bench", "bench", "Measure a worker from outside."),
    "cache": (
        "commands.cache",
        "cache",
        "Snapshots on disk: list, verify, remove, export and import.",
    ),
    "completion": (
        "commands.service",
        "completion",
        "Print the script that completes commands and options in a shell.",
    ),
    "close": ("commands.close", "close", "End sessions."),
    "dead": (
        "commands.sessions",
        "dead",
        "Requests that workers gave up: each crashed the worker or failed on every attempt.",
    ),
    "export": (
        "commands.export",
        "export",
        "Write SESSION's log to FILE, which another log can import and `turnkeep replay` can play.",
    ),
    "fork": (
        "commands.fork",
        "fork",
        "Open the session NEW with the tokens of SESSION: all, or those up to a position.",
    ),
    "gateway": (
        "commands.gateway",
        "gateway",
        "Serve OpenAI's and Anthropic's APIs over HTTP, on durable sessions, until Ctrl-C.",
    ),
    "import": (
        "commands.export",
        "import_",
        "Put the session in FILE into the log, beside a worker or without one.",
    ),
    "launch": (
        "commands.launch",
        "launch",
        (
            "Start an agent that talks to the gateway: aider, claude, cn, codex, opencode, pi, or another"
            " program."
        ),
    ),
    "log": (
        "commands.log",
        "log",
        "The log as a whole: verify it.",
    ),
    "model": (
        "commands.model",
        "model",
        "Models: list, describe, download, convert and remove them.",
    ),
    "replay": (
        "commands.replay",
        "replay",
        "Play recorded sessions again, and compare every token with the record.",
    ),
    "rewind": (
        "commands.close",
        "rewind",
        (
            "Remove the end of SESSION: its last question with the answer, more of them, or all from a"
            " position on."
        ),
    ),
    "rm": ("commands.close", "rm", "Remove sessions, open or closed: the same as close --forget."),
    "service": (
        "commands.service",
        "service",
        "A worker that this machine starts by itself: install, status, logs, uninstall.",
    ),
    "sessions": (
        "commands.sessions",
        "sessions",
        "List the sessions in the log, most recently active first.",
    ),
    "size": (
        "commands.size",
        "size",
        "Estimate memory, disk and SSD writes for a number of sessions.",
    ),
    "run": (
        "commands.run",
        "run",
        "Talk with MODEL, or answer MESSAGE; downloads the model, and starts a worker, if need be.",
    ),
    "show": (
        "commands.sessions",
        "show",
        "Print a session's conversation from the log, with the cost of each request.",
    ),
    "tree": (
        "commands.fork",
        "tree",
        "Show which sessions were forked from which; with SESSION, only the tree that it is in.",
    ),
}

#: Names that commands had in earlier versions.
_FORMER: Final = {"dashboard": "console"}


class _Group(click.Group):
    """Reports each error that a user can fix as one line with an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ELSEWHERE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = _FORMER.get(cmd_name, cmd_name)
        if cmd_name in _ELSEWHERE and cmd_name not in self.commands:
            module, attribute, _ = _ELSEWHERE[cmd_name]
            self.add_command(getattr(import_module(module), attribute))
            _show_whole_sentences(self)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List all commands without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._summary(name)) for name in self.list_commands(ctx)])

    def _summary(self, name: str) -> str:
        return _ELSEWHERE[name][-1] if name in _ELSEWHERE else str(self.commands[name].short_help)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command, as quickly as `format_commands`, or an option."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self._summary(name)) for name in names]
        return found + super(click.Group, self).shell_complete(ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.exceptions.NoSuchCommand as error:  # which suggests only what is imported
            if error.ctx is None or not isinstance(group := error.ctx.command, click.Group):
                raise
            names = group.list_commands(error.ctx)
            raise type(error)(error.command_name, possibilities=names, ctx=error.ctx) from None
        except SettingsError as error:
            _fail(str(error), 2)
        except TurnkeepError as error:
            _fail(str(error), 1)
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(_INTERRUPTED)


def _fail(message: str, code: int) -> None:
    click.echo(f"turnkeep: {as_installed(redact(message))}", err=True)
    sys.exit(code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(importlib.metadata.version("turnkeep"), prog_name="turnkeep")
def main() -> None:
    """Durable LLM sessions over NATS, with KV caches that survive restarts.

    `turnkeep serve` starts a worker; `turnkeep chat`, in another terminal, talks with it.
    """


@main.command()
@click.option("--check", is_flag=True, help="Check what this worker needs, as doctor does, and end.")
@click.option(
    "--gateway",
    "gateway_port",
    metavar="[PORT]",
    type=click.IntRange(0, 65535),
    is_flag=False,
    flag_value=8080,
    help="Run a gateway too, on this machine's loopback address. [default port: 8080]",
)
@click.option(
    "--console",
    "console_port",
    metavar="[PORT]",
    type=click.IntRange(0, 65535),
    is_flag=False,
    flag_value=9423,
    help="Run a console too, a page to chat in, on the loopback address. [default port: 9423]",
)
@click.option("--of", metavar="NAME", hidden=True, help="Serve one of [models], until standard input ends.")
@click.option("--weigh", is_flag=True, hidden=True, help="Print what the model needs, and end.")
@click.option("--until-eof", is_flag=True, hidden=True, help="End when standard input does.")
@click.option("--unloaded", metavar="NAME", hidden=True, help="Do not load the model, which has this name.")
@with_settings()
def serve(
    config: Path | None,
    check: bool,
    gateway_port: int | None,
    console_port: int | None,
    of: str | None,
    weigh: bool,
    until_eof: bool,
    unloaded: str | None,
    **flags: Any,
) -> None:
    """Run a worker, with its own NATS server unless --nats names one. Ctrl-C stops it.

    Log lines go to standard error: as text on a terminal, as JSON in a pipe or a file. `turnkeep serve
    --log-format console 2>&1 | tee log` shows text and keeps it.

    If turnkeep.toml has tables [models.NAME], each of these models gets a worker when it is asked for.
    On SIGHUP a worker reads the settings again and applies max_disk and min_free_disk.
    """
    settings = load_settings(config, flags | {"of": of})
    models = load_models(config, flags) if of is None else {}
    if not (models or of) and (flags["memory"] or flags["unload_after_s"]):
        raise SettingsError(
            "--memory and --unload-after-s are for [models] in turnkeep.toml, which has none; one model alone"
            " has --device-memory, and stays loaded"
        )
    if check:
        worker_options(settings)
        cache_access(settings)
        _examine(settings, models, as_json=False)
    if weigh:
        from .size import weigh as run_weigh

        run_weigh(settings)
        return
    from worker.observe.bare_structlog import import_structlog

    import_structlog()
    from worker.wire.broker import wait_for_port

    from .serve import Manner, keep_place, supervise
    from .serve import serve as run

    for name, port in (("gateway", gateway_port), ("console", console_port)):
        if port:
            wait_for_port(port, f"choose another with --{name} PORT")

    own = flags | {"data_dir": settings.data_dir}  # else a child's would be NATS_URL's server
    own |= {} if models else {"prefix": settings.prefix}
    beside = {
        name: [*options_of(config, own, (*CLIENT_SETTINGS, *more)), "--listen", str(port)]
        for name, port, more in (("gateway", gateway_port, ("placeholders",)), ("console", console_port, ()))
        if port is not None
    }
    if unloaded is not None and "console" in beside:
        beside["console"] += ["--unloaded", unloaded]
    manner = Manner(
        options=options_of(config, flags),
        beside=beside,
        of=of,
        until_eof=until_eof,
        unloaded=unloaded,
    )
    if models:
        supervise(models, manner)
    elif unloaded is not None:
        keep_place(settings, manner)
    else:
        run(settings, lambda: load_settings(config, flags | {"of": of}), manner)


@main.command()
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=".demo",
    show_default=True,
    help="Where its worker keeps its files.",
)
@click.option("--model", metavar="[PATH|ID]", help="Its model. [default: the packaged one]")
@click.option("--cluster", is_flag=True, help="With two workers: the other one continues the answer.")
def demo(data_dir: Path, model: str | None, *, cluster: bool) -> None:
    """Hold a conversation, and kill the worker in the middle of an answer."""
    import asyncio

    from .demo import ClusterDemo, Demo

    asyncio.run((ClusterDemo if cluster else Demo)(data_dir, model).run())


@main.command()
@as_json
@with_settings()
def doctor(config: Path | None, as_json: bool, **flags: Any) -> None:
    """Check this machine: what was found, what is missing, and how to fix it."""
    _examine(load_settings(config, flags), load_models(config, flags), as_json=as_json)


def _examine(settings: Settings, models: Mapping[str, Settings], *, as_json: bool) -> NoReturn:
    from .doctor import checks, exit_code, show

    found = checks(settings, models)
    if as_json:
        click.echo(json.dumps([asdict(check) for check in found]))
    else:
        show(found)
    sys.exit(exit_code(found))


@main.command()
@click.option(
    "--session", "name", metavar="NAME", default="chat", show_default=True, help="Session to continue."
)
@tenant_option
@reasoning_option
@with_sampling
@with_settings(*CLIENT_SETTINGS)
def chat(
    config: Path | None,
    name: str,
    tenant: str,
    reasoning: str | None,
    system: str | None,
    sampling: Sampling,
    **flags: Any,
) -> None:
    """Talk with the model. A later chat with the same session continues the conversation.

    Lines that begin with a slash are commands; /help lists them. If standard input is not a terminal, each of
    its lines is a question.
    """
    from .chat import chat as run

    talk(load_settings(config, flags), tenant, lambda client: run(client, name, system, sampling, reasoning))


@main.command()
@click.argument("question", required=False)
@click.option(
    "--session", "name", metavar="NAME", help="Session to ask in. [default: a new one, removed afterwards]"
)
@tenant_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print nothing until the answer has ended, then its result as one line of JSON: text, token ids,"
    " finish_reason, usage, seconds.",
)
@click.option(
    "--logprobs",
    metavar="N",
    type=click.IntRange(0, 20),
    help="With --json: logprobs, and the N likeliest tokens.",
)
@click.option("--echo", is_flag=True, help="With --json: logprobs of the question's tokens too.")
@tool_option
@reasoning_option
@click.option("--answer-prefix", "prefix_", metavar="TEXT", help="Begin the answer with this text.")
@click.option(
    "-n",
    "count",
    metavar="N",
    type=click.IntRange(1),
    help="Print N answers; the session stays as it is.",
)
@click.option(
    "--schema",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Answer with JSON that this JSON schema describes.",
)
@with_sampling
@with_settings(*CLIENT_SETTINGS)
def ask(
    config: Path | None,
    question: str | None,
    name: str | None,
    tenant: str,
    as_json: bool,
    logprobs: int | None,
    echo: bool,
    tools: tuple[Path, ...],
    reasoning: str | None,
    prefix_: str | None,
    count: int | None,
    schema: Path | None,
    system: str | None,
    sampling: Sampling,
    **flags: Any,
) -> None:
    """Ask one question and print the answer as it arrives.

    Piped input is added to QUESTION, or is the question if there is none: git diff | turnkeep ask "What
    changed?" With - for QUESTION, type the question and end it with Ctrl-D.
    """
    from .ask import ask as run
    from .ask import by_schema, tools_of
    from .ask import question as whole

    text = whole(question)
    if tools:
        sampling |= {"tools": tools_of(tools)}
    if (logprobs is not None or echo) and not as_json:
        raise click.UsageError("--logprobs and --echo are for --json, whose result has them")
    if logprobs is not None:
        sampling |= {"logprobs": True, "top_logprobs": logprobs}
    if echo:
        sampling |= {"echo": True}
    if schema is not None:
        sampling |= {"response_format": by_schema(schema)}

    if prefix_:
        sampling |= {"prefix": prefix_}

    async def answer(client: Client) -> bool:
        return await run(
            client, name, text, system, sampling, as_json=as_json, count=count, reasoning=reasoning
        )

    if not talk(load_settings(config, flags), tenant, answer):
        sys.exit(_INTERRUPTED)


@main.command("open")
@click.argument("session")
@tenant_option
@click.option(
    "--policy",
    type=click.Choice(["full", "sink_window", "paged"]),
    help="Tokens with KV: all, the first and the last ones, or all on SSD and some on the device."
    " [default: the worker's]",
)
@click.option("--sink", metavar="N", type=int, help="First tokens that sink_window keeps. [default: 4]")
@click.option("--window", metavar="N", type=int, help="Last tokens that sink_window keeps. [default: 1024]")
@click.option(
    "--resident", metavar="N", type=int, help="Tokens that paged has on the device. [default: 4096]"
)
@click.option(
    "--pin",
    metavar="START-END",
    type=SpanType(),
    multiple=True,
    help="Tokens that paged always has there; may be given several times.",
)
@tag_option("A name for it, which `turnkeep sessions --tag` finds; may be given several times.")
@with_settings(*CLIENT_SETTINGS)
def open_session(
    config: Path | None,
    session: str,
    tenant: str,
    policy: str | None,
    sink: int | None,
    window: int | None,
    resident: int | None,
    pin: tuple[tuple[int, int], ...],
    tags: tuple[str, ...],
    **flags: Any,
) -> None:
    """Start SESSION under a cache policy, which it keeps until it is closed.

    Not needed for a session under the worker's default: its first request starts it. Under sink_window a
    session may go on without end, in memory of a fixed size. Under paged all of it stays within reach, up to
    the model's context: prompts read all of it from SSD, answers what matters to them.
    """
    from .control import open_session as run

    asked = {"policy": policy, "sink": sink, "window": window, "resident": resident, "pin": pin or None}
    cache = {name: value for name, value in asked.items() if value is not None}
    talk(load_settings(config, flags), tenant, lambda client: run(client, session, cache, tags))


@main.command()
@click.argument("question", required=False)
@click.option("--session", "name", metavar="NAME", help="As the next question of this session.")
@click.option("--raw", is_flag=True, help="Count the text alone, without the chat template.")
@tool_option
@tenant_option
@with_settings(*CLIENT_SETTINGS)
def count(
    config: Path | None,
    question: str | None,
    name: str | None,
    tenant: str,
    raw: bool,
    tools: tuple[Path, ...],
    **flags: Any,
) -> None:
    """Count the tokens that a question would add to a session, without asking it.

    Piped input is added to QUESTION, or is the question if there is none.
    """
    from .ask import question as whole
    from .ask import tools_of
    from .control import count as run

    if raw and tools:
        raise click.UsageError("--tool is for a conversation, not for --raw text")
    text, given = whole(question), tools_of(tools) or None
    talk(load_settings(config, flags), tenant, lambda client: run(client, name, text, raw=raw, tools=given))


@main.command()
@click.argument("session", required=False)
@tenant_option
@as_json
@with_settings(*CLIENT_SETTINGS)
def info(config: Path | None, session: str | None, tenant: str, as_json: bool, **flags: Any) -> None:
    """Show a session and its worker; without SESSION, show the worker alone."""
    from .control import info as run

    talk(load_settings(config, flags), tenant, lambda client: run(client, session, as_json=as_json))


@main.command()
@with_settings("data_dir")
def url(config: Path | None, **flags: Any) -> None:
    """Print the URL of the worker's own NATS server for other programs; its token is part of it."""
    settings = load_settings(config, flags)
    token = own_token(settings.data_dir)
    if token is None:
        raise SettingsError(
            f"there is no {settings.data_dir / TOKEN_NAME}; start its worker, or name another --data-dir"
        )
    nats = noted_nats(settings.data_dir) or settings.own_port
    if isinstance(nats, str):
        raise SettingsError(
            f"the worker of {settings.data_dir} has no NATS server of its own; it uses {nats}"
        )
    click.echo(f"nats://{token}@127.0.0.1:{nats}")


@main.command()
@click.argument("session")
@click.argument("request_id", metavar="[ID]", required=False)
@tenant_option
@with_settings(*CLIENT_SETTINGS)
def cancel(config: Path | None, session: str, request_id: str | None, tenant: str, **flags: Any) -> None:
    """Stop request ID of SESSION; the tokens of its answer so far stay in the session.

    Without ID: the request that is running. `turnkeep info SESSION` shows the ids.
    """
    from .control import cancel as run

    talk(load_settings(config, flags), tenant, lambda client: run(client, session, request_id))


@main.command()
@click.argument("session")
@tenant_option
@click.option("--position", type=click.IntRange(1), help="Number of first tokens to pin. [default: all]")
@with_settings(*CLIENT_SETTINGS)
def pin(config: Path | None, session: str, tenant: str, position: int | None, **flags: Any) -> None:
    """Keep the KV of SESSION's tokens on disk, safe from eviction, until they are unpinned.

    A pin belongs to the tenant and outlives the session: it serves every session that begins with these
    tokens.
    """
    from .control import pin as run

    talk(load_settings(config, flags), tenant, lambda client: run(client, session, position))


@main.command()
@click.argument("session")
@tenant_option
@click.option("--position", type=click.IntRange(1), help="Only the pin with N tokens. [default: all]")
@with_settings(*CLIENT_SETTINGS)
def unpin(config: Path | None, session: str, tenant: str, position: int | None, **flags: Any) -> None:
    """Remove the pins of SESSION's tokens; their KV may then be evicted."""
    from .control import unpin as run

    talk(load_settings(config, flags), tenant, lambda client: run(client, session, position))


_OF_METRICS: Final = "Whoever reaches it can read the metrics."
_OF_PAGE: Final = "The page is not encrypted: beyond this machine, put a proxy before it."


def _page_options(
    port: int, least_s: float, keep_s: float, kept: str, reached: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options of a command that serves a page."""
    listen = listen_option(port, reached)
    keep = click.option(
        "--keep-s",
        metavar="SECONDS",
        type=Number(least_s, 7 * 86400),
        default=keep_s,
        show_default=True,
        help=kept,
    )
    return lambda command: listen(keep(command))


@main.command()
@_page_options(9422, 1, 300.0, "Time until a silent worker is forgotten.", _OF_METRICS)
@with_settings(*CLIENT_SETTINGS)
def exporter(config: Path | None, listen: tuple[str, int], keep_s: float, **flags: Any) -> None:
    """Serve the metrics of all workers of a prefix to Prometheus, until Ctrl-C.

    Needs the extra ops; if it is missing, a message says how to install it.
    """
    from ops.exporter import run

    settings = load_settings(config, flags)
    talk(settings, "default", lambda client: run(client, *listen, keep_s=keep_s))


@main.command()
@tenant_option
@with_settings(*CLIENT_SETTINGS)
def top(config: Path | None, tenant: str, **flags: Any) -> None:
    """Watch all workers of a prefix on the terminal, and sessions of a tenant one by one; q ends it."""
    from ops.top import run

    settings = load_settings(config, flags)
    talk(settings, tenant, lambda client: run(client, f"turnkeep top  prefix {settings.prefix}"))


@main.command()
@_page_options(
    9423, 60, 3600.0, "Length of the history, and time until a silent worker is forgotten.", _OF_PAGE
)
@click.option("--read-only", is_flag=True, help="Show everything, and let nothing be done.")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser, too.")
@click.option("--until-eof", is_flag=True, hidden=True, help="End when standard input does.")
@click.option("--unloaded", metavar="NAME", hidden=True, help="The model that the worker has unloaded.")
@tenant_option
@with_settings(*CLIENT_SETTINGS)
def console(
    config: Path | None,
    listen: tuple[str, int],
    keep_s: float,
    read_only: bool,
    opens: bool,
    until_eof: bool,
    unloaded: str | None,
    tenant: str,
    **flags: Any,
) -> None:
    """Serve a web page with all workers of a prefix, a tenant's sessions and a chat, until Ctrl-C.

    The printed address has a token, without which nobody gets in. Needs the extra ops; if it is missing, a
    message says how to install it.
    """
    try:
        from ops.console.serving import run
    except ModuleNotFoundError as missing:
        library = (missing.name or "").partition(".")[0]
        if library not in {"starlette", "uvicorn", "h11"}:
            raise
        raise TurnkeepError(f"{library} is missing; pip install 'turnkeep[ops]' brings it") from None
    from ops.console.app import Place

    from .launch import own_gateway
    from .sampling import asked
    from .shelf import Shelf
    from .talking import command_line, url_of

    settings = load_settings(config, flags)

    def place() -> Place:
        port = own_gateway(settings.data_dir)
        gateway = f"http://127.0.0.1:{port or 8080}"
        launch, url = (command_line(settings, one, ["data_dir"]) for one in ("launch", "url"))
        return Place(shown(url_of(settings)), gateway, port is not None, launch, url)

    options: dict[str, Any] = {"keep_s": keep_s, "prefix": settings.prefix, "read_only": read_only}
    worker = options_of(config, flags, CLIENT_SETTINGS) if until_eof else None
    shelf = Shelf(settings, worker, load_models(config, flags), unloaded)
    options |= {"opens": opens, "until_eof": until_eof, "place": place, "shelf": shelf}
    options["token"] = _console_token(settings, f"console of {tenant}, {'read' if read_only else 'act'}")
    talk(settings, tenant, lambda client: run(client, *listen, sampling=asked, **options))


def _console_token(settings: Settings, of: str) -> str:
    """Return a console's token: with the worker's own server the same at each start, so that pages go on.

    Who can read that server's token may do everything that the console may. Else it is random.
    """
    secret = None if settings.nats else own_token(settings.data_dir)
    if secret is None:
        return secrets.token_urlsafe(32)
    digest = hmac.digest(secret.encode(), of.encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _show_whole_sentences(group: click.Group) -> None:
    """List commands with their whole first sentences; click would cut them at the terminal's width.

    Gives them their `--help` with sections, too.
    """
    for command in group.commands.values():
        command.context_class = HelpContext
        command.short_help = command.get_short_help_str(limit=sys.maxsize)
        if isinstance(command, click.Group):
            _show_whole_sentences(command)


_show_whole_sentences(main)
