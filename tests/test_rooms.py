"""Which packages may import which, and which modules may use MLX and nats-py."""

import ast
import re
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
CLIENT = "turnkeep_client"  # the one package in `protocol/`
ROOMS = {
    "protocol": {CLIENT},
    "cache": {"cache"},
    "worker": {"worker", CLIENT, "cache"},
    "commands": {"commands", "worker", CLIENT, "cache", "bench", "ops", "gateway"},
    "bench": {"bench", CLIENT},
    "bench/programs": {"bench", "worker", CLIENT, "cache"},  # which run in processes of their own
    "ops": {"ops", CLIENT, "cache"},
    "gateway": {"gateway", CLIENT},
}
PACKAGES = set().union(*ROOMS.values()) | {"ops"}
#: Two packages that all layers of the worker may import, and the worker packages that they import.
GROUND = {"process": set(), "observe": {"process"}}
#: The layers of worker and cache, from the uppermost to the lowest, and which other layers each may import,
#: also for types. Sessions know of the engine only its port, and of the device only what a turn asks for.
FLOORS = {
    "worker": {
        "sessions": {"wire", "engine", "device", "text", "batch", "models"},
        "cluster": {"wire"},
        "engine": {"device", "batch"},
        "device": {"text", "batch", "models"},
        "text": {"batch", "models"},
        "batch": set(),
        "models": set(),
        "wire": set(),
    },
    "cache": {
        "admin": {"index", "disk", "names"},
        "index": {"disk", "names"},
        "disk": {"kv", "names"},
        "kv": {"names"},
        "names": set(),
    },
}
#: The parts of the cache that the worker may import; commands on a cache directory import `admin`.
FACE = {"names", "kv", "store"}
MLX = {
    "cache/kv",
    *("worker/device", "worker/batch", "worker/models", "worker/models/vision", "worker/weighing.py"),
    *(f"bench/programs/{name}.py" for name in ("device", "in_process")),
}
NATS = {
    *(f"protocol/turnkeep_client/{name}.py" for name in ("connection", "wire", "direct", "nats_client")),
    *("worker/cluster", "worker/wire"),
}

#: The lines of Python in each room and in the folders of `worker` and `tests`, and the words of the pages.
#: These figures only go down: a change that makes a room smaller lowers its figure, and one that needs more
#: says why in a comment at the figure.
#: Raised since they were first taken: `gateway` and its tests, as each dialect declares its paths and its
#: form of errors; `protocol`, as options and metrics say there all that flags, pages and exporter need;
#: `tests/process`, as routing is tried over all states of members; `worker`, its `models device batch` and
#: their tests, as models see images; `protocol` and `worker/wire`, as one module of each client reads
#: logs, whose requests leave the queue; `tests/protocol_model`, which explores all orders of several workers;
#: `cache` and `worker/engine`, as restored KV is audited; `gateway`, `protocol`, `commands`, `ops`,
#: `worker/sessions` and `words`, as conversations have images; `worker/batch device models`, as Qwen3.5 and
#: Gemma 3 see; `worker/text`, as checkpoints have only what is new; `cache`, `commands`, `ops`, `worker/wire`
#: and tests, as a copied directory is known, and what a forget has left is searched for; `protocol` and
#: `worker/sessions`, as a session can stay off the disk; `tests`, as each promise of the pages has a test,
#: and longer names wrap; all rooms by a few lines, as paths after errors were mended, which no test had
#: taken, and docstrings say what comes back in each case; `worker/wire` and `protocol`, as closes find room
#: in a full log; `worker/models`, as templates' powers are bounded; tests, as faults with a second tenant,
#: session or attempt are found (some 120 rows of mutants more), and as their names say what is given and
#: seen; `gateway`, `protocol`, `commands`, `worker` and their tests, as a refusal names the field that the
#: client sent, a stream that is cut ends with an error, and `serve --check` fails where a start would;
#: `gateway`, `protocol`, `commands` and `worker`, as JetStream's reason for storing nothing is said, and a
#: fork's exchanges begin with its parent's.
SIZES = {
    "bench": 3_889,
    "cache": 9_780,
    "commands": 7_048,
    "gateway": 8_004,
    "ops": 5_541,
    "protocol": 7_359,
    "tests": 73_930,
    "tests/bench": 1_058,
    "tests/cache": 6_795,
    "tests/commands": 3_144,
    "tests/device": 9_690,
    "tests/examples": 421,
    "tests/gateway": 6_693,
    "tests/model": 6_190,
    "tests/ops": 6_287,
    "tests/packaging": 859,
    "tests/process": 5_799,
    "tests/protocol": 3_273,
    "tests/protocol_model": 1_615,
    "tests/sessions": 12_334,
    "tests/simulation": 5_137,
    "tests/soak": 1_945,
    "words": 26_995,
    "worker": 35_383,
    "worker/batch": 4_584,
    "worker/cluster": 1_540,
    "worker/device": 3_388,
    "worker/engine": 1_950,
    "worker/models": 6_607,
    "worker/observe": 760,
    "worker/process": 2_079,
    "worker/sessions": 5_163,
    "worker/text": 2_769,
    "worker/wire": 4_027,
}

#: The packages in it translate an HTTP API to the common form in `turn`.
DIALECTS = ROOT / "gateway" / "dialects"
#: Modules of the worker that may use asyncio, to pass values from the device thread to the event loop.
ASYNCIO = {"worker/app.py", "worker/engine"}
BARE_TASKS = {"commands/stream.py"}


def modules() -> list[Path]:
    return [path for room in ROOMS if "/" not in room for path in sorted((ROOT / room).rglob("*.py"))]


def module_parts(path: Path) -> tuple[str, ...]:
    """Return the parts of a file's import name; `protocol` is never one of them."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1:] if parts[0] == "protocol" else parts


@cache
def parsed(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path, *, of_types: bool = False) -> frozenset[str]:
    """Return the absolute names of all modules that a file imports; `of_types`: also for type checking."""
    guards = (node for node in parsed(path) if isinstance(node, ast.If))
    for_types = [guard for guard in guards if ast.unparse(guard.test) == "TYPE_CHECKING"]
    skipped = {node for guard in for_types if not of_types for node in ast.walk(guard)}
    found: set[str] = set()
    for node in parsed(path):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_parts(path)[: -node.level] if node.level else ()
            base = ".".join((*package, *filter(None, [node.module])))
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return frozenset(found)


def tops(names: frozenset[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_each_module_imports_only_the_packages_allowed_to_its_own_package() -> None:
    foreign = {}
    for path in modules():
        inside = path.relative_to(ROOT)
        room = next(room for room in sorted(ROOMS, reverse=True) if inside.is_relative_to(room))
        foreign[str(inside)] = tops(imports(path)) & PACKAGES - ROOMS[room]
    assert {path: others for path, others in foreign.items() if others} == {}


def test_no_module_outside_bench_programs_imports_from_bench_programs():
    apart = [path for path in modules() if not path.relative_to(ROOT).is_relative_to("bench/programs")]
    used = set().union(*(imports(path) for path in apart))
    assert not {name for name in used if name.startswith("bench.programs")}


def imported_floors(room: str, floor: str) -> set[str]:
    """Return the other layers of a package that the files of one layer import, also for types."""
    used = set().union(*(imports(path, of_types=True) for path in (ROOT / room / floor).glob("*.py")))
    return {name.split(".")[1] for name in used if name.startswith(f"{room}.")} - {floor}


def test_each_layer_of_worker_and_cache_imports_only_the_layers_below_it() -> None:
    used = {room: {floor: imported_floors(room, floor) for floor in FLOORS[room]} for room in FLOORS}
    below = {
        room: {floor: others & floors.keys() for floor, others in floors.items()}
        for room, floors in used.items()
    }
    assert below == FLOORS
    of_the_cache = set().union(*used["cache"].values())
    assert of_the_cache <= FLOORS["cache"].keys(), "the store stands above them all"


def test_worker_process_and_worker_observe_import_no_other_package_of_the_worker() -> None:
    assert {floor: imported_floors("worker", floor) for floor in GROUND} == GROUND


def test_of_the_packages_engine_and_device_the_package_worker_sessions_imports_only_port_and_request() -> (
    None
):
    paths = (ROOT / "worker" / "sessions").glob("*.py")
    used = set().union(*(imports(path, of_types=True) for path in paths))
    seen = {tuple(one.split(".")[1:3]) for one in used if one.startswith(("worker.engine", "worker.device"))}
    assert seen == {("engine", "port"), ("device", "request")}


def test_from_the_package_cache_the_worker_imports_only_the_parts_kv_names_and_store():
    for path in sorted((ROOT / "worker").rglob("*.py")):
        seen = {name.split(".")[1] for name in imports(path) if name.startswith("cache.")}
        assert seen <= FACE, path


def test_only_three_command_modules_import_from_the_cache_and_only_from_cache_admin_and_cache_names():
    seeing = {path.name: imports(path) for path in (ROOT / "commands").glob("*.py")}
    seen = {
        name: {one.split(".")[1] for one in used if one.startswith("cache.")} for name, used in seeing.items()
    }
    by_admin = {"admin", "names"}
    expected = {"cache.py": by_admin, "export.py": {"admin"}, "remains.py": {"admin"}}
    assert {name: of for name, of in seen.items() if of} == expected


def test_the_package_ops_imports_nothing_of_the_package_cache_but_cache_names() -> None:
    """So logs can be verified without MLX and without a cache."""
    paths = sorted((ROOT / "ops").rglob("*.py"))
    seen = {name for path in paths for name in imports(path) if name.startswith("cache.")}
    assert {name.split(".")[1] for name in seen} == {"names"}


def users(*libraries: str) -> set[str]:
    """Return the files that import one of these; in worker and cache, the layers instead of files."""
    paths = {path.relative_to(ROOT) for path in modules() if tops(imports(path)) & set(libraries)}
    return {str(path.parent if path.parts[0] in FLOORS and len(path.parts) > 2 else path) for path in paths}


def test_only_the_listed_modules_import_mlx():
    assert users("mlx", "mlx_lm") == MLX


def test_only_listed_modules_import_http_libraries_and_no_gateway_dialect_imports_asyncio():
    """The gateway's dialects, `boundaries` and `turn` do not import asyncio either."""
    of_gateway = {
        f"gateway/{name}.py"
        for name in (
            "app",
            *(f"http/{one}" for one in ("answer_response", "bodies", "durable", "handlers")),
        )
    }
    of_console = {
        f"ops/console/{name}.py"
        for name in ("app", "token_check", "json_http", "model_api", "question_api", "session_api")
    }
    assert users("starlette", "uvicorn") == of_gateway | of_console | {
        "ops/exporter.py",
        "ops/http_server.py",
    }
    for path in [*DIALECTS.rglob("*.py"), ROOT / "gateway" / "boundaries.py", ROOT / "gateway" / "turn.py"]:
        assert "asyncio" not in tops(imports(path)), path


def test_a_gateway_dialect_imports_only_shared_modules_and_its_routes_are_imported_only_by_app():
    """`routes` imports of `http` only what defines routes; nothing but `app` imports a dialect's routes."""
    shared = {"form", "turn", "images", "logged_answers"}
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        used = {one.split(".", 2)[1:][0] for one in imports(path) if one.startswith("gateway.")}
        if path.is_relative_to(DIALECTS):
            assert used <= {*shared, "dialects", *(("http",) if path.name == "routes.py" else ())}, path
        elif path.name != "app.py":
            assert "dialects" not in used, path


def test_only_the_listed_modules_import_nats_py():
    assert users("nats") == NATS


def test_app_and_engine_are_the_only_parts_of_the_worker_that_import_asyncio():
    assert {user for user in users("asyncio") if user.startswith("worker")} == ASYNCIO


def test_worker_and_commands_start_tasks_only_in_task_groups_except_one_listed_module():
    starts = {"create_task", "ensure_future", "gather", "run_coroutine_threadsafe"}
    paths = [path for path in modules() if path.relative_to(ROOT).parts[0] in {"worker", "commands"}]
    bare = {path for path in paths if starts & {node.attr for node in attributes(path)}}
    assert {str(path.relative_to(ROOT)) for path in bare} == BARE_TASKS


def attributes(path: Path) -> list[ast.Attribute]:
    return [node for node in parsed(path) if isinstance(node, ast.Attribute)]


#: The classes of a request on its way through engine and device, by the names of their variables: the file
#: that declares each, and the only packages that may write its fields.
ON_THE_WAY = {
    "request": ("worker/device/request.py", "TurnRequest", set()),
    "plan": ("worker/device/turn.py", "TurnPlan", set()),
    "turn": ("worker/device/turn.py", "DeviceTurn", {"device"}),
    "row": ("worker/batch/rows.py", "Row", {"device", "batch"}),
    "run": ("worker/engine/run.py", "Run", {"engine"}),
}
#: Variables of other classes that have a field of the same name.
NOT_ON_THE_WAY = {"pages", "embedding", "cutter"}


def fields_of(file: str, kind: str) -> set[str]:
    """Return the fields that a dataclass declares."""
    found = next(node for node in parsed(ROOT / file) if isinstance(node, ast.ClassDef) and node.name == kind)
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}


def writers() -> dict[tuple[str, str], set[str]]:
    """Return, for each variable and field that engine, device and batch assign, the files that do.

    `self` counts as the variable of the class on the way that the file declares.
    """
    own = {file: name for name, (file, _, _) in ON_THE_WAY.items()}
    found: dict[tuple[str, str], set[str]] = {}
    for path in [
        path for package in ("engine", "device", "batch") for path in (ROOT / "worker" / package).glob("*.py")
    ]:
        file = str(path.relative_to(ROOT))
        for node in attributes(path):
            name = ast.unparse(node.value).rpartition(".")[2]
            if isinstance(node.ctx, ast.Store) and (name != "self" or file in own):
                found.setdefault((own[file] if name == "self" else name, node.attr), set()).add(file)
    return found


def test_no_field_of_the_objects_that_carry_a_turn_between_threads_is_written_on_both_threads() -> None:
    """What crosses threads is a value: request, plan, event or command. A field of a run has one file."""
    found = writers()
    names = set().union(*(fields_of(file, kind) for file, kind, _ in ON_THE_WAY.values()))
    strange = {name for name, field in found if field in names} - {*ON_THE_WAY, *NOT_ON_THE_WAY}
    assert not strange, "give these variables the names of their classes"
    for name, (file, kind, packages) in ON_THE_WAY.items():
        by_field = {field: found.get((name, field), set()) for field in fields_of(file, kind)}
        assert {one.split("/")[1] for files in by_field.values() for one in files} == packages, kind
        assert kind != "Run" or max(map(len, by_field.values())) == 1, by_field


def test_of_a_turn_the_package_worker_engine_reads_only_the_fields_request_and_plan() -> None:
    nodes = [node for path in (ROOT / "worker" / "engine").glob("*.py") for node in attributes(path)]
    read = {node.attr for node in nodes if ast.unparse(node.value).rpartition(".")[2] == "turn"}
    assert read == {"request", "plan"}


def sizes() -> dict[str, int]:
    """Return what `SIZES` has, as it is now."""
    found = Counter[str]()
    for path in (*modules(), *(ROOT / "tests").rglob("*.py")):
        room, *more = path.relative_to(ROOT).parts
        num_lines = path.read_bytes().count(b"\n")
        found[room] += num_lines
        if room in {"worker", "tests"} and len(more) > 1:
            found[f"{room}/{more[0]}"] += num_lines
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    found["words"] = sum(len(path.read_text().split()) for path in pages if "reference" not in path.parts)
    return dict(sorted(found.items()))


def test_each_package_has_exactly_as_many_lines_as_the_table_of_package_sizes_says():
    """Size is a cost. The message has the figures of `SIZES` that are to change."""
    now = sizes()
    assert {name: num for name, num in now.items() if SIZES.get(name) != num} == {}
    assert SIZES.keys() == now.keys()


def test_at_most_12_files_mention_paged_sessions():
    """All others see a policy, a ring or a request for KV, and ask it."""
    knowing = [str(path.relative_to(ROOT)) for path in modules() if "paged" in path.read_text().lower()]
    assert len(knowing) <= 12, knowing


def test_the_sampling_option_min_p_is_named_in_only_three_files() -> None:
    """In the protocol's table, and where the worker applies it; all others are made from the table."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    paths = [path for path in (*modules(), *pages) if "reference" not in path.parts]
    naming = {str(path.relative_to(ROOT)) for path in paths if re.search(r"\bmin_p\b", path.read_text())}
    of_worker = {"worker/batch/row_sampler.py", "worker/batch/sampling.py"}
    assert naming == {"protocol/turnkeep_client/sampling.py"} | of_worker


def test_the_main_block_of_a_module_is_at_the_end_of_its_file():
    """What would follow is not defined yet when the program runs; tests that import the module find it."""
    for path in modules():
        _, guard, rest = path.read_text().partition('\nif __name__ == "__main__":\n')
        assert not guard or all(line.startswith(" ") for line in rest.splitlines()), path


def test_no_modules_import_each_other_in_a_cycle_even_counting_imports_for_type_checking():
    names = {".".join(module_parts(path)): path for path in modules()}
    graph = {name: imports(path, of_types=True) & names.keys() - {name} for name, path in names.items()}
    TopologicalSorter(graph).prepare()  # raises an error that names a cycle


#: What macOS lacks, in Python, in psutil and in the file system. mypy finds the same in what it checks.
ONLY_ON_LINUX = re.compile(
    r'"/proc/|\.(memory_maps|rlimit|cpu_affinity|ionice|io_counters)\(|\bos\.(sched_[gs]|posix_fa|memfd|pidfd|eventfd)'
)


def test_each_test_file_that_needs_linux_checks_that_it_runs_on_linux() -> None:
    """The test suite must also run on macOS."""
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    using = {name for name, text in texts.items() if ONLY_ON_LINUX.search(text)}
    assert {"test_blas.py", "test_floods.py"} <= using
    assert [name for name in using if '"linux"' not in texts[name]] == []


def test_documented_commands_for_newcomers_and_documented_commands_that_close_sessions_have_no_comments() -> (
    None
):
    """An interactive zsh, as on a Mac, takes them for arguments: the names of more sessions, say."""
    firsts = [ROOT / page for page in ("README.md", "docs/tutorial.md", "docs/deploying.md")]
    for page in (*firsts, *(ROOT / "docs").glob("*.md")):
        lines = "".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)).splitlines()
        assert lines or page not in firsts
        bare = [line for line in lines if page in firsts or line.startswith("turnkeep close")]
        assert [line for line in bare if re.search(r"(^|\s)#", line)] == []


def test_the_client_package_imports_only_the_standard_library_msgspec_nats_and_yaml():
    """So that it can be installed without MLX."""
    import sys

    allowed = {"msgspec", "nats", CLIENT, "yaml"} | set(sys.stdlib_module_names)
    for path in (ROOT / "protocol" / CLIENT).glob("*.py"):
        assert tops(imports(path)) <= allowed, path
