"""No token and no snapshot is made from failed evaluations, or from logits that are not finite.

A GPU reports a failed command buffer late and once. A CPU stands for it here: an evaluation sets all keys and
values on the device to 0, and raises an error.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
from engine_process import Process
from tiny_models import BLOCK, GREEDY, alone, answer, append, generate, key, prompt

from cache.kv.states import leaves
from cache.names.tokens import as_tokens
from worker.batch.batch import Batch
from worker.batch.row_sampler import Draw, RowSampling
from worker.batch.rows import Embedding, UnsoundError
from worker.batch.sampling import draw_all
from worker.device import machine
from worker.device.request import TurnRequest
from worker.device.turn import FaultedTurn, FinishedTurn, SampledTokens
from worker.engine.port import DeviceFaultError
from worker.models.model_files import ModelError

EVALUATE = mx.eval


@dataclass
class Buffers:
    """Makes the next `num_left` evaluations fail for whose calling frame `fails` returns true."""

    fails: Callable[[Any], bool] = lambda frame: False
    process: Process | None = None
    num_failed: int = 0
    num_left: int = 0
    launched: list[Any] = field(default_factory=list)

    def evaluate(self, *args: Any) -> None:
        if self.num_left and self.fails(sys._getframe(1)):
            self.num_left -= 1
            self.num_failed += 1
            self.zero()
            raise RuntimeError("[METAL] Command buffer execution failed")
        EVALUATE(*args)

    def zero(self) -> None:
        """Set all keys and values of turns and idle sessions on the device to 0."""
        runner = self.process.engine._device._runner
        batch = runner._batch
        every = [turn.caches or [] for turn in runner._scheduler.prefilling]
        every += [row.caches or [] for row in batch.rows]
        every += [idle.caches for idle in runner.idle_kv._resident.values()]
        for _, cache in (leaf for caches in every for leaf in leaves(caches)):
            if getattr(cache, "keys", None) is not None:
                cache.keys, cache.values = mx.zeros_like(cache.keys), mx.zeros_like(cache.values)

    def in_cut(self, frame: Any) -> bool:
        return frame.f_code.co_name == "_memory"

    def in_mixed_step(self, frame: Any) -> bool:
        return is_step(frame) and bool(frame.f_locals["pieces"]) and bool(frame.f_locals["self"].rows)

    def in_prefill(self, frame: Any) -> bool:
        return is_step(frame) and bool(frame.f_locals["pieces"])

    def in_step_ahead(self, frame: Any) -> bool:
        return is_step(frame) and any(frame.f_locals["launched"] is one for one in self.launched)

    def in_decoding(self, frame: Any) -> bool:
        return is_step(frame) and bool(frame.f_locals["self"].rows)


def is_step(frame: Any) -> bool:
    return frame.f_code.co_name == "step" and "launched" in frame.f_locals


@pytest.fixture
def buffers(monkeypatch) -> Buffers:
    made = Buffers()
    launch = Batch._launch_next

    def launched(batch: Batch, step: Any) -> Any:
        ahead = launch(batch, step)
        if ahead is not None:
            made.launched.append(ahead)
        return ahead

    monkeypatch.setattr(Batch, "_launch_next", launched)
    monkeypatch.setattr(machine, "fails_late", lambda: True)
    monkeypatch.setattr(mx, "eval", made.evaluate)
    return made


def start(process: Process, name: str, tokens: list[int], num: int) -> tuple[asyncio.Task[Any], list[int]]:
    growing = answer(num)
    run = process.engine.run(TurnRequest(key(name), as_tokens(tokens), answer=growing), lambda: False)
    return asyncio.create_task(run), growing.tokens


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():  # noqa: ASYNC110 - the device thread sets it
            await asyncio.sleep(0.001)


#: Tokens of an answer: more than a busy machine computes before a prompt beside it begins.
NUM = 8 * BLOCK
PLACES = ["in_cut", "in_mixed_step", "in_prefill", "in_step_ahead", "in_decoding"]


@pytest.mark.metal
@pytest.mark.parametrize(
    "place", PLACES, ids=lambda place: place.replace("_", " ").replace("cut", "copying kv")
)
async def test_no_token_and_no_snapshot_is_made_from_the_results_of_a_failed_gpu_evaluation(
    make_model, open_process, buffers, place
) -> None:
    """Answers and the failed step's prompt continue from snapshots; idle sessions are restored."""
    model = make_model("llama")
    texts = {name: prompt(3 * BLOCK + n, salt=n + 1) for n, name in enumerate(("a", "b", "c"))}
    idle = prompt(2 * BLOCK + 5, salt=9)
    async with open_process(model) as process:
        buffers.process = process
        await process.append(idle, "idle")
        tasks: dict[str, tuple[asyncio.Task[Any], list[int]]] = {}

        def have_begun() -> bool:
            return len(tasks) > 1 and all(len(tokens) > BLOCK + 2 for _, tokens in [*tasks.values()][:2])

        # Checked on the device thread: the answers may be over before this thread runs again.
        buffers.fails, buffers.num_left = lambda frame: have_begun() and getattr(buffers, place)(frame), 1
        tasks |= {name: start(process, name, texts[name], NUM) for name in ("a", "b")}
        await until(have_begun)
        if place in ("in_mixed_step", "in_prefill"):
            tasks["c"] = start(process, "c", texts["c"], NUM)
        for task, _ in tasks.values():
            await asyncio.wait_for(task, 60)
        assert buffers.num_failed == 1
        _, more, _ = await process.generate(idle, 10, name="idle")
        assert more == alone(model, idle, 10)[0]
        for name, (_, tokens) in tasks.items():
            assert tokens == alone(model, texts[name], NUM)[0], name
        assert await process.store.queue.drained(10)
    async with open_process(model) as process:
        for name, (_, tokens) in tasks.items():
            outcome, more, _ = await process.generate(texts[name] + tokens, 10, name=name)
            assert more == alone(model, texts[name] + tokens, 10)[0], name
            assert outcome.num_prefilled <= BLOCK


@pytest.mark.metal
async def test_an_answer_completes_even_if_copying_the_kv_of_its_last_tokens_fails(
    make_model, open_process, buffers
) -> None:
    model, tokens = make_model("llama"), prompt(BLOCK + 3)
    async with open_process(model) as process:
        buffers.process = process
        buffers.fails, buffers.num_left = buffers.in_cut, 1
        task, said = start(process, "s", tokens, 2)
        await until(lambda: buffers.num_failed == 1)
        assert (await task).complete
        assert said == alone(model, tokens, 2)[0]
        _, more, _ = await process.generate(tokens + said, 5)
        assert more == alone(model, tokens + said, 5)[0]


@pytest.mark.metal
async def test_a_prompt_that_makes_the_gpu_fail_every_time_ends_with_an_error_and_changes_no_other_answer(
    make_model, open_process, buffers
) -> None:
    """The prompt is tried twice. An answer beside it restarts as often as needed."""
    model, tokens = make_model("llama"), prompt(BLOCK + 3)

    def poisoned(frame: Any) -> bool:
        return is_step(frame) and any(piece.tokens[:2] == [95, 95] for piece in frame.f_locals["pieces"])

    async with open_process(model) as process:
        buffers.process = process
        buffers.fails, buffers.num_left = poisoned, 100
        task, said = start(process, "s", tokens, 40)
        await until(lambda: len(said) > 5)
        doomed, _ = start(process, "doomed", [95] * BLOCK, 5)
        with pytest.raises(DeviceFaultError, match="Command buffer"):
            await asyncio.wait_for(doomed, 60)
        assert buffers.num_failed == 2
        await asyncio.wait_for(task, 60)
        assert said == alone(model, tokens, 40)[0]


SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": RowSampling(temperature=0.8, seed=3),
    "top_p": RowSampling(temperature=0.8, top_p=0.9, seed=3),
    "penalised": RowSampling(repetition_penalty=1.2),
    "logprobs": RowSampling(top_logprobs=2),
}


@pytest.fixture
def model(build_model):
    return build_model("llama", tie_word_embeddings=False)


def spoil(model: Any, token: int, value: float = math.nan) -> None:
    """Set the embedding of one token to `value` (NaN or infinite), as in a damaged file."""
    model.model.embed_tokens.weight[token] = value
    mx.eval(model.parameters())  # on this thread, which has the stream of this change


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_an_answer_with_nan_or_infinite_logits_fails_and_a_concurrent_answer_completes(
    make_rig, model, sampling: RowSampling, value: float
) -> None:
    """The failing answer ends at the token after which the logits are not finite."""
    rig = make_rig(model)
    right, _ = alone(model, prompt(19), 12, sampling)
    beside, _ = alone(model, prompt(9, salt=5), 12)
    spared = {0, *prompt(19), *prompt(9, salt=5), *beside}
    at = next(i for i, token in enumerate(right) if i and token not in {*right[:i], *spared})
    spoil(model, right[at], value)
    turn, other = generate(prompt(19), 12, sampling), generate(prompt(9, salt=5), 12, name="other")
    rig.run(turn, other)
    end = rig.end(turn)
    assert isinstance(end, FaultedTurn)
    assert isinstance(end.error, UnsoundError)
    assert turn.request.answer.tokens == right[: at + 1]
    assert isinstance(rig.end(other), FinishedTurn)
    assert other.request.answer.tokens == beside


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_prompt_whose_embedding_is_nan_fails_and_concurrent_turns_complete(
    make_rig, build_model, kind
) -> None:
    """An answer that runs and a prompt of the same step complete."""
    model = build_model(kind, tie_word_embeddings=False)
    rig = make_rig(model)
    said, _ = alone(model, prompt(9, salt=5), 40)
    first, _ = alone(model, prompt(6, salt=9), 4)
    spoiled = min({*range(1, 96)} - {*prompt(9, salt=5), *prompt(6, salt=9), *said, *first})
    spoil(model, spoiled)
    running = generate(prompt(9, salt=5), 40, name="running")
    rig.device.submit(running)
    rig.wait(lambda events: any(isinstance(one, SampledTokens) for one in events))
    turn = append([spoiled] * 6, name="bad", embedding=Embedding())
    same = append(prompt(6, salt=9), name="same", embedding=Embedding())
    beside = generate(prompt(6, salt=9), 4, name="beside")
    rig.run(turn, same, beside)
    rig.finish(running)
    end = rig.end(turn)
    assert isinstance(end, FaultedTurn)
    assert isinstance(end.error, UnsoundError)
    assert all(isinstance(rig.end(one), FinishedTurn) for one in (same, beside, running))
    assert (running.request.answer.tokens, beside.request.answer.tokens) == (said, first)


def test_a_worker_refuses_a_model_whose_first_logits_are_nan(make_rig, model) -> None:
    spoil(model, 0)
    with pytest.raises(ModelError, match=r"is broken: the model's logits are no finite numbers.*--dtype"):
        make_rig(model)


def test_an_answer_completes_if_some_but_fails_if_all_of_its_logits_are_minus_infinity() -> None:
    """Models set the logits of ids without a token to minus infinity."""
    logits = mx.full((2, 8), -math.inf)
    logits[0, 3] = 1.0
    assert draw_all(logits, [Draw(GREEDY, 0)] * 2).are_sound.tolist() == [True, False]
