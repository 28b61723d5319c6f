"""The output of commands and of `--help`: tables on a terminal and in a pipe, JSON, errors, units."""

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType

import click
import pytest
from click.testing import CliRunner, Result
from command_runs import Terminal, turnkeep, where
from command_runs import command as run

from bench.cli import NAMES
from commands.cli import main
from commands.control import _print_metrics
from commands.printing import table
from tests.parts import make_tiny_model
from worker.metrics_collector import unloaded_metrics
from worker.observe.progress import terminal_progress
from worker.process.formatting import size, span
from worker.process.installed import as_installed, program
from worker.process.setting_kinds import TenantLimits

LONG = "a-model-with-a-name-that-is-longer-than-a-terminal-is-wide-" * 2


@pytest.fixture
def data_dir(tmp_path: Path, tiny_model: Path) -> Path:
    """Return a data directory with one converted model under a long name."""
    shutil.copytree(tiny_model, tmp_path / "data" / "models" / LONG)
    return tmp_path / "data"


def test_a_table_printed_into_a_pipe_has_one_line_per_row_neither_wrapped_nor_truncated(
    data_dir: Path,
) -> None:
    done = turnkeep("model", "list", "--data-dir", data_dir, COLUMNS="40")
    found = [line for line in done.stdout.splitlines() if LONG in line]
    assert len(found) == 1
    assert found[0].endswith(str(data_dir / "models" / LONG)), "neither folded nor cut nor padded"
    assert "…" not in done.stdout


def test_a_table_on_a_terminal_wraps_long_cells_without_losing_text(data_dir: Path) -> None:
    with Terminal("model", "list", "--data-dir", data_dir, columns=60) as terminal:
        assert terminal.end() == 0
        lines = terminal.transcript.splitlines()
    assert max(map(len, lines)) <= 60
    column = "".join(line.split()[0] for line in lines[1:] if not line.startswith(" "))
    assert LONG in column, "folded, not cut"


@pytest.mark.parametrize("command", [("model", "list"), ("doctor",)])
def test_model_list_and_doctor_with_the_option_json_print_the_entries_of_their_tables_as_json(
    data_dir: Path, command: tuple[str, ...]
) -> None:
    done = turnkeep(*command, "--json", "--data-dir", data_dir)
    names = [entry["name"] for entry in json.loads(done.stdout)]
    assert {"list": LONG, "doctor": "data directory"}[command[-1]] in names


async def test_the_command_info_without_a_session_name_prints_the_current_state_of_the_worker(
    local_worker: Callable,
) -> None:
    """The command asks for the metrics: the worker publishes its next metrics message only in an hour."""
    worker = await local_worker(metrics_interval_s=3600.0, tenants=TenantLimits(metrics=5))
    await worker.client.session("s").append(text="hello")
    shown = await run("info", *where(worker))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"^worker +test$", shown.stdout, re.MULTILINE)
    assert re.search(r"^sessions +1 in use, 1 with KV on the device$", shown.stdout, re.MULTILINE)
    assert re.search(r"^  room .* evictable, .* in use$", shown.stdout, re.MULTILINE)
    assert re.search(r"^log +[0-9.]+ [kMG]?i?B of [0-9.]+ [MG]iB$", shown.stdout, re.MULTILINE)
    raw = json.loads((await run("info", "--json", *where(worker))).stdout)
    assert (raw["type"], raw["requests"]["append"]) == ("metrics", {"ok": 1})
    assert not any(raw["by_tenant"].values()), "one tenant is told nothing of another"


async def test_info_shows_0_bytes_left_for_snapshots_if_less_disk_space_is_free_than_min_free_disk(
    local_worker: Callable,
) -> None:
    worker = await local_worker(min_free_disk=2**60)
    shown = await run("info", *where(worker))
    assert re.search(r"^  room +0 B: 0 B free", shown.stdout, re.MULTILINE), shown.stdout


@pytest.mark.parametrize("made", ["nothing", "data directory", "empty folder"])
def test_cache_commands_on_a_missing_or_empty_data_directory_print_that_nothing_is_cached(
    tmp_path: Path, made: str
) -> None:
    data_dir = tmp_path / "fresh"

    def cache(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["cache", *map(str, arguments), "--data-dir", str(data_dir)])

    if made != "nothing":
        data_dir.mkdir()
    if made == "empty folder":
        (data_dir / "snapshots").mkdir()
    done = cache("list")
    assert (done.exit_code, done.stderr) == (0, "")
    says = "nothing is cached yet in" if data_dir.exists() else "nothing is cached in"
    assert done.stdout.startswith(f"{says} {data_dir / 'snapshots'}")
    assert (f"there is no folder {data_dir}" in done.stdout) == (made == "nothing"), "it may be a wrong path"
    for command in (("verify",), ("prune", "--all"), ("export", "--all", tmp_path / "x.tar")):
        done = cache(*command)
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith(f"turnkeep: {says} {data_dir / 'snapshots'}")
    (tmp_path / "several" / "workers" / "a" / "snapshots").mkdir(parents=True)
    done = CliRunner().invoke(main, ["cache", "list", "--data-dir", str(tmp_path / "several")])
    assert f"has a --data-dir: {tmp_path / 'several' / 'workers' / 'a'}\n" in done.stdout
    found = json.loads(cache("list", "--json").stdout)
    assert (found["chains"], found["total_bytes"]) == ([], 0)
    assert data_dir.exists() == (made != "nothing"), "looking makes nothing"


def test_the_progress_of_loading_weights_is_printed_as_lines_into_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.observe.progress._EVERY_S", 0.0)
    lines: list[str] = []
    with terminal_progress(lines.append) as progress:
        for done in (0, 50, 100):
            progress(done * 2**20, 100 * 2**20, "loading weights")
    assert lines == ["loading weights", "loading weights: 50 MiB of 100 MiB"]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (13 * 2**20, "13 MiB"), (1.5 * 2**30, "1.5 GiB"), (20 * 2**30, "20 GiB")],
)
def test_commands_print_sizes_with_a_unit_that_fits_their_magnitude(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (120, "2 min"), (30 * 3600, "30 h"), (3 * 86400, "3 days")],
)
def test_commands_print_durations_with_a_unit_that_fits_their_magnitude(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_doctor_with_json_prints_nothing_but_json_on_standard_output_while_it_tests_a_new_model(
    tmp_path: Path,
) -> None:
    windows = {"model_type": "gemma3_text", "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 12}
    model = make_tiny_model(tmp_path / "windows", **windows, sliding_window_pattern=3)
    both = ("--model", model, "--draft-model", model)
    done = turnkeep("doctor", "--json", *both, "--data-dir", tmp_path / "data")
    assert isinstance(json.loads(done.stdout), dict | list), done.stderr


PAGE = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()


def named(group: click.Group = main, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Return all commands and groups below a group, by their words."""
    found: dict[tuple[str, ...], click.Command] = {}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found[*path, name] = command
        if isinstance(command, click.Group):
            found |= named(command, (*path, name))
    return found


def commands() -> list[tuple[str, ...]]:
    return [words for words, one in named().items() if not isinstance(one, click.Group)]


def groups() -> list[tuple[str, ...]]:
    return [(), *(words for words, one in named().items() if isinstance(one, click.Group))]


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
def test_the_help_of_serve_shows_for_each_option_its_allowed_values_or_their_form(shown: str) -> None:
    assert shown in help_of("serve", flag="--help-all")


def test_only_the_commands_serve_doctor_demo_model_path_and_cache_verify_have_the_option_model() -> None:
    own = [command for command in commands() if command[0] != "bench"]
    having = {command for command in own if "\n  --model " in help_of(*command)}
    assert having == {("serve",), ("doctor",), ("demo",), ("model", "path"), ("cache", "verify")}


def test_the_help_lists_at_most_28_commands_in_groups_one_per_line_and_begins_with_run() -> None:
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
def test_the_help_of_the_most_used_commands_fits_in_40_lines_and_refers_to_no_docs_folder(
    command: str,
) -> None:
    shown = help_of(command)
    assert shown.count("\n") <= 40, shown
    assert "--help-all" in shown
    assert "docs/" not in help_of(command, flag="--help-all"), "an installation has no such folder"


@pytest.mark.parametrize("command", ["ask", "sessions", "export", "serve"])
def test_only_the_option_help_all_lists_the_options_of_the_connection_to_nats(command: str) -> None:
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
    for words, command in named().items():
        if table in called(command.callback, set()):
            assert "--json" in {flag for one in command.params for flag in one.opts}, words


@pytest.mark.parametrize("group", groups(), ids=" ".join)
@pytest.mark.parametrize("columns", [40, 80])
def test_help_does_not_truncate_the_descriptions_of_commands(group: tuple[str, ...], columns: int) -> None:
    assert "..." not in help_of(*group, columns=columns).partition("Commands:")[2]


def test_the_help_lists_every_command_with_its_description_without_importing_the_commands() -> None:
    program = "import sys, commands.cli as cli; cli.main(['--help'], standalone_mode=False);"
    program += "names = {'structlog', 'nats', 'asyncio', 'psutil', 'cache.store', 'bench'};"
    program += "print(names & set(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
    listed = " ".join(done.stdout.split())
    for words, command in named().items():
        assert len(words) > 1 or f"{words[0]} {command.short_help}" in listed


def test_a_printed_command_whose_path_contains_spaces_is_quoted_for_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = tmp_path / "Application Support" / "turnkeep"
    monkeypatch.setattr(sys, "argv", [str(called)])
    assert shlex.split(program()) == [str(called)]
    monkeypatch.setattr(sys, "executable", str(called.with_name("python")))
    assert shlex.split(as_installed("pip install x")) == [str(called.with_name("pip")), "install", "x"]


def test_the_documentation_page_of_benchmarks_lists_every_benchmark() -> None:
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


def test_the_command_info_of_a_model_that_is_not_loaded_prints_that_the_next_request_loads_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _print_metrics(unloaded_metrics(worker="vm-small", version="1", model="small", others=()))
    assert capsys.readouterr().out.splitlines() == [
        "worker  vm-small",
        "model   small, which its next request loads",
    ]
