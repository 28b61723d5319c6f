"""The command line. Every error that a user can cause or fix is one line on standard error.

Exit codes: 0 done, 1 the command failed, 2 wrong usage or settings, 130 interrupted, 143 terminated. Commands
that talk to a worker are ordinary clients; others, such as `serve`, `model` and `cache`, use local files.
"""

from __future__ import annotations

import importlib.metadata
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import redact
from worker.process.installed import as_installed
from worker.process.launchd import final_code
from worker.process.open_files import raise_limit
from worker.process.settings import SettingsError

from .flags import HelpContext

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_INTERRUPTED: Final = 130

#: Each command's module, which is imported when the command is run, and the command's first sentence.
_COMMANDS: Final = {
    "ask": ("ask", "Ask one question and print the answer as it arrives."),
    "bench": ("bench", "Measure a worker from outside."),
    "cache": ("cache", "Snapshots on disk: list, verify, remove, export and import."),
    "cancel": ("control", "Stop request ID of SESSION; the tokens of its answer so far stay in the session."),
    "chat": ("chat", "Talk with the model."),
    "close": ("close", "End sessions."),
    "completion": ("service", "Print the script that completes commands and options in a shell."),
    "console": (
        "console",
        "Serve a web page with all workers of a prefix, a tenant's sessions and a chat, until Ctrl-C.",
    ),
    "count": ("control", "Count the tokens that a question would add to a session, without asking it."),
    "dead": (
        "sessions",
        "Requests that workers gave up: each crashed the worker or failed on every attempt.",
    ),
    "demo": ("demo", "Hold a conversation, and kill the worker in the middle of an answer."),
    "doctor": ("doctor", "Check this machine: what was found, what is missing, and how to fix it."),
    "drain": (
        "drain",
        "Let WORKER give its sessions to the other workers, and wait until it has nothing to do.",
    ),
    "export": (
        "export",
        "Write SESSION's log to FILE, which another log can import and `turnkeep replay` can play.",
    ),
    "exporter": ("exporter", "Serve the metrics of all workers of a prefix to Prometheus, until Ctrl-C."),
    "fork": ("fork", "Open the session NEW with the tokens of SESSION: all, or those up to a position."),
    "gateway": (
        "gateway",
        "Serve OpenAI's and Anthropic's APIs over HTTP, on durable sessions, until Ctrl-C.",
    ),
    "import": ("export", "Put the session in FILE into the log, beside a worker or without one."),
    "info": ("control", "Show a session and its worker; without SESSION, show the worker alone."),
    "launch": (
        "launch",
        (
            "Start an agent that talks to the gateway: aider, claude, cn, codex, opencode, pi, or another"
            " program."
        ),
    ),
    "log": ("log", "The log as a whole: verify it."),
    "model": ("model", "Models: list, describe, download and remove them."),
    "open": ("control", "Start SESSION under a cache policy, which it keeps until it is closed."),
    "pin": (
        "control",
        "Keep the KV of SESSION's tokens on disk, safe from eviction, until they are unpinned.",
    ),
    "replay": ("replay", "Play recorded sessions again, and compare every token with the record."),
    "rewind": (
        "close",
        (
            "Remove the end of SESSION: its last question with the answer, more of them, or all from a"
            " position on."
        ),
    ),
    "rm": ("close", "Remove sessions, open or closed: the same as close --forget."),
    "run": (
        "run",
        "Talk with MODEL, or answer MESSAGE; downloads the model, and starts a worker, if need be.",
    ),
    "serve": ("serve", "Run a worker, with its own NATS server unless --nats names one."),
    "service": ("service", "A worker that this machine starts by itself: install, status, logs, uninstall."),
    "sessions": ("sessions", "List the sessions in the log, most recently active first."),
    "show": ("sessions", "Print a session's conversation from the log, with the cost of each request."),
    "top": ("top", "Watch all workers and gateways of a prefix on the terminal, until Ctrl-C."),
    "tree": (
        "fork",
        "Show which sessions were forked from which; with SESSION, only the tree that it is in.",
    ),
    "unpin": ("control", "Remove the pins of SESSION's tokens; their KV may then be evicted."),
    "url": (
        "url",
        "Print the URL of the worker's own NATS server for other programs; its token is part of it.",
    ),
}


class _Group(click.Group):
    """The command group `turnkeep`; reports each error that a user can fix as one line with an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS and cmd_name not in self.commands:
            module = vars(import_module(f".{_COMMANDS[cmd_name][0]}", __package__))
            # If a command is named like a keyword or builtin of Python, its function ends with an underscore.
            self.add_command(module.get(f"{cmd_name}_") or module[cmd_name])
            _show_whole_sentences(self)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List all commands without importing their modules."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the name of a command or an option, without importing the modules of commands."""
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        found = [CompletionItem(name, help=_COMMANDS[name][1]) for name in names]
        return found + super(click.Group, self).shell_complete(ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.exceptions.NoSuchCommand as error:  # click suggests only commands that are imported
            if error.ctx is None or not isinstance(group := error.ctx.command, click.Group):
                raise
            names = group.list_commands(error.ctx)
            raise type(error)(error.command_name, possibilities=names, ctx=error.ctx) from None
        except SettingsError as error:
            _fail(str(error), final_code(2))
        except TurnkeepError as error:
            _fail(str(error), 1)
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(_INTERRUPTED)


def _fail(message: str, code: int) -> None:
    from .screen import complain  # here, as `--help` needs none of it

    complain(as_installed(redact(message)))
    sys.exit(code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(importlib.metadata.version("turnkeep"), prog_name="turnkeep")
def main() -> None:
    """Durable LLM sessions over NATS, with KV caches that survive restarts.

    `turnkeep serve` starts a worker; `turnkeep chat`, in another terminal, talks with it.
    """
    raise_limit()


def _show_whole_sentences(group: click.Group) -> None:
    """Make help show the whole first sentence of each command; click would truncate it.

    Also gives each command a `--help` with sections.
    """
    for command in group.commands.values():
        command.context_class = HelpContext
        command.short_help = command.get_short_help_str(limit=sys.maxsize)
        if isinstance(command, click.Group):
            _show_whole_sentences(command)
