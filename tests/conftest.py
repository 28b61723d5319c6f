"""Fixtures that most tests need: a tiny model, a NATS server, workers in this process and as processes."""

import asyncio
import contextlib
import fcntl
import functools
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Self

import httpcore2
import pytest
import structlog
from hypothesis import settings

from worker.models.blas import preload

# Importing the tests makes half a million objects; looking for garbage among them takes a second.
gc.disable()

# Threads of OpenBLAS spin as they wait, and the processors have other tests to run.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
preload()  # as a worker does, before anything imports MLX

# Each HTTP client would read the system's certificate authorities, which takes 20 ms.
httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)

# Rich's tracebacks print all variables, which takes a tenth of a second and more for each.
structlog.get_config()["processors"][-1].exception_formatter = structlog.dev.plain_traceback

# Examples have no deadline: their time depends on the machine's load. `make soak` runs more examples.
EXAMPLES = int(os.environ.get("TURNKEEP_TEST_EXAMPLES", "50"))
settings.register_profile("any pace", deadline=None, max_examples=EXAMPLES)
settings.load_profile("any pace")

from parts import (  # noqa: E402
    BLOCK,
    LocalWorker,
    WorkerProcess,
    free_port,
    make_embedding_model,
    make_endless_model,
    make_reranker,
    make_tiny_model,
    nats_server_program,
    split,
)

from tests.durations import Meter  # noqa: E402
from turnkeep_client.client import connect  # noqa: E402
from worker.app import App  # noqa: E402
from worker.process.constants import CONSTANTS, Constants  # noqa: E402
from worker.process.settings import Settings  # noqa: E402
from worker.wire.credentials import client_options, over_tls  # noqa: E402

#: Fixtures that mount file systems.
MOUNTING = {"mounted", "read_only"}


def pytest_configure(config: pytest.Config) -> None:
    """Add the CPU time of each test to the report."""
    config.pluginmanager.register(Meter())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the mark `mounts` to the tests that mount file systems."""
    for item in items:
        if MOUNTING & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.mounts)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name the parameter in a test's id if its value says little alone: `is_begun=True`, not `True`."""
    text = ascii(val)[1:-1] if isinstance(val, str) else ascii(sorted(val) if isinstance(val, set) else val)
    if isinstance(val, Enum) or hasattr(val, "__name__"):
        return None
    text = text.partition(" at 0x")[0]  # another address in each process
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if isinstance(val, str) and len(val) >= 4 else f"{argname}={text}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Collect garbage from now on, but not among the modules and tests, which stay to the end."""
    gc.freeze()
    gc.enable()


#: Settings by which uv, pip and npm contact no registry.
OFFLINE = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "npm_config_offline": "true"}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep package managers offline, except in tests marked `registry`; skip these without a registry."""
    mark = item.get_closest_marker("registry")
    if mark is None:
        os.environ.update(OFFLINE)
        return
    for name in OFFLINE:
        os.environ.pop(name, None)
    client = mark.args[0] if mark.args else "uv"
    if wrong := unanswered(client):
        pytest.skip(f"the registry does not answer {client}: {wrong}")


@functools.cache
def unanswered(client: str) -> str:
    """Ask the registry of uv or npm about one package; return the client's error, or "" if it answers."""
    with tempfile.TemporaryDirectory() as folder:
        if client == "uv":
            venv.create(folder)
            uv = str(Path(sys.executable).with_name("uv"))
            command = [uv, "pip", "install", "--dry-run", "--no-deps", "--no-cache", "--python"]
            command += [f"{folder}/bin/python", "click"]
        elif shutil.which(client) is None:
            return "it is not installed"
        else:
            command = [client, "view", "--fetch-retries=0", f"--cache={folder}", "typescript", "version"]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "UV_HTTP_RETRIES": "0"},
        )
    if done.returncode == 0:
        return ""
    return next((line for line in done.stderr.splitlines() if "://" in line), done.stderr)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return the folder of a name, which the first process of the run that asks for it fills for all."""
    base = tmp_path_factory.getbasetemp()
    folders = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    folders.mkdir(exist_ok=True)

    def made(name: str, fill: Callable[[Path], object]) -> Path:
        folder, half = folders / name, folders / f"{name}.half"
        folder.parent.mkdir(exist_ok=True)
        with (folders / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                shutil.rmtree(half, ignore_errors=True)
                fill(half)
                half.rename(folder)
        return folder

    return made


@pytest.fixture(scope="session")
def tiny_model(made_once: Callable[..., Path]) -> Path:
    """A random llama of two layers with a byte-level tokenizer and a ChatML template, as an MLX folder."""
    return made_once("tiny", make_tiny_model)


@pytest.fixture(scope="session")
def taught_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that names the digit and the colour of a picture; see `tests.taught`."""
    from tests import taught

    return taught.write(tmp_path_factory.mktemp("models") / "taught")


@pytest.fixture(scope="session")
def endless_model(tiny_model: Path, made_once: Callable[..., Path]) -> Path:
    """The tiny model without an end-of-turn token: each answer has as many tokens as its limit allows."""
    return made_once("endless", functools.partial(make_endless_model, tiny_model))


@pytest.fixture(scope="session")
def embedding_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in the form of Qwen3-Embedding: no output head, and an end token after each text."""
    return make_embedding_model(tiny_model, tmp_path_factory.mktemp("models") / "embedding")


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in the form of Qwen3-Reranker, which scores documents by the tokens "yes" and "no"."""
    return make_reranker(tmp_path_factory.mktemp("models") / "reranker")


@pytest.fixture(scope="session")
def model_with_template(tiny_model: Path, made_once: Callable[..., Path]) -> Callable[[str, str], Path]:
    """Make copies of the tiny model's folder with other chat templates."""

    def make(name: str, template: str) -> Path:
        def fill(folder: Path) -> None:
            shutil.copytree(tiny_model, folder)
            for file in folder.glob("chat_template*"):
                file.write_text(template)
            config = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))

        return made_once(f"{sha256(template.encode()).hexdigest()[:8]}/{name}", fill)

    return make


@pytest.fixture(scope="session")
def packaged_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model, converted once a run, or once for all runs in the folder TURNKEEP_TEST_DATA."""
    from worker.models import model

    base = tmp_path_factory.getbasetemp()
    own = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # common to the run's processes
    data_dir = Path(os.environ.get("TURNKEEP_TEST_DATA") or own / "turnkeep")
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "tests.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return model.resolve(None, data_dir, dtype="float32")


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server with JetStream for the whole run; each test has its own subject prefix."""
    port = free_port()
    store = tmp_path_factory.mktemp("nats")
    # Streams reserve their maximum size; tests make many streams, which stay small.
    config = {"listen": f"127.0.0.1:{port}", "jetstream": {"store_dir": str(store), "max_file_store": 2**60}}
    (store / "server.conf").write_text(json.dumps(config))
    command = [nats_server_program(), "-c", str(store / "server.conf")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.02)
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


async def started_app(settings: Settings, constants: Constants = CONSTANTS) -> tuple[App, asyncio.Task[None]]:
    """Start a worker in this process, and wait until it serves."""
    app = App(settings, constants=constants)
    task = asyncio.create_task(app.run())
    ready = asyncio.create_task(app.ready.wait())
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if task.done():
        await task
    return app, task


@pytest.fixture(scope="session")
def known_models(
    tiny_model: Path, endless_model: Path, nats_url: str, made_once: Callable[..., Path]
) -> Path:
    """What workers store of these models at their first start: digests, tokenizers, results of trials.

    With it a start takes half of the processor time.
    """

    async def fill(data_dir: Path) -> None:
        for model in (tiny_model, endless_model):
            prefix = f"known{time.monotonic_ns()}"
            settings = Settings(data_dir=data_dir, nats=nats_url, prefix=prefix, model=str(model))
            app, task = await started_app(settings)
            app.stop()
            await task

    return made_once("known", lambda data_dir: asyncio.run(fill(data_dir))) / "models"


@pytest.fixture
async def local_worker(
    tiny_model: Path, known_models: Path, nats_url: str, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[LocalWorker]]]:
    """Start workers in this process; keyword arguments are settings or constants.

    They are stopped after the test. In a new folder of data they find what earlier starts would have
    stored of the models.
    """
    started: list[LocalWorker] = []
    prefix = f"t{time.monotonic_ns()}"

    async def start(**changes: object) -> LocalWorker:
        values: dict[str, object] = {
            "data_dir": tmp_path / "data",
            "nats": nats_url,
            "prefix": prefix,
            "model": str(tiny_model),
            "worker": "test",
            "block_tokens": BLOCK,
            "metrics_interval_s": 0.2,
            "log_max_bytes": 64 * 2**20,
            "token_max_bytes": 16 * 2**20,
            "max_message_bytes": 256 * 2**10,
            "min_free_disk": 0,
        }
        settings, constants = split({**values, **changes})
        if settings.data_dir.parent.is_dir() and not settings.data_dir.exists():
            settings.data_dir.mkdir(mode=0o700)
            shutil.copytree(known_models, settings.data_dir / "models")
        app, task = await started_app(settings, constants)
        client = await connect(
            over_tls(settings, settings.nats or f"nats://127.0.0.1:{settings.nats_port}"),
            prefix=settings.prefix,
            **client_options(settings),
        )
        started.append(LocalWorker(app, task, settings, client))
        return started[-1]

    yield start
    for worker in started:
        if not worker.task.done():
            try:
                if not worker.app._stop.is_set():  # one that stops need not give back what it holds
                    await worker.come_to_rest()
            finally:
                await worker.stop()
        await worker.client.close()


@pytest.fixture
async def worker(
    request: pytest.FixtureRequest, local_worker: Callable[..., Awaitable[LocalWorker]]
) -> LocalWorker:
    """A worker with the tiny model, or with the model and the settings that the mark `serves` names."""
    mark = request.node.get_closest_marker("serves") or pytest.mark.serves("tiny_model").mark
    return await local_worker(model=str(request.getfixturevalue(mark.args[0])), **mark.kwargs)


@pytest.fixture
def worker_process(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Make worker processes that the test starts; those that still run after the test are stopped."""
    made: list[WorkerProcess] = []

    def make(*options: str, model: Path | None = tiny_model, port: int | None = None) -> WorkerProcess:
        made.append(WorkerProcess(tmp_path / "data", model, port or free_port(), *options))
        return made[-1]

    yield make
    for process in made:
        if not process.running:
            with contextlib.suppress(Exception):
                process.start()  # it takes over the NATS server that a killed worker left, and stops it
        if process.running:
            process.stop()


@pytest.fixture
def mounted() -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with given options (`size=1m`, `ro`); skip the test where mounting is not allowed."""
    with Mounts() as mounts:
        yield lambda options: mounts.mount("-t", "tmpfs", "-o", options, "tmpfs")


@pytest.fixture
def read_only() -> Iterator[Callable[[Path, bool], None]]:
    """Make a folder read-only (True) or writable again while files in it are open, or skip the test.

    The kernel does not remount a mount through which a file is open for writing. So a bind mount of the same
    folder covers it; files opened from then on are opened through the bind mount.
    """
    with Mounts() as mounts:
        over: set[Path] = set()

        def remount(folder: Path, on: bool) -> None:
            if folder not in over:
                mounts.mount("--bind", str(folder), over=folder)
                over.add(folder)
            mode = "ro" if on else "rw"
            subprocess.run(["mount", "-o", f"remount,bind,{mode}", str(folder)], check=True)

        yield remount


class Mounts:
    """Mounts file systems for a test, and unmounts them at its end, even if it fails."""

    def __init__(self) -> None:
        self._mounts: list[tuple[Path, bool]] = []

    def __enter__(self) -> Self:
        return self

    def mount(self, *arguments: str, over: Path | None = None) -> Path:
        """Call `mount` with these arguments and a new folder, or the folder `over`; return the folder."""
        # Not below pytest's own folder: a run that is killed leaves the mount behind, and the next run's
        # clean-up would stumble over it.
        folder = over or Path(tempfile.mkdtemp(prefix="turnkeep-disk-"))
        command = ["mount", *arguments, str(folder)]
        if (
            shutil.which("mount") is None
            or subprocess.run(command, check=False, capture_output=True).returncode
        ):
            if over is None:
                folder.rmdir()
            pytest.skip("mounting a file system is not allowed here")
        self._mounts.append((folder, over is None))
        return folder

    def __exit__(self, *_: object) -> None:
        for folder, ours in reversed(self._mounts):
            if folder.is_mount():
                subprocess.run(["umount", "--lazy", folder], check=True)
            if ours:
                folder.rmdir()
