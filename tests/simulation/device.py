"""The real worker with a simulated device, which computes each token as a hash of the tokens before it.

As with a model, a session's tokens and its seed determine every answer, so that `checks` can verify answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b, sha256
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
import nats.errors
from anyio import Event, move_on_after
from nats.js.errors import APIError
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers

from cache.names.policy import FULL
from cache.names.tokens import as_tokens
from cache.store import ErasureResult
from tests.at_rest import held
from turnkeep_client.messages import Model, Progress, joined
from worker.app import App
from worker.cluster.liveness import Members
from worker.engine.port import EnginePort, StoppingError, TurnResult
from worker.metrics_collector import unloaded_metrics
from worker.models.model import LoadedModel
from worker.models.tokenizer import Tokenizer
from worker.models.vision.image_processor import ImageProcessor
from worker.parts import Parts
from worker.process.concurrency import task_group
from worker.process.constants import CONSTANTS, Constants
from worker.wire import streams

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Sequence

    from cache.names.marks import ErasureProgress, Marks
    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from turnkeep_client.messages import Chunk, Metrics
    from turnkeep_client.subjects import SessionKey
    from worker.device.request import TurnRequest
    from worker.engine.port import Publish
    from worker.observe.traces import Phase
    from worker.parts import Groundwork
    from worker.process.settings import Settings
    from worker.text.answer import Answer

    from .loop import Loop, Process

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>")
_TEMPLATE: Final = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{% if one.content is string %}{{ one.content }}"
    "{% else %}{% for part in one.content %}{{ part.text or '<image>' }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: A request with this token kills every process that runs it.
POISON: Final = 0
END: Final = 2
IMAGE: Final = 3
CONTEXT: Final = 4096
_KV_BYTES: Final = 64
_WORLD = "nats://world:4222"
_MOST_BYTES: Final = 10**9
#: The probability that a disk loses a write, and that it does not confirm an erasure.
_DISK_FAILS: Final = 0.2


@cache
def tokenizer() -> Tokenizer:
    """Make a tokenizer with a token for each byte, and three special tokens. Cached."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *letters))}
    rust = Rust(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(list(_SPECIAL))
    fast: Any = SimpleNamespace(
        backend_tokenizer=rust, chat_template=_TEMPLATE, eos_token_id=END, special_tokens_map={}
    )
    fast.get_chat_template = lambda: _TEMPLATE
    made = Tokenizer(fast)
    made.image_processor = ImageProcessor(_Family(), made.encode)  # type: ignore[arg-type]
    return made


class _Family:
    """Every image has as many tokens as it is wide."""

    image = "<image>"
    placeholder = around = ""
    is_plane, most_joint = False, 0
    processor = SimpleNamespace()

    def views(self, image: Any) -> tuple[tuple[int, ...], list[Any]]:
        return (image.width,), [SimpleNamespace(num_rows=image.width)]

    def text(self, grid: Sequence[int]) -> str:
        return f"<{self.image * grid[0]}>"


def pictures(tokens: Tokens) -> bytes:
    """Return the digests of the files that a session's tokens show."""
    return b"".join(span.digest for span in tokens.spans)


def next_token(prompt: Sequence[int], shown: bytes, answered: Sequence[int], seed: int, rounding: int) -> int:
    """Hash prompt, pictures, answer so far and seed to the next token.

    `rounding` stands for a device's arithmetic.
    """
    salt = seed.to_bytes(8, "big") + bytes([rounding])
    hashed = blake2b(array("I", prompt).tobytes() + shown, digest_size=8, salt=salt)
    hashed.update(array("I", answered).tobytes())
    number = int.from_bytes(hashed.digest(), "big")
    return END if number % 16 == 0 else 3 + number % 250


@dataclass(eq=False)
class _Run:
    """The state of one turn on the simulated device."""

    num_cached: int
    num_context: int
    is_cancelled: bool = False
    num_generated: int = 0
    stopped: Event = field(default_factory=Event)


class Disk(dict["SessionKey", "Tokens"]):
    """A simulated snapshot directory: for each session, the tokens whose KV workers have stored."""

    def __init__(self) -> None:
        self._erased: dict[str, ErasureProgress] = {}

    @property
    def put_back(self) -> frozenset[bytes]:
        return frozenset()

    async def erase_marked(self, tenant: str, marks: Marks) -> bool:
        for key in [key for key in self if key.tenant == tenant]:
            if marks.agrees(tenant, self[key].packed()):
                del self[key]
        return True

    async def clear(self) -> bool:
        super().clear()
        return True

    async def erased_up_to(self, log: str) -> ErasureProgress | None:
        return self._erased.get(log)

    async def note_erased(self, erased: ErasureProgress) -> None:
        self._erased[erased.log] = erased


VISION: Final = Model(name="hashes", vision=tokenizer().image_processor.processor.hex())  # type: ignore[union-attr]


class Device(EnginePort):
    """Replaces `worker.engine.engine.Engine` in simulated workers: tokens are hashes, and there is no KV."""

    def __init__(self, loop: Loop, process: Process, rounding: int, disk: Disk) -> None:
        self.resident: dict[SessionKey, Tokens] = {}
        self.runs: dict[SessionKey, _Run] = {}
        self._loop = loop
        self._process = process
        self._rounding = rounding
        self._disk = disk
        self._stopping = False

    def refusal(self, policy: Policy) -> str | None:
        return None

    @property
    def max_bytes(self) -> int:
        return _MOST_BYTES

    def size_bytes(self, num_tokens: int, policy: Policy = FULL) -> int:
        return num_tokens * _KV_BYTES

    def live_bytes(self, key: SessionKey, tokens: Tokens, policy: Policy = FULL) -> int:
        return _KV_BYTES * self.resident.get(key, as_tokens()).num_common(tokens)

    def most_tokens(self, most: int, policy: Policy = FULL) -> int:
        return most

    def progress(self, key: SessionKey) -> Progress | None:
        run = self.runs.get(key)
        if run is None:
            return None
        return Progress(
            cached_tokens=run.num_cached, context_tokens=run.num_context, generated_tokens=run.num_generated
        )

    def forget(self, key: SessionKey) -> None:
        self.resident.pop(key, None)

    def let_go(self, is_meant: Callable[[SessionKey], bool]) -> set[SessionKey]:
        for key in list(filter(is_meant, self.resident)):
            self.forget(key)
        return set(filter(is_meant, self.runs))

    async def erase(self, key: SessionKey, tokens: Tokens, shared: int) -> ErasureResult:
        self.forget(key)
        is_failing = self._fails()
        await self._sleep(2.0 if is_failing else 0.005)
        if is_failing or not self._disk.get(key, as_tokens()).num_common(tokens):
            return ErasureResult(0, settled=not is_failing)
        del self._disk[key]
        return ErasureResult(1, settled=True)

    async def embed(self, key: SessionKey, tokens: Tokens, *, priority: int = 0) -> bytes:
        raise NotImplementedError  # no client of a history asks for vectors

    #: Unlike the engine, it never saves again what the disk has lost, and computes no KV again.
    chores: ClassVar = {}

    async def save_all(self, within_s: float) -> None:
        """Do nothing. Unlike the engine, save nothing again when the worker stops."""

    def _fails(self) -> bool:
        return self._loop.random.random() < _DISK_FAILS

    def cancel(self, key: SessionKey) -> None:
        if (run := self.runs.get(key)) is not None:
            run.is_cancelled = True
            run.stopped.set()

    def stop(self) -> None:
        self._stopping = True
        for run in self.runs.values():
            run.stopped.set()

    async def _sleep(self, mean_s: float) -> None:
        await asyncio.sleep(self._loop.random.expovariate(1 / mean_s))

    async def run(
        self,
        asked: TurnRequest,
        cancelled: Callable[[], bool],
        publish: Publish | None = None,
        phases: list[Phase] | None = None,
    ) -> TurnResult | None:
        key, context, answer = asked.key, asked.context, asked.answer
        if key in self.runs:
            raise AssertionError(f"two turns of {key} at once")
        if self._stopping:
            raise StoppingError
        live, stored = (of.get(key, as_tokens()) for of in (self.resident, self._disk))
        num_cached = max(live.num_common(context), stored.num_common(context))
        self.resident.pop(key, None)
        run = self.runs[key] = _Run(num_cached, len(context))
        try:
            await self._sleep(0.003)  # in the queue
            if cancelled() or run.is_cancelled:
                return None
            started_s = self._loop.time()
            if POISON in context.ids():
                self._process.kill()
                await asyncio.Future()
            with move_on_after(self._loop.random.expovariate(100)):
                await run.stopped.wait()
            if self._stopping:
                raise StoppingError
            tokens, first_token_s = context, self._loop.time()
            known = live if live.num_common(context) == num_cached else stored
            shown = await self._look(asked, known[:num_cached])
            if answer is not None and not run.is_cancelled:
                await self._answer(run, context, shown, answer, asked.sampling, publish)
                num_known = run.num_context - (len(context) - run.num_context)
                tokens = context[: run.num_context] + answer.tokens if num_known else context
                if self._stopping and answer.finish_reason is None:
                    raise StoppingError
            self.resident[key] = tokens
            if not self._fails():
                self._disk[key] = tokens
            return TurnResult(
                complete=not run.is_cancelled or answer is not None,
                num_cached=num_cached,
                num_prefilled=len(context) - num_cached,
                live_bytes=_KV_BYTES * len(tokens),
                prefill_s=0.0,
                started_s=started_s,
                first_token_s=first_token_s,
            )
        finally:
            del self.runs[key]

    async def _look(self, asked: TurnRequest, known: Tokens) -> bytes:
        """Return the pictures that the turn's KV shows: those of the `known` KV, then those that it reads."""
        whole = [span for span in known.spans if span.end < len(known)]
        shown = [span.digest for span in whole]
        for span in asked.context.spans[len(whole) :]:
            assert asked.read_image is not None
            shown.append(sha256(await asked.read_image(span.fingerprint)).digest())
        return b"".join(shown)

    async def _answer(
        self, run: _Run, context: Tokens, shown: bytes, answer: Answer, sampling: Any, publish: Any
    ) -> None:
        """Draw tokens at the device's speed; publish them at the log's speed, waiting chunks as one."""
        run.num_context = len(context) - len(answer.tokens)
        prompt = context.ids(0, run.num_context)
        seed = 0 if sampling.is_greedy else sampling.seed
        drawn: asyncio.Queue[Chunk | None] = asyncio.Queue()

        async def draw() -> None:
            while answer.finish_reason is None and not run.is_cancelled and not self._stopping:
                await self._sleep(0.002)
                drawn.put_nowait(answer.push(next_token(prompt, shown, answer.tokens, seed, self._rounding)))
                run.num_generated += 1
            drawn.put_nowait(None)

        async with task_group() as tasks:
            tasks.start_soon(draw)
            chunk = await drawn.get()
            while chunk is not None:
                chunks = [chunk]
                while not drawn.empty() and (chunk := drawn.get_nowait()) is not None:
                    chunks.append(chunk)
                await publish(joined(chunks))
                if chunk is not None:
                    chunk = await drawn.get()


def _metrics(built: Parts) -> Metrics:
    named = {"worker": built.ground.settings.worker, "version": "0", "model": "hashes"}
    telemetry = built.ground.telemetry
    return msgspec.structs.replace(
        unloaded_metrics(**named),
        device="hashes",
        requests={kind: dict(outcomes) for kind, outcomes in telemetry.requests.items()},
        ignored=dict(telemetry.ignored),
        sessions=len(built.sessions),
        running=len(built.engine.runs),
        log_bytes=built.retention.num_bytes,
        log_max_bytes=built.retention.max_bytes,
    )


class Worker(App):
    """The real worker with a simulated device. Without `leases` it has no record among the workers."""

    #: Whether it stores snapshots.
    stores = True

    def __init__(
        self,
        settings: Settings,
        loop: Loop,
        process: Process,
        *,
        directory: str,
        disk: Disk,
        constants: Constants = CONSTANTS,
        leases: bool = True,
        rounding: int = 0,
    ) -> None:
        super().__init__(replace(settings, nats=_WORLD), constants=constants)
        self._directory: Any = SimpleNamespace(name=directory)
        self._leases = leases
        self._disk = disk
        self.device_of_hashes = Device(loop, process, rounding, disk)

    async def run(self) -> None:
        tokens = tokenizer()
        loaded = LoadedModel(
            *(None, tokens, {}, "hashes", Path(), None, CONTEXT, tokens.vocab_size, 0, {})  # type: ignore[arg-type]
        )
        self._maker = VISION
        self._model: Any = SimpleNamespace(
            is_loaded=True,
            loaded=loaded,
            dtype="float32",
            device=SimpleNamespace(name="hashes", busy_s=0.0),
            context_tokens=self._settings.max_context or CONTEXT,
            kv_bytes=_MOST_BYTES,
            makes=("answers",),
        )
        async with task_group() as self._starting, contextlib.AsyncExitStack() as stack:
            nc = await self._connect(self._directory, stack)
            js = nc.jetstream()
            if self._leases:
                await self._take_back(js)
            await streams.ensure(js, self._subjects, self._settings, self._constants)
            await self._serve(nc)

    async def _connect(self, directory: Any, stack: Any) -> Any:
        if self._leases:
            return await super()._connect(directory, stack)
        from worker.app import connect, shielded

        nc = self._nc = await connect(
            _WORLD, name="w", on_reconnected=self._reconnected, on_closed=self._closed
        )
        stack.push_async_callback(shielded, nc.close)
        self._members = Members(
            nc, self._subjects, worker=self._settings.worker, directory=self._directory.name, lost=self._fail
        )

        # Workers without records do not know of each other, but a slow worker must still answer pings.
        async def pong(message: Any) -> None:
            await message.respond(b"")

        await nc.subscribe(self._members.address(self._members.me, "ping"), cb=pong)
        return nc

    async def drain(self, *, on: bool) -> None:
        """Hand sessions to other workers (`on`), or take sessions again. NATS errors are ignored."""
        with contextlib.suppress(nats.errors.Error, APIError, OSError):
            if self.ready.is_set():
                await self._members.drain(on=on)

    def _build(self, ground: Groundwork, **groups: Any) -> Parts:
        copies = self._disk if self.stores else None
        return Parts(replace(ground, copies=copies), self.device_of_hashes, _metrics, **groups)

    @property
    def leftovers(self) -> Counter[str]:
        """Return what must not be there in an idle worker, such as running turns and waiting requests."""
        return held(self._parts, self.device_of_hashes)
