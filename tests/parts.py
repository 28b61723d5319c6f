"""Makes tiny models, free ports and workers, for tests and for the programs of `soak/`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from tests.at_rest import come_to_rest
from tests.forked import CAN_FORK, Forked
from turnkeep_client.client import connect
from worker.process import clock
from worker.process.constants import Constants
from worker.process.settings import Settings
from worker.wire.credentials import own_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pytest

    from turnkeep_client.client import Client
    from worker.app import App

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TINY_CONTEXT = 2048
ENDLESS_CONTEXT = 1 << 16
#: Bytes of KV per token: 2 layers x 2 KV heads x 16 dimensions x 4 bytes, keys and values.
TINY_KV_BYTES = 2 * 2 * 16 * 4 * 2
BLOCK = 32


async def until(condition: Callable[[], object]) -> None:
    """Wait until `condition` is true, for things of which nothing tells; raise `TimeoutError` after 120 s."""
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def png(seed: int = 0, side: int = 8) -> bytes:
    """Return a PNG file of one colour, which `seed` chooses."""
    colour = random.Random(seed).randbytes(3)
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + colour * side) * side)
    chunks = ((b"IHDR", head), (b"IDAT", rows), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def make_tiny_model(folder: Path, *, merges: Sequence[tuple[str, str]] = (), **changes: Any) -> Path:
    """Make a random model, a llama of two layers, with a byte-level tokenizer and a ChatML template.

    `merges` are its tokenizer's BPE merges; `changes` replace fields of its config.json.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *letters, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
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
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(7)
    architecture = import_module(f"mlx_lm.models.{config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    weights = {name: mx.random.normal(array.shape) * 0.3 for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def make_embedding_model(tiny: Path, folder: Path) -> Path:
    """Make an embedding model of the tiny model: no output head, and an end token after each text."""
    import mlx.core as mx
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    bare = {name.removeprefix("model."): one for name, one in mx.load(str(weights)).items()}
    mx.eval(bare)
    mx.save_safetensors(str(weights), bare, metadata={"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ending = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(single=f"$A {ending}", special_tokens=[(ending, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "modules.json").write_text("[]")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


def make_reranker(folder: Path) -> Path:
    """Make a tiny model in the form of Qwen3-Reranker, with the tokens "yes" and "no"."""
    make_tiny_model(folder, merges=[("y", "e"), ("ye", "s"), ("n", "o")])
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.modules.LogitScore"}]')
    return folder


def make_endless_model(tiny: Path, folder: Path) -> Path:
    """Copy the tiny model without its end-of-turn token: answers are as long as their limit allows.

    Its template ends a turn with a plain character, since a token there would end answers too.

    Its context is longer than any answer in a test.
    """
    shutil.copytree(tiny, folder)
    for name in ("config.json", "tokenizer_config.json"):
        config = json.loads((folder / name).read_text())
        config = {key: value for key, value in config.items() if not key.startswith("eos")}
        if "max_position_embeddings" in config:
            config["max_position_embeddings"] = ENDLESS_CONTEXT
        (folder / name).write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace("<|im_end|>", "|"))
    return folder


def _ports() -> Iterator[int]:
    """Yield, without end, the ports that only this process of the test run uses, from a random one on.

    All are below the ports that Linux gives to outgoing connections.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PORT_SHARES
    share = range(20_000 + number, 32_000, _PORT_SHARES)
    start = random.SystemRandom().randrange(len(share))
    return itertools.cycle([*share[start:], *share[:start]])


_PORT_SHARES: Final = 8
_next_ports: Final = _ports()


def free_port() -> int:
    """Return a port that is free now, and that no other call in this test run returns soon."""
    for port in _next_ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the ports have no end")


def split(values: Mapping[str, Any]) -> tuple[Settings, Constants]:
    """Divide a worker's values, by name, into its settings and its constants."""
    names = {field.name for field in dataclasses.fields(Constants)}
    constants = {name: value for name, value in values.items() if name in names}
    return Settings(**{k: v for k, v in values.items() if k not in names}), Constants(**constants)


def nats_server_program() -> str:
    return str(Path(sys.executable).with_name("nats-server"))


class NatsServer:
    """A nats-server process, with the same store directory and port each time it is started."""

    def __init__(self, store: Path, options: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.store = store
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [nats_server_program(), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd"]
        self._process = subprocess.Popen(
            [*command, str(self.store), *self.options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.02)
        raise RuntimeError("nats-server did not start")

    def pause(self) -> None:
        """Have the server read and answer nothing until it is killed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the server by a signal, and wait until it has ended."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None

    def kill(self) -> None:
        self.stop(signal.SIGKILL)


class LocalWorker:
    """A worker that runs in this process, with its settings, its task and a client."""

    def __init__(self, app: App, task: asyncio.Task[None], settings: Settings, client: Client) -> None:
        self.app = app
        self.task = task
        self.settings = settings
        self.client = client

    async def come_to_rest(self) -> None:
        """Assert that the worker holds nothing of requests any more, unless some of them do not end."""
        parts = self.app._parts

        def is_busy() -> bool:
            waiting = parts.intake.num_sessions + parts.intake.num_returned
            return bool(waiting or parts.endpoints._tenants)

        await come_to_rest(parts, is_busy=is_busy)

    async def stop(self) -> None:
        self.app.stop()
        try:
            await self.task
        finally:
            await self.client.close()


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class WorkerProcess:
    """A process of `turnkeep serve` with its worker, which a test can kill and start again."""

    def __init__(self, data_dir: Path, model: Path | None, port: int, *options: str) -> None:
        self.data_dir = data_dir
        self._port = port
        self.command = [
            *(
                sys.executable,
                "-m",
                "commands",
                "serve",
                "--data-dir",
                str(data_dir),
                "--nats-port",
                str(port),
            ),
            *(("--model", str(model)) if model else ()),
            *("--log-format", "json", *options),
        ]
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self.log_path = data_dir.with_suffix(".log")
        #: Whether it is forked from a process that has imported the program.
        self.forks = CAN_FORK

    @property
    def url(self) -> str:
        """The URL of its NATS server, with the token once the worker was started."""
        token = own_token(self._given_data_dir)
        return f"nats://{token + '@' if token else ''}127.0.0.1:{self._port}"

    @property
    def _given_data_dir(self) -> Path:
        return Path(self.command[len(self.command) - self.command[::-1].index("--data-dir")])

    def start(self, stdin: int | None = None) -> None:
        """Start the worker; `stdin` is the descriptor of its standard input, by default /dev/null."""
        if own_token(self._given_data_dir) is None:  # so that clients can try before the worker makes one
            self._given_data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._given_data_dir / "nats-token").write_text(secrets.token_urlsafe(32))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TURNKEEP_")}
        if self.forks:
            self._process = Forked.logging_to(self.log_path, self.command[1:], environment, stdin)
            return
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=stdin or subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=Path(__file__).parents[1],
            )

    def kill(self) -> None:
        """Kill `serve` with SIGKILL; wait for its end, and for that of its worker."""
        pids = [int(one["pid"]) for one in self._events("ready") if "pid" in one]
        self._end(signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(map(_runs, pids)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def lose_worker(self) -> None:
        """Kill only the worker, and keep `serve` from starting it again until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)
        os.kill(self.worker_pid, signal.SIGKILL)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.send_signal(signal.SIGCONT)
        return self.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(30)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def worker_pid(self) -> int:
        """The process of its worker that was ready last."""
        return int(self._events("ready")[-1]["pid"])

    def _events(self, name: str) -> list[dict[str, Any]]:
        whole = [line for line in self.log.splitlines() if line.startswith("{") and line.endswith("}")]
        lines = [json.loads(line) for line in whole]
        return [one for one in lines if one["event"] == name]

    @property
    def server_pid(self) -> int:
        """The process of its NATS server."""
        (ports,) = self.data_dir.glob("nats-server_*.ports")
        return int(ports.stem.partition("_")[2])

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    async def client(self, timeout_s: float = 30, **options: str) -> Client:
        """Return a client as soon as the worker's NATS server answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await connect(self.url, **options)
            except Exception:
                if time.monotonic() > deadline or not self.running:
                    raise
                await asyncio.sleep(0.1)


def fall_asleep(monkeypatch: pytest.MonkeyPatch, for_s: float) -> None:
    """Let a simulated machine sleep: the wall clock is then `for_s` later, and the monotonic clock is not."""
    before = clock.source.time
    monkeypatch.setattr(clock.source, "time", lambda: before() + for_s)
