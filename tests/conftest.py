"""Parts that most tests need: a tiny model, a NATS server, workers in this process and as processes."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from worker.models.blas import preload

preload()  # as a worker does, before anything imports MLX

from turnkeep_client.client import Client, connect  # noqa: E402
from worker.app import App  # noqa: E402
from worker.settings import Settings  # noqa: E402

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_CONTEXT = 2048
#: 2 layers x 2 KV heads x 16 dimensions x 4 bytes, keys and values.
TINY_KV_BYTES = 2 * 2 * 16 * 4 * 2
BLOCK = 32


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of two layers with a byte-level tokenizer and a ChatML template, as an MLX folder."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate(specials + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(vocabulary),
        "max_position_embeddings": TINY_CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": vocabulary["<|im_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(7)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {name: mx.random.normal(array.shape) * 0.3 for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


@pytest.fixture(scope="session")
def endless_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without an end-of-turn token: an answer lasts as long as it was asked to."""
    folder = tmp_path_factory.mktemp("models") / "endless"
    shutil.copytree(tiny_model, folder)
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_text())
        config = {key: value for key, value in config.items() if not key.startswith("eos")}
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def model_with_template(tiny_model: Path) -> Callable[[str, str], Path]:
    """Make copies of the tiny model's folder with other chat templates."""

    def make(name: str, template: str) -> Path:
        folder = tiny_model.with_name(name)
        if not folder.exists():
            shutil.copytree(tiny_model, folder)
            for file in folder.glob("chat_template*"):
                file.write_text(template)
            config = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        return folder

    return make


@pytest.fixture(scope="session")
def packaged_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model, converted once a run; once for all where TURNKEEP_TEST_DATA names a folder."""
    from worker.models import model

    shared = os.environ.get("TURNKEEP_TEST_DATA")
    data_dir = Path(shared) if shared else tmp_path_factory.mktemp("turnkeep")
    return model.resolve(None, data_dir, dtype="float32")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nats_server_program() -> str:
    return str(Path(sys.executable).with_name("nats-server"))


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server with JetStream for the whole run; tests keep apart by their subject prefix."""
    port = free_port()
    store = tmp_path_factory.mktemp("nats")
    # Streams reserve what they may grow to; every test makes some, and none grows.
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


class LocalWorker:
    """A worker in this process, and what a test needs to talk to it."""

    def __init__(self, app: App, task: asyncio.Task[None], settings: Settings, client: Client) -> None:
        self.app = app
        self.task = task
        self.settings = settings
        self.client = client

    async def stop(self) -> None:
        self.app.stop()
        await self.task
        await self.client.close()


@pytest.fixture
async def local_worker(
    tiny_model: Path, nats_url: str, tmp_path: Path
) -> AsyncIterator[Callable[..., Awaitable[LocalWorker]]]:
    """Start workers in this process; keyword arguments are settings. They are stopped after the test."""
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
        settings = Settings(**{**values, **changes})  # type: ignore[arg-type]
        app = App(settings)
        task = asyncio.create_task(app.run())
        ready = asyncio.create_task(app.ready.wait())
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if task.done():
            await task
        client = await connect(
            settings.nats or f"nats://127.0.0.1:{settings.nats_port}", prefix=settings.prefix
        )
        started.append(LocalWorker(app, task, settings, client))
        return started[-1]

    yield start
    for worker in started:
        if not worker.task.done():
            await worker.stop()


class WorkerProcess:
    """`turnkeep serve` as a process of its own, to be killed and started again."""

    def __init__(self, data_dir: Path, model: Path | None, port: int, *options: str) -> None:
        self.data_dir = data_dir
        self.url = f"nats://127.0.0.1:{port}"
        self.command = [
            *(sys.executable, "-m", "worker", "serve", "--data-dir", str(data_dir), "--nats-port", str(port)),
            *(("--model", str(model)) if model else ()),
            *("--log-format", "json", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.log_path = data_dir.with_suffix(".log")

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TURNKEEP_")}
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(self.command, stdout=output, stderr=output, env=environment)

    def kill(self) -> None:
        """`kill -9`: no clean-up of any kind."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(30)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    async def client(self, timeout_s: float = 30, **options: str) -> Client:
        """Connect as soon as its NATS server answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await connect(self.url, **options)
            except Exception:
                if time.monotonic() > deadline or not self.running:
                    raise
                await asyncio.sleep(0.1)


@pytest.fixture
def worker_process(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., WorkerProcess]]:
    """Make worker processes, not started yet; whatever still runs after the test is stopped."""
    made: list[WorkerProcess] = []

    def make(*options: str, model: Path | None = tiny_model, port: int | None = None) -> WorkerProcess:
        made.append(
            WorkerProcess(
                tmp_path / "data", model, port or free_port(), "--block-tokens", str(BLOCK), *options
            )
        )
        return made[-1]

    yield make
    for process in made:
        if not process.running:
            with contextlib.suppress(Exception):
                process.start()  # it adopts its NATS server, and then takes it down
        if process.running:
            process.stop()


@pytest.fixture
def mounted() -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with given options (`size=1m`, `ro`); skips where that is not allowed."""
    with Mounts() as mounts:
        yield lambda options: mounts.mount("-t", "tmpfs", "-o", options, "tmpfs")


@pytest.fixture
def disk_image(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a file with a file system of its own; skips where that is not allowed, or cannot be made."""
    with Mounts() as mounts:

        def make(size_bytes: int, options: str, *command: str) -> Path:
            if shutil.which(command[0]) is None:
                pytest.skip(f"there is no {command[0]} here")
            image = tmp_path / "image"
            if not image.exists():  # else what was left in it is looked at again
                with image.open("wb") as file:
                    file.truncate(size_bytes)
            made = subprocess.run([*command, str(image)], check=False, capture_output=True, text=True)
            assert made.returncode <= 1, made.stderr  # 1 says that something was repaired
            return mounts.mount("-o", f"loop,{options}", str(image))

        yield make


@pytest.fixture
def read_only() -> Iterator[Callable[[Path, bool], None]]:
    """Remount a folder read-only (True) or writable again, while files in it are open; skips as others do.

    The kernel refuses that for a mount through which a file was opened for writing. So another mount of the
    same folder lies over it: whatever is opened from then on is opened there.
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
    """Mounts that end with a test, also where it fails."""

    def __init__(self) -> None:
        self._mounts: list[tuple[Path, bool]] = []

    def __enter__(self) -> Self:
        return self

    def mount(self, *arguments: str, over: Path | None = None) -> Path:
        """Mount something on a new folder, or over one that is there."""
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
