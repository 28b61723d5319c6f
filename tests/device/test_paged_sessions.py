"""Paged sessions have all KV on SSD and part of it on the device; relevant chunks are recalled."""

from __future__ import annotations

import asyncio
import gc
import queue
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine_process import Process
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import WIDE, append, key, loaded, prompt

from cache.disk import format as snapshot_format
from cache.kv import layers, paged
from cache.kv.paged import PagedCache, Pages
from cache.names.blocks import Span
from cache.names.policy import CHUNK, FULL, Policy
from cache.names.tokens import as_tokens
from worker import weighing as sizing
from worker.batch import batch_kinds, matching
from worker.batch.forward import Forward
from worker.batch.parts import OwnPart
from worker.device import cutter
from worker.device.request import TurnRequest
from worker.device.step_chooser import ChosenStep, StepChooser
from worker.device.turn import KvRequest
from worker.engine import kv_lookup

WINDOW = Policy(4, 4 * CHUNK)
POLICY = Policy.paged(9 * CHUNK + 4, [(3 * CHUNK + 5, 3 * CHUNK + 40)], sink=4)
MOST = POLICY.recall + (POLICY.window or 0)


@pytest.fixture(scope="module")
def model(build_model) -> Any:
    return build_model("llama", **WIDE)


def _run(
    forward: Forward, caches: list[Any], tokens: Sequence[int], end: int, *, most: int = 300
) -> mx.array:
    """Run tokens up to `end` in pieces of random lengths; return logits, (tokens, vocabulary)."""
    rng, found = random.Random(end), []
    while caches[0].offset < end:
        at = caches[0].offset
        num = min(rng.choice([1, 1, 2, CHUNK, most]), end - at)
        found.append(forward([OwnPart(caches, at, num)], list(tokens[at : at + num])))
        mx.eval(found[-1], [cache.state for cache in caches])
    return mx.concatenate(found)


def _under_masks(model: Any, tokens: Sequence[int], seen: np.ndarray) -> mx.array:
    """Run a whole session at once under the mask `seen`; return logits, (tokens, vocabulary)."""

    class Masked:
        offset = 0

        def make_mask(self, num: int, **_: Any) -> mx.array:
            return mx.array(seen)

        def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
            return keys, values

    logits: mx.array = model(mx.array([list(tokens)]), cache=[Masked() for _ in make_prompt_cache(model)])[0]
    return logits


def _stored(caches: list[PagedCache], tokens: Span) -> dict[str, mx.array]:
    cut = layers.cut(caches, tokens.start, tokens.end) or ()
    types = {"F32": np.float32, "U32": np.uint32}
    return {one.name: mx.array(np.frombuffer(one.data, types[one.dtype]).reshape(one.shape)) for one in cut}


@pytest.mark.parametrize("seed", range(3))
def test_paged_attention_over_chunks_read_from_disk_equals_full_attention_under_the_same_mask(
    model, seed: int
) -> None:
    """In every layer a token sees sinks, window, pinned chunks and recalled ones, each once, nothing else."""
    rng, num_tokens = random.Random(seed), 16 * CHUNK
    tokens, forward, caches = prompt(num_tokens, seed + 3), Forward(model), layers.make(model, POLICY)
    at, window = np.arange(num_tokens), POLICY.window or 0
    seen = (at[None] <= at[:, None]) & ((at[None] > at[:, None] - window) | (at[None] < POLICY.sink))
    disk: dict[int, dict[str, mx.array]] = {}
    pages = caches[0].pages
    found, num_replaced = [], 0
    while (start := caches[0].offset) < num_tokens:
        end = start + CHUNK
        found.append(_run(forward, caches, tokens, end))
        disk[start // CHUNK] = _stored(caches, Span(start, end))
        for chunk in range(num_tokens // CHUNK):  # a chunk is kept from when it begins to leave the window
            is_kept = chunk in pages.slots
            rows = (at >= start) & (at < end) & (at - window >= chunk * CHUNK)
            columns = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            if is_kept:
                seen[rows, columns] |= at[columns][None] <= at[rows][:, None] - window
        away = [one for one in range(POLICY.visible_from(end) // CHUNK) if one not in pages.slots]
        for chunk in rng.sample(away, min(2, len(away))):
            pages._mattered = np.array([rng.random() for _ in range(end // CHUNK)])
            pages._mattered[chunk] = 2.0
            was_full, before = -1 not in pages.slots, set(pages.slots)
            paged.recall(caches, disk[chunk], [Span(chunk * CHUNK, (chunk + 1) * CHUNK)])
            assert chunk in pages.slots
            assert was_full == len(before - {-1, *pages.slots})
            num_replaced += was_full
            assert 3 in pages.slots, "a pin stays"
    assert num_replaced > 3
    expected = _under_masks(model, tokens, seen)
    assert mx.abs(mx.concatenate(found) - expected).max().item() < 1e-4 * mx.abs(expected).max().item()


@pytest.mark.parametrize(
    ("num_tokens", "sketched"), [(200, None), (MOST, None), (MOST + 70, (1,)), (3 * MOST + 5, None)]
)
def test_a_paged_session_rebuilt_from_stored_blocks_gives_the_same_logits_as_before(
    model, num_tokens: int, sketched: tuple[int, ...] | None
) -> None:
    tokens, forward = prompt(num_tokens + 20), Forward(model)
    caches, stored = layers.make(model, POLICY, sketched=sketched), {}
    for start in range(0, num_tokens, 64):
        end = min(start + 64, num_tokens)
        _run(forward, caches, tokens, end)
        for name, array in _stored(caches, Span(start, end)).items():
            stored.setdefault(name, []).append(array)
    whole = {name: mx.concatenate(parts, axis=2) for name, parts in stored.items()}
    spans = POLICY.seen(num_tokens)
    held = {
        name: array
        if "sketch" in name
        else mx.concatenate([array[..., start:end, :] for start, end in spans], axis=2)
        for name, array in whole.items()
    }
    assert {name.split(".")[0] for name in held if "sketch" in name} == ({"1"} if sketched else {"0", "1"})
    rebuilt = layers.rebuild(held, layers.make(model, POLICY, sketched=sketched), num_tokens)
    if POLICY.visible_from(num_tokens):  # what was on the device beside pins comes back when it matters
        assert {one for one in rebuilt[0].pages.slots if one >= 0} == {3}
        chunks = [one for one in caches[0].pages.slots if one not in {-1, 3}]
        spans_back = [Span(one * CHUNK, (one + 1) * CHUNK) for one in sorted(chunks)]
        arrays = {
            name: mx.concatenate([array[..., one.start : one.end, :] for one in spans_back], axis=2)
            for name, array in whole.items()
            if "sketch" not in name
        }
        paged.recall(rebuilt, arrays, spans_back)
    assert sorted(rebuilt[0].pages.slots) == sorted(caches[0].pages.slots)
    expected = _run(forward, caches, tokens, num_tokens + 20, most=20)
    found = _run(forward, rebuilt, tokens, num_tokens + 20, most=20)
    assert mx.abs(found - expected).max().item() < 1e-4 * mx.abs(expected).max().item()


def test_the_layers_whose_attention_matches_repeated_tokens_keep_2_bit_keys(build_model) -> None:
    model = build_model("llama", **WIDE, num_hidden_layers=12, num_key_value_heads=4, rope_theta=1e12)
    for layer in model.layers:  # nothing is added to the embeddings
        layer.self_attn.o_proj.weight *= 0
        layer.mlp.down_proj.weight *= 0
    for layer in (2, 7):  # where a token attends to itself, wherever it was said
        attention = model.layers[layer].self_attn
        attention.q_proj.weight = attention.k_proj.weight = mx.eye(128)
    found = matching.find(model, Forward(model))
    assert len(found) == matching.num_sketched(12) == 4
    assert {2, 7} < set(found)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    layout = layers.layout(caches, list, found)
    assert {name.split(".")[0] for name, _, _ in layout.sketches} == set(map(str, found))
    assert layout.name(POLICY) != layers.layout(caches, list).name(POLICY), "neither finds the other's files"
    assert layers.sizes(caches, found).sketch_bytes == layers.sizes(caches).sketch_bytes // 3


async def test_a_step_of_a_long_paged_session_takes_no_more_memory_than_estimated(
    model, open_process, monkeypatch
) -> None:
    """The estimate is not so high, either, that it would refuse prompts that fit."""
    steps, learn = [], StepChooser.learn

    def noted(self: StepChooser, choice: ChosenStep, measured_bytes: int) -> None:
        if any(turn.num_cached > 2048 for turn, _ in choice.step.prefill):  # with all that is visible
            steps.append((choice.scratch_bytes, measured_bytes))
        learn(self, choice, measured_bytes)

    monkeypatch.setattr(StepChooser, "learn", noted)
    async with open_process(model, num_blocks=16) as process:
        await process.append(prompt(6000), policy=Policy.paged(2048, sink=4))
    assert len(steps) > 3
    assert all(measured <= estimated for estimated, measured in steps)
    # Twice the scores, which a CPU keeps once.
    assert max(steps)[0] < 3 * max(measured for _, measured in steps)


async def test_paged_sessions_restored_together_need_memory_only_for_the_part_that_each_keeps_on_the_device(
    model, open_process
) -> None:
    """If the KV of all their tokens were copied, some prompts would restart for lack of memory."""
    policy, num_tokens = Policy.paged(1024, sink=4), 7_000
    said = [prompt(num_tokens, salt=i + 1) for i in range(3)]
    async with open_process(model, num_blocks=16) as process:
        for i, tokens in enumerate(said):
            await process.append(tokens, name=f"s{i}", policy=policy)
        await process.store.queue.drained(10)
        size = process.engine._device.kv(policy).held(num_tokens)
    gc.collect()
    limit = mx.get_active_memory() + 3 * size + 2**23
    async with open_process(model, num_blocks=16, limit_bytes=limit) as process:
        asked = [
            process.append([*tokens, *prompt(200)], name=f"s{i}", policy=policy)
            for i, tokens in enumerate(said)
        ]
        assert [one.num_prefilled for one in await asyncio.gather(*asked)] == [200] * 3


def test_a_model_is_served_without_2_bit_keys_if_choosing_layers_for_them_fails(model, monkeypatch) -> None:
    assert batch_kinds.batch_for(model).sketched == (0, 1)
    monkeypatch.setattr(matching, "find", lambda *_: 1 // 0)
    batch = batch_kinds.batch_for(model)
    assert (batch.sketched, batch.has_rings) == ((), True)


async def test_the_supervisor_estimates_the_same_kv_per_token_as_a_worker_for_a_model_with_windows(
    build_model, open_process
) -> None:
    """Two of eight layers keep all tokens, and neither is among the first."""
    model = build_model("exaone4", **WIDE, num_hidden_layers=8)
    async with open_process(model, num_blocks=8) as process:
        kept = process.engine._device.kv(POLICY)
    sized = sizing.measure(loaded(model), POLICY, block=64, max_context=2048, limit_bytes=2**26)
    assert sized.kv.bytes_per_token == kept.bytes_per_token > 0


def test_in_a_paged_session_the_most_relevant_chunk_replaces_the_least_relevant_chunk_in_memory() -> None:
    pages = Pages(Policy.paged(6 * CHUNK + 4, sink=4))
    assert [pages.assign(chunk) for chunk in range(4)] == [0, 1, 2, None]
    # By page, four in a chunk: each layer's notes, of which the largest counts.
    first = {0: 0.5, 5: 0.1, 9: 0.3, 13: 0.1, 25: 0.2}
    pages.note(mx.array([first.get(page, 0.0) for page in range(32)]))
    pages.note(mx.array([{13: 0.104}.get(page, 0.0) for page in range(32)]))
    assert pages.choose(12 * CHUNK) == [6], "a little more is not enough to change places"
    assert pages.take(6) == 1
    assert pages.take(4) is None, "it matters less than all that are there"
    assert sorted(pages.slots) == [0, 2, 6]
    pages.trim(7 * CHUNK - 1)
    assert sorted(pages.slots) == [-1, 0, 2]


def test_a_paged_session_reads_a_chunk_that_only_the_last_question_matches_before_one_that_all_match() -> (
    None
):
    pages = Pages(Policy.paged(8 * CHUNK + 4, sink=4))
    for asked in ({5: 0.9, 29: 0.3}, {5: 0.9, 29: 0.3}, {5: 0.9, 29: 0.3}, {5: 0.9, 29: 0.8}):
        pages.note(mx.array([asked.get(page, 0.0) for page in range(40)]))
        chosen = pages.choose(20 * CHUNK)[0]
    assert chosen == 7


@pytest.mark.parametrize(("page", "chunks"), [(21, [5, 8]), (22, [5, 8]), (23, [5, 6, 8]), (20, [5, 4, 8])])
def test_in_a_paged_session_a_key_match_at_the_edge_of_a_chunk_also_selects_the_neighbouring_chunk(
    page: int, chunks: list[int]
) -> None:
    pages = Pages(Policy.paged(8 * CHUNK + 4, sink=4))
    for layer in ({page: 1.0}, {33: 0.5}):
        pages.note(mx.array([layer.get(one, 0.0) for one in range(40)]))
    assert pages.choose(20 * CHUNK)[: len(chunks)] == chunks


async def _answered(process: Process, tokens: list[int], num: int) -> tuple[Any, list[int]]:
    outcome, answer, _ = await process.generate(tokens, num, policy=POLICY)
    return outcome, answer


async def test_a_paged_turn_reads_its_most_relevant_chunks_from_disk_and_a_restart_loads_only_part_of_the_kv(
    model, open_process, monkeypatch
) -> None:
    """The prompt attends to the rest of the session from disk, which is not kept on the device."""
    wanted, read, seen_bytes = [2, 9], [], []
    recall = paged.recall
    monkeypatch.setattr(Pages, "choose", lambda self, _: [c for c in wanted if c not in self.slots])
    monkeypatch.setattr(Pages, "_value", lambda _, chunk: 1.0 if chunk in wanted else 0.0)
    monkeypatch.setattr(paged, "recall", lambda *args: read.append(args[2]) or recall(*args))
    tokens = prompt(60 * CHUNK)
    async with open_process(model, num_blocks=8) as process:
        await process.append(tokens, policy=POLICY)
        await process.store.queue.drained(10)  # what is not on the disk yet cannot come back
        outcome, answer = await _answered(process, [*tokens, 5, 6, 7], 20)
        assert (outcome.num_prefilled, len(answer)) == (4, 20)
        per_token = process.engine._device.served.estimator.kv.bytes_per_token
        sketch = process.engine._device.served.estimator.kv.sketch_bytes
        num = len(tokens) + 3 + 19
        assert outcome.live_bytes == (POLICY.most_tokens or 0) * per_token + num * sketch
        assert {9} <= {span.start // CHUNK for spans in read for span in spans} <= set(wanted)
        await process.store.queue.drained(10)
    read.clear()
    async with open_process(model, num_blocks=8) as process:
        end_past = process.store.kv.end_past
        monkeypatch.setattr(
            process.store.kv, "end_past", lambda past: seen_bytes.append(past.size_bytes) or end_past(past)
        )
        session = [*tokens, 5, 6, 7, *answer, 8, 9]
        outcome, _ = await _answered(process, session, 5)
        assert outcome.num_prefilled <= 3
        assert {span.start // CHUNK for spans in read for span in spans} == set(wanted)
        seen = sum(end - start for start, end in POLICY.seen(len(session))) + len(wanted) * CHUNK
        most = (seen + 3 * 64) * per_token + (len(session) + 3 * 64) * sketch
        assert process.store.stats().restored_bytes - sum(seen_bytes) < 1.1 * most
        assert len(session) * (per_token + sketch) > 3 * most


async def test_every_chunk_of_a_paged_session_before_the_window_is_ranked_for_reading_it_from_disk(
    model, open_process, monkeypatch
) -> None:
    """This includes chunks at the end of a long prompt."""
    tokens, considered, choose = prompt(41 * CHUNK), [], Pages.choose

    def noted(self: Pages, position: int) -> list[int]:
        found = choose(self, position)
        considered.append(len(self._mattered))
        return found

    monkeypatch.setattr(Pages, "choose", noted)
    async with open_process(model, num_blocks=8) as process:
        await process.generate([*tokens, 5, 6, 7], 1, policy=POLICY)
    assert considered[-1] >= (len(tokens) - (POLICY.window or 0)) // CHUNK


async def test_a_paged_answer_completes_without_a_chunk_that_is_no_longer_on_disk(
    model, open_process, monkeypatch
) -> None:
    monkeypatch.setattr(Pages, "choose", lambda self, _: [c for c in [2, 9] if c not in self.slots])
    monkeypatch.setattr(Pages, "_value", lambda _, chunk: float(chunk in {2, 9}))
    tokens = prompt(16 * CHUNK)

    async def none(*_: Any) -> tuple[tuple[Span, ...], dict[str, mx.array]]:
        return (), {}

    async with open_process(model, num_blocks=8) as process:
        await process.append(tokens, policy=POLICY)
        monkeypatch.setattr(process.store.kv, "recall", none)
        outcome, answer = await _answered(process, [*tokens, 5], 12)
        assert (outcome.num_prefilled, len(answer)) == (2, 12)


async def test_a_paged_prompt_waits_for_a_slow_disk_until_all_its_kv_blocks_are_stored(
    model, open_process
) -> None:
    """KV leaves the device only once its write is queued."""
    tokens = prompt(20 * CHUNK)
    async with open_process(model, num_blocks=8) as process:
        begun, refused = time.monotonic(), 0

        def room() -> int:
            nonlocal refused
            is_full = time.monotonic() < begun + 0.4
            refused += is_full
            return 0 if is_full else process.store.queue.vacant_bytes()

        process.engine._device.cut_snapshots(room)
        outcome = await process.append(tokens, policy=POLICY)
        assert outcome.complete
        await process.store.queue.drained(10)
        chain = process.store.kv.chain(key("s").tenant, POLICY)
        match = process.store.kv.match(chain, as_tokens(tokens))
        process.store.kv.release(match)
        assert refused > 3
        assert match.num_tokens > 19 * CHUNK


async def test_a_paged_prompt_whose_prefill_pieces_exceed_the_write_queue_still_stores_all_its_kv_blocks(
    model, open_process, monkeypatch
) -> None:
    """The queue takes six of a piece's seven blocks; the disk writes a block in 20 ms."""
    monkeypatch.setattr(cutter, "PATIENCE_S", 600.0)
    write = snapshot_format.write
    monkeypatch.setattr(snapshot_format, "write", lambda *args: time.sleep(0.02) or write(*args))
    async with open_process(model, num_blocks=8) as process:
        block_bytes = process.engine._device.kv(POLICY).snapshot(CHUNK, at=CHUNK)
    async with open_process(model, "small", num_blocks=8, queue_bytes=int(6.5 * block_bytes)) as process:
        async with asyncio.timeout(60):
            outcome = await process.append(tokens := prompt(40 * CHUNK + 1), policy=POLICY)
        assert outcome.num_prefilled == 40 * CHUNK
        await process.store.queue.drained(10)
        assert process.store.stats().dropped == {}
        chain = process.store.kv.chain(key("s").tenant, POLICY)
        assert process.store.kv.find(chain, as_tokens(tokens)).num_tokens == 40 * CHUNK


@pytest.mark.parametrize(("kind", "num_dropped"), [("llama", 0), ("gemma3_text", 4)])
async def test_a_paged_turn_waits_for_a_slow_disk_and_prefills_dropped_kv_blocks_a_second_time(
    build_model, open_process, monkeypatch, kind: str, num_dropped: int
) -> None:
    """The disk takes a block every 50 ms; each of the first waits may find the queue dropped."""
    monkeypatch.setattr(kv_lookup, "PATIENCE_S", 0.35)
    write = snapshot_format.write
    monkeypatch.setattr(snapshot_format, "write", lambda *args: time.sleep(0.05) or write(*args))
    model = build_model(kind, **WIDE)
    async with open_process(model, num_blocks=8) as process:
        past, ends = process.store.kv.past, list[int]()

        async def dropping(chain: Any, tokens: Any, end: int, patience_s: float) -> Any:
            ends.append(end)
            if len(ends) <= num_dropped:
                process.store.queue.free_memory()
            return await past(chain, tokens, end, patience_s)

        monkeypatch.setattr(process.store.kv, "past", dropping)
        _, said, _ = await process.generate(tokens := prompt(40 * CHUNK), 3, policy=POLICY)
        assert len(said) == 3
        again = await process.append([*tokens, *said], policy=POLICY)
        assert again.num_prefilled <= 2


@pytest.mark.parametrize(("kind", "policy"), [("gemma3_text", FULL), ("gpt_oss", POLICY)], ids=str)
async def test_a_model_with_windows_shorter_than_a_block_stores_all_blocks_after_a_restart_inside_a_block(
    build_model, open_process, kind: str, policy: Policy
) -> None:
    """The restart is within a block, whose beginning has left the windows."""
    model, tokens = build_model(kind, **WIDE), prompt(20 * CHUNK + 40)
    for _ in range(3):
        async with open_process(model, num_blocks=8) as process:
            outcome, said, _ = await process.generate(tokens, 3, policy=policy)
            assert outcome.num_prefilled <= 20 * CHUNK + 40
            tokens = [*tokens, *said]
            assert await process.store.queue.drained(10)
            chain = process.store.kv.chain(key("s").tenant, policy)
            assert process.store.kv.find(chain, tokens).num_tokens == len(tokens) - 1
            tokens += prompt(20 * CHUNK)


async def test_a_paged_turn_cancelled_while_its_blocks_wait_to_be_written_ends_at_once(
    model, open_process, monkeypatch
) -> None:
    """Prefill waits until all KV that has left the device is on disk."""
    monkeypatch.setattr(kv_lookup, "PATIENCE_S", 600.0)
    tokens, write, may_end = prompt(40 * 64), snapshot_format.write, threading.Event()
    monkeypatch.setattr(snapshot_format, "write", lambda *args: may_end.wait() and write(*args))
    async with open_process(model, num_blocks=8) as process:
        engine, cancelled = process.engine, False
        running = asyncio.create_task(
            engine.run(TurnRequest(key("s"), as_tokens(tokens), policy=POLICY), lambda: cancelled)
        )
        await asyncio.sleep(0.5)
        assert not running.done()
        cancelled = True
        engine.cancel(key("s"))
        async with asyncio.timeout(20):
            await running
        may_end.set()


def test_a_restore_that_lacks_memory_does_not_wait_for_a_turn_that_was_cancelled_while_waiting_for_kv(
    model, make_rig
) -> None:
    rig = make_rig(model, block_tokens=64, room=lambda: 2**30)
    turn = append(prompt(40 * 64), policy=POLICY)
    rig.device.submit(turn)
    rig.wait(lambda events: any(isinstance(one, KvRequest) for one in events))
    rig.device.cancel(turn)
    rig.finish(turn)
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
    rig.device.reserve_room(key("large"), 10**9, answers.put)
    assert answers.get(timeout=20) is False


@pytest.mark.parametrize("is_hanging", [False, True])
async def test_a_rewind_of_a_paged_session_waits_for_blocks_on_a_slow_disk_but_not_on_a_hung_disk(
    model, open_process, monkeypatch, is_hanging: bool
) -> None:
    monkeypatch.setattr(kv_lookup, "SETTLE_S", 0.2 if is_hanging else 60.0)
    tokens, write, may_end = prompt(40 * 64), snapshot_format.write, threading.Event()

    def slow(*args: Any) -> None:
        may_end.wait()
        write(*args)

    monkeypatch.setattr(snapshot_format, "write", slow)
    async with open_process(model, num_blocks=8) as process:
        await process.append(tokens, policy=WINDOW)
        assert process.store.stats().in_flight == 40
        if not is_hanging:
            threading.Timer(0.3, may_end.set).start()
        outcome = await process.append(tokens[: 12 * 64 + 3], policy=WINDOW)
        assert outcome.complete
        assert outcome.num_prefilled == (12 * 64 if is_hanging else 0) + 2
        may_end.set()
