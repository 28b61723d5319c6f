"""Prompts of paged sessions attend to all earlier tokens, whose KV is read from SSD layer by layer."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import structlog
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import WIDE, answer, append, key, prompt

from cache.disk import stored_past
from cache.disk.codec import PLAIN
from cache.disk.encryption import EncryptedCodec
from cache.disk.stored_past import StoredPast
from cache.kv import layers, paged
from cache.names.blocks import Span
from cache.names.errors import LostPastError
from cache.names.policy import CHUNK, FULL, SLACK, Policy
from cache.names.tokens import as_tokens, pack
from tests.matrices import first
from worker.batch.forward import Forward
from worker.batch.parts import OwnPart
from worker.device import cutter
from worker.device.request import TurnRequest
from worker.engine import kv_lookup
from worker.engine.kv_lookup import TurnSnapshots
from worker.engine.port import DeviceFaultError, StoppingError

POLICY = Policy.paged(9 * CHUNK + 4, [(3 * CHUNK + 5, 3 * CHUNK + 40)], sink=4)
HELD = (POLICY.window or 0) + SLACK
#: A window of as many tokens as `POLICY` keeps on the device; its prompts see only these.
WINDOW = Policy(4, 9 * CHUNK)


@pytest.fixture(scope="module")
def model(build_model) -> Any:
    return build_model("llama", **WIDE)


def test_the_cache_name_of_a_paged_policy_contains_its_numbers_and_the_word_exact() -> None:
    """Because of the word, KV that an older version stored after an inexact prefill is not found."""
    assert str(POLICY) == "paged(4,256,320,197-232,exact)"


class Kept:
    """Earlier KV of a session, kept in memory, which `parts` yields as if it came from SSD."""

    def __init__(self, end: int, held: dict[str, mx.array], part: int) -> None:
        self.end = end
        self._held = held
        self._part = part

    def parts(self, layer: str, then: str | None) -> Iterator[tuple[list[mx.array], list[mx.array]]]:
        for at in range(0, self.end, self._part):
            span = slice(at, min(at + self._part, self.end))
            cut = [part[..., span, :] for name, part in self._held.items() if name.startswith(f"{layer}.")]
            yield cut[: len(cut) // 2], cut[len(cut) // 2 :]


def keep(held: dict[str, mx.array], caches: list[Any], start: int, end: int) -> None:
    for one in layers.cut(caches, start, end) or ():
        if "sketch" not in one.name:
            flat = mx.array(np.frombuffer(one.data, np.uint8))
            array = flat.view({"F32": mx.float32, "BF16": mx.bfloat16}[one.dtype]).reshape(one.shape)
            held[one.name] = mx.concatenate([held[one.name], array], axis=2) if one.name in held else array


def exactly(forward: Forward, caches: list[Any], tokens: list[int], pieces: list[int], part: int) -> mx.array:
    held: dict[str, mx.array] = {}
    found, at, first = [], 0, paged.first(caches)
    assert first is not None
    pages = first.pages
    for num in pieces:
        pages.sees_all, pages.past = True, Kept(first.num_passed, held, part)
        found.append(forward([OwnPart(caches, at, num)], tokens[at : at + num]))
        mx.eval(found[-1], [cache.state for cache in caches])
        pages.sees_all, pages.past = False, None
        keep(held, caches, at, at + num)
        at += num
    return mx.concatenate(found)


#: A seed divides the prompts of all cases in the same way; `make soak` runs three.
EXACT = [
    pytest.param(*case, seed, marks=pytest.mark.soak if seed else ())
    for case in (("llama", mx.float32, 1e-4), ("gpt_oss", mx.float32, 1e-4), ("llama", mx.bfloat16, 0.1))
    for seed in range(3)
]


@pytest.mark.parametrize(("kind", "dtype", "tolerance", "seed"), EXACT)
def test_a_paged_prompt_prefilled_in_pieces_of_any_size_has_the_logits_of_full_attention(
    build_model, kind: str, dtype: mx.Dtype, tolerance: float, seed: int
) -> None:
    model, rng = build_model(kind, **WIDE), random.Random(seed)
    model.set_dtype(dtype)
    tokens, pieces, caches = prompt(5 * HELD + 7, seed), list[int](), layers.make(model, POLICY, rings=True)
    most = layers.most_run(caches, 16)
    while (left := len(tokens) - sum(pieces)) > 0:
        pieces.append(min(rng.choice([1, 17, CHUNK, 200, most]), left))
    found = exactly(Forward(model), caches, tokens, pieces, rng.choice([50, 128, 1024]))
    expected = model(mx.array([tokens]), cache=make_prompt_cache(model))[0]
    assert mx.abs(found - expected).max().item() < tolerance * mx.abs(expected).max().item()
    assert paged.first(caches).num_passed > 3 * HELD, "most of it has left the device"


def test_the_generated_tokens_of_a_paged_session_attend_to_only_a_part_of_the_session(build_model) -> None:
    model = build_model("llama", **WIDE)
    forward, tokens = Forward(model), prompt(3 * HELD)
    caches = layers.make(model, POLICY)
    exactly(forward, caches, tokens, [HELD] * 3, 128)
    found = forward([OwnPart(caches, 3 * HELD, 1)], [5])
    expected = model(mx.array([[*tokens, 5]]), cache=make_prompt_cache(model))[0, -1:]
    assert mx.abs(found - expected).max().item() > 1e-3 * mx.abs(expected).max().item()


def test_a_paged_prefill_raises_an_error_if_tokens_between_stored_kv_and_device_kv_are_missing(
    build_model,
) -> None:
    model = build_model("llama", **WIDE)
    forward, tokens, caches = Forward(model), prompt(3 * HELD), layers.make(model, POLICY)
    exactly(forward, caches, tokens, [HELD, HELD], 128)
    caches[0].pages.sees_all = True
    caches[0].pages.past = Kept(caches[0].num_passed - 1, {}, 128)
    with pytest.raises(ValueError, match="not the past"):
        forward([OwnPart(caches, 2 * HELD, 1)], [5])


async def test_a_paged_prompt_with_a_damaged_stored_block_is_prefilled_again_from_that_block_on(
    model, open_process
) -> None:
    tokens = prompt(50 * CHUNK)
    async with open_process(model, num_blocks=8) as process:
        await process.append(tokens[: 45 * CHUNK], policy=POLICY)
        await process.store.queue.drained(10)
        match = process.store.kv.match(process.store.kv.chain(key("s").tenant, POLICY), tokens)
        process.store.kv.release(match)
        path = process.store._folder.path(match.nodes[12].digest)
    async with open_process(model, num_blocks=8) as process:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        outcome, _, bits = await process.generate(tokens, 1, policy=POLICY)
        assert outcome.num_prefilled == 38 * CHUNK
        assert process.store.stats().rejected == 1
    expected = model(mx.array([tokens]), cache=make_prompt_cache(model))[0, -1]
    assert np.abs(np.frombuffer(bits[0], np.float32) - np.array(expected)).max() < 1e-3


async def test_erasing_a_session_deletes_its_quarantined_block_once_no_turn_uses_the_block(
    model, open_process, tmp_path
) -> None:
    tokens = prompt(50 * CHUNK)
    async with open_process(model, num_blocks=8) as process:
        await process.append(tokens[: 45 * CHUNK], policy=POLICY)
        await process.store.queue.drained(10)
        tenant, asked = key("s").tenant, as_tokens(tokens)
        chain = process.store.kv.chain(tenant, POLICY)
        past = await process.store.kv.past(chain, asked, 40 * CHUNK, 1.0)
        assert past is not None
        snapshots = TurnSnapshots(process.store, chain, asked)
        snapshots._past = past
        path = process.store._folder.path(past.chain.files[12].digest)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert not (await process.store.eraser.erase(tenant, pack(asked))).settled
        with pytest.raises(LostPastError, match="damaged"):
            list(past.parts("1"))
        assert len(list((tmp_path / "kv" / "quarantine").iterdir())) == 1
        snapshots.release()
        assert (await process.store.eraser.erase(tenant, pack(asked))).settled
        assert await process.store.queue.drained(10)
        assert list((tmp_path / "kv" / "quarantine").iterdir()) == []


async def test_a_paged_turn_fails_with_the_reason_if_no_kv_block_can_be_saved_to_disk(
    model, open_process, monkeypatch
) -> None:
    monkeypatch.setattr(cutter, "PATIENCE_S", 0.1)
    monkeypatch.setattr(kv_lookup, "PATIENCE_S", 0.1)
    async with open_process(model, num_blocks=8) as process:
        monkeypatch.setattr(process.store.kv, "save", lambda *_: False)
        with pytest.raises(DeviceFaultError, match="the disk lacks some of it"):
            await process.append(prompt(50 * CHUNK), policy=POLICY)
        monkeypatch.undo()
        outcome = await process.append(prompt(50 * CHUNK), policy=POLICY)
        assert outcome.num_prefilled == 50 * CHUNK - 1


def test_a_paged_prompt_that_waits_for_the_disk_does_not_delay_other_prompts(make_rig, model) -> None:
    """Its tenant would be next, and it would run alone; it waits for room in the writer's queue."""
    rig = make_rig(model, block_tokens=CHUNK, room=lambda: 0)
    spans = [Span(at, at + CHUNK) for at in range(0, 39 * CHUNK, CHUNK)]
    paged = append(prompt(40 * CHUNK), name="paged", policy=POLICY, spans=spans)
    rig.device.submit(paged)
    rig.run(append(prompt(5 * CHUNK), name="other", tenant="other"))  # else it would end after 30 s
    assert rig.chunk_ends(paged) == []
    rig.device.cancel(paged)
    rig.finish(paged)


@pytest.mark.parametrize("seed", first(range(4), 2))
async def test_paged_prompts_have_the_logits_of_full_attention_after_rewinds_forks_and_restarts(
    model, open_process, seed: int
) -> None:
    """An answer has one token, which is drawn from the prompt's logits and prefilled with the next prompt.

    Every other seed has encrypted snapshots. Behind a restart, earlier KV is on disk alone.
    """
    codec = EncryptedCodec(bytes(range(32))) if seed % 2 else PLAIN
    rng, sessions = random.Random(seed), {"a": prompt(8 * CHUNK, seed)}
    for _ in range(3):
        async with open_process(model, num_blocks=8, codec=codec) as process:
            for _ in range(4):
                name = rng.choice(sorted(sessions))
                tokens = sessions[name]
                match rng.choice(["append", "append", "rewind", "fork"]):
                    case "append":
                        tokens = [*tokens, *prompt(rng.choice([1, 30, 5 * CHUNK, 700]), rng.randrange(99))]
                    case "rewind":
                        tokens = tokens[: rng.randrange(CHUNK, len(tokens))]
                    case "fork":
                        name, tokens = f"{name}{seed}", tokens[: rng.randrange(CHUNK, len(tokens))]
                _, drawn, bits = await process.generate(tokens, 1, name=name, policy=POLICY)
                expected = np.array(model(mx.array([tokens]))[0, -1])
                assert np.abs(np.frombuffer(bits[0], np.float32) - expected).max() < 1e-3
                sessions[name] = [*tokens, *drawn]


async def test_a_paged_prompt_whose_stored_kv_is_lost_does_not_change_a_concurrent_answer(
    model, open_process
) -> None:
    tokens = prompt(50 * CHUNK)
    async with open_process(model, num_blocks=8) as process:
        await process.append(tokens[: 40 * CHUNK], policy=POLICY)
        await process.store.queue.drained(10)
        process.engine.forget(key("s"))
        chain = process.store.kv.chain(key("s").tenant, POLICY)
        match = process.store.kv.match(chain, tokens)
        process.store.kv.release(match)
        process.store._folder.path(match.nodes[20].digest).unlink()
        begun = asyncio.Event()

        async def publish(*_: object) -> None:
            begun.set()

        growing = answer(1000)
        beside = process.engine.run(
            TurnRequest(key("beside"), as_tokens(range(40)), answer=growing),
            lambda: False,
            publish=publish,
        )
        answering = asyncio.create_task(beside)
        await begun.wait()
        with structlog.testing.capture_logs() as logged:
            outcome = await process.append(tokens, policy=POLICY)
        assert [one["event"] for one in logged].count("a turn lacks KV on disk") == 1
        assert not answering.done()
        assert process.store.stats().rejected == 1
        assert outcome.num_prefilled == len(tokens) - 20 * CHUNK - 1
        await answering
        assert len(growing.tokens) == 1000


async def test_a_paged_prompt_starts_no_further_disk_reads_while_an_earlier_disk_read_hangs(
    model, open_process, monkeypatch
) -> None:
    """It would stop the answers beside it, too."""
    answers, num_begun, tokens = threading.Event(), 0, as_tokens(prompt(40 * CHUNK))

    def hang(*_: object) -> None:
        nonlocal num_begun
        num_begun += 1
        answers.wait()

    async with open_process(model, num_blocks=8) as process:
        await process.append([*tokens], policy=POLICY)
        await process.store.queue.drained(10)
        chain = process.store.kv.chain(key("s").tenant, POLICY)
        past = await process.store.kv.past(chain, tokens, 39 * CHUNK, 1.0)
        assert past is not None
        monkeypatch.setattr(stored_past, "read_chain", hang)
        monkeypatch.setattr(stored_past, "_READ_S", 0.2)
        for _ in range(3):
            with pytest.raises(LostPastError, match="does not answer"):
                await asyncio.to_thread(list, past.parts("1"))
        answers.set()
    assert num_begun == 2, "the first part, and the second in advance"


@pytest.mark.parametrize("end", ["cancel", "stop"])
async def test_a_paged_turn_that_cannot_read_its_stored_kv_can_be_cancelled_or_interrupted_by_a_worker_stop(
    model, open_process, monkeypatch, end: str
) -> None:
    """It is cancelled, or answered after the restart, whatever the disk did meanwhile."""
    begun, is_ended = threading.Event(), threading.Event()

    def parts(*_: object) -> Iterator[Any]:
        begun.set()
        assert is_ended.wait(20)
        raise LostPastError("the disk does not answer")
        yield

    monkeypatch.setattr(StoredPast, "parts", parts)
    async with open_process(model, num_blocks=8) as process:
        turn = asyncio.create_task(process.append(prompt(50 * CHUNK), policy=POLICY))
        assert await asyncio.to_thread(begun.wait, 20)
        process.engine.cancel(key("s")) if end == "cancel" else process.engine.stop()
        is_ended.set()
        if end == "cancel":
            assert not (await turn).complete
        else:
            with pytest.raises(StoppingError):
                await turn


async def test_a_paged_prompt_with_8_bit_kv_has_nearly_the_logits_of_full_attention(
    make_model, open_process
) -> None:
    model, tokens, found = make_model("llama", 8), prompt(40 * CHUNK + 9), []
    for policy in (FULL, POLICY, WINDOW):
        async with open_process(model, str(policy), num_blocks=8) as process:
            await process.append(tokens[: 30 * CHUNK + 5], policy=policy)
            _, _, bits = await process.generate(tokens, 1, policy=policy)
            found.append(np.frombuffer(bits[0], np.float32))
    full, paged, partly = found
    assert np.abs(full - paged).max() < 0.1 * np.abs(full - partly).max()
