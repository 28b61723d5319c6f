"""`--help` shows commands and allowed values; docs/benchmarks.md lists every benchmark."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import CodeType, FunctionType

import click
import pytest
from click.testing import CliRunner

from bench.cli import NAMES
from commands.cli import main
from commands.printing import table
from worker.process.installed import as_installed, program

PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


def groups(group: click.Group = main, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    context = click.Context(group)
    inner = ((name, group.get_command(context, name)) for name in group.list_commands(context))
    found = [groups(command, (*path, name)) for name, command in inner if isinstance(command, click.Group)]
    return [path, *(one for some in found for one in some)]


def help_of(*command: str, columns: int = 80, flag: str = "--help") -> str:
    done = CliRunner().invoke(main, [*command, flag], terminal_width=columns)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize(
    "shown",
    [
        "--dtype [auto|keep|float32|float16|bfloat16]",
        "--kv-bits [full|8|4]",
        "--cache-policy [full|sink_window:SINK,WINDOW|paged:RESIDENT]",
        "--snapshots [on|off|temporary]",
        "--log-format [auto|console|json]",
        "--log-level [auto|debug|info|warning|error]",
        "--device-memory [auto|SIZE]",
        "--max-disk SIZE",
        "--unload-after-s [off|TIME]",
        "--max-batch N",
        "--data-dir PATH",
        "--nats [embedded|URL]",
    ],
)
def test_help_shows_which_values_an_option_takes(shown: str) -> None:
    assert shown in help_of("serve", flag="--help-all")


def commands(group: click.Group = main, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    context = click.Context(group)
    inner = ((name, group.get_command(context, name)) for name in group.list_commands(context))
    found = [
        commands(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
        for name, command in inner
    ]
    return [one for some in found for one in some]


def test_the_option_model_names_the_model_to_load_in_every_command() -> None:
    own = [command for command in commands() if command[0] != "bench"]
    having = {command for command in own if "\n  --model " in help_of(*command)}
    assert having == {("serve",), ("doctor",), ("demo",), ("model", "path"), ("cache", "verify")}


def test_the_help_has_at_most_28_commands_in_groups_each_on_one_line_and_run_first() -> None:
    shown = help_of()
    found = re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", shown, re.MULTILINE)
    groups = {title: re.findall(r"^  ([a-z]+) ", lines, re.MULTILINE) for title, lines in found}
    assert [*groups] == ["Options", "Talk", "Sessions", "Run it", "Look", "Build"]
    listed = [name for names in groups.values() for name in names]
    assert listed == main.list_commands(click.Context(main))
    assert listed[0] == "run"
    assert len(listed) <= 28
    assert shown.count("\n") <= 52, "a command takes one line"


@pytest.mark.parametrize("command", ["run", "chat", "ask", "serve", "sessions", "show"])
def test_the_help_of_a_daily_command_fits_on_a_page_of_40_lines(command: str) -> None:
    shown = help_of(command)
    assert shown.count("\n") <= 40, shown
    assert "--help-all" in shown


@pytest.mark.parametrize("command", ["run", "chat", "ask", "serve", "sessions", "show"])
def test_no_help_names_a_file_that_an_installation_does_not_have(command: str) -> None:
    assert "docs/" not in help_of(command, flag="--help-all")


@pytest.mark.parametrize("command", ["ask", "sessions", "export", "serve"])
def test_only_help_all_lists_the_options_of_the_connection(command: str) -> None:
    options = {"--nats-creds", "--nats-ca", "--prefix"}
    assert not options & {*help_of(command).split()}
    assert options <= {*help_of(command, flag="--help-all").split()}


def called(function: object, found: set[object]) -> set[object]:
    """Add a function of the commands to `found`, and all that it calls by names of its module."""
    function = inspect.unwrap(function) if callable(function) else None
    if not isinstance(function, FunctionType) or function in found or "commands." not in function.__module__:
        return found
    found.add(function)
    codes = [function.__code__]
    for code in codes:
        codes += [one for one in code.co_consts if isinstance(one, CodeType)]
        for name in code.co_names:
            called(function.__globals__.get(name), found)
    return found


def test_each_command_that_prints_a_table_has_the_option_json() -> None:
    for words in commands():
        command: click.Command = main
        for word in words:
            assert isinstance(command, click.Group)
            command = command.get_command(click.Context(command), word) or main
        if table in called(command.callback, set()):
            assert "--json" in {flag for one in command.params for flag in one.opts}, words


@pytest.mark.parametrize("group", groups(), ids=" ".join)
@pytest.mark.parametrize("columns", [40, 80])
def test_help_does_not_truncate_the_descriptions_of_commands(group: tuple[str, ...], columns: int) -> None:
    assert "..." not in help_of(*group, columns=columns).partition("Commands:")[2]


def test_help_lists_every_command_with_its_description_without_importing_them() -> None:
    program = "import sys, commands.cli as cli; cli.main(['--help'], standalone_mode=False);"
    program += "names = {'structlog', 'nats', 'asyncio', 'psutil', 'cache.store', 'bench'};"
    program += "print(names & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
    listed = " ".join(done.stdout.split())
    for (name,) in [path for path in [*commands(), *groups()] if len(path) == 1]:
        command = main.get_command(click.Context(main), name)
        assert command
        assert f"{name} {command.short_help}" in listed


def test_a_program_in_a_folder_with_spaces_is_named_as_a_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = tmp_path / "Application Support" / "turnkeep"
    monkeypatch.setattr(sys, "argv", [str(called)])
    assert shlex.split(program()) == [str(called)]
    monkeypatch.setattr(sys, "executable", str(called.with_name("python")))
    assert shlex.split(as_installed("pip install x")) == [str(called.with_name("pip")), "install", "x"]


def test_the_page_of_benchmarks_lists_every_benchmark() -> None:
    assert re.findall(r"^\| `(\w+)` \| .* \| `turnkeep bench \1", PAGE, re.MULTILINE) == [*NAMES]


@pytest.mark.parametrize(
    ("typed", "meant"), [("sesions", "sessions"), ("gatway", "gateway"), ("bench sesion", "session")]
)
def test_a_misspelt_command_fails_and_suggests_the_right_one(typed: str, meant: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "commands", *typed.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"Did you mean '{meant}'?" in done.stderr
