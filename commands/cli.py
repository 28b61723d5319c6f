"""The command line. Every error that a user can cause or fix is one line on standard error.

Exit codes: 0 done, 1 the command failed, 2 wrong usage or settings, 130 interrupted, 143 terminated. Commands
that talk to a worker are ordinary clients; others, such as `serve`, `model` and `cache`, use local files.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import redact
from worker.process.formatting import fault
from worker.process.installed import as_installed
from worker.process.launchd import final_code
from worker.process.open_files import raise_limit
from worker.process.settings import SettingsError

from .flags import add_help_all
from .interrupts import importing

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_INTERRUPTED: Final = 130

#: The groups of the help, with each command's module, which is imported when the command is run, and its
#: first sentence, which fits on a line of 80 columns.
_GROUPS: Final = {
    "Talk": {
        "run": ("run", "Talk with a model; downloads it and starts a worker if need be."),
        "chat": ("chat", "Talk with the model of a running worker."),
        "ask": ("ask", "Ask a running worker one question, also about an image."),
        "launch": ("launch", "Start a coding agent on the gateway: claude, codex, pi and more."),
    },
    "Sessions": {
        "sessions": ("sessions", "List the sessions in the log, most recently active first."),
        "show": ("show", "Print one session's conversation, and what each request cost."),
        "fork": ("branches", "Open a session that begins with the tokens of another one."),
        "rewind": ("branches", "Remove a session's last questions and answers."),
        "cancel": ("control", "Stop a request; its answer so far stays in the session."),
        "close": ("branches", "End sessions; with --forget, erase what they said."),
        "export": ("export", "Write a session to a file, with its KV if wanted."),
        "import": ("export", "Put the session in a file into the log."),
        "dead": ("show", "Requests that workers gave up: show, send again or drop one."),
    },
    "Run it": {
        "serve": ("serve", "Run a model for programs; with --gateway over OpenAI's API."),
        "service": ("service", "A worker that starts with this machine: install, status, logs."),
        "model": ("model", "Models: list, describe, download and remove them."),
        "gateway": ("gateway", "Serve OpenAI's and Anthropic's APIs over HTTP, also to a team."),
        "doctor": ("doctor", "Find out why no worker can run here, and the remedy; info asks one."),
        "cache": ("cache", "Snapshots on disk: list, verify, remains, prune, export and import."),
        "drain": ("drain", "Let a worker give its sessions to the other workers."),
    },
    "Look": {
        "info": ("control", "Show load and memory of a worker, or a session and its worker."),
        "top": ("top", "Watch load, speed and memory of all workers, on the terminal."),
        "console": ("console", "Serve a web page with a chat, all sessions and all workers."),
        "exporter": ("exporter", "Serve the metrics of all workers to Prometheus, until Ctrl-C."),
    },
    "Build": {
        "demo": ("demo", "Hold a conversation, and kill the worker in mid-answer."),
        "bench": ("bench", "Measure a worker from outside."),
        "replay": ("replay", "Play recorded sessions again, and compare every token."),
        "completion": ("service", "Print the script that completes commands in a shell."),
    },
}
_COMMANDS: Final = {name: told for group in _GROUPS.values() for name, told in group.items()}


class _Group(click.Group):
    """The command group `turnkeep`; reports each error that a user can fix as one line with an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _COMMANDS and cmd_name not in self.commands:
            with importing():
                module = vars(import_module(f".{_COMMANDS[cmd_name][0]}", __package__))
            # If a command is named like a keyword or builtin of Python, its function ends with an underscore.
            command = module.get(f"{cmd_name}_") or module[cmd_name]
            _prepare_help(command)
            self.add_command(command)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """List all commands by group, without importing their modules."""
        longest = max(map(len, _COMMANDS))
        for title, commands in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(longest), told) for name, (_, told) in commands.items()])

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
        except OSError as error:
            if error.errno == errno.EPIPE:  # click ends silently then
                raise
            _fail(fault(error), 1)
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(_INTERRUPTED)


def _fail(message: str, code: int) -> None:
    from .screen import complain, drop_unwritable  # here, as `--help` needs none of it

    with contextlib.suppress(OSError):
        complain(as_installed(redact(message)))
    drop_unwritable()
    sys.exit(code)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(importlib.metadata.version("turnkeep"), prog_name="turnkeep")
@click.pass_context
def main(context: click.Context) -> None:
    """Durable LLM sessions over NATS, with KV caches that survive restarts.

    `turnkeep run` chats at once. `turnkeep serve` runs a worker, with which `turnkeep chat`, other programs
    and agents talk.
    """
    raise_limit()
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        context.color = False
    try:
        Path.cwd()
    except OSError as error:
        raise TurnkeepError(f"the current folder: {error.strerror}") from None


def _prepare_help(command: click.Command) -> None:
    """Give a command a `--help-all`, and a help with its whole first sentence, which click would truncate."""
    command.short_help = command.get_short_help_str(limit=sys.maxsize)
    add_help_all(command)
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        _prepare_help(inner)
