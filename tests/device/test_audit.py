"""Stored KV is computed again, by an idle worker or by a command; what differs is found and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_process import IDENTITY, Process
from mlx.utils import tree_map
from parts import until
from tiny_models import BLOCK, answer, key, loaded

from cache.admin.stored_blocks import StoredBlocks
from cache.disk.codec import PLAIN
from cache.names.blocks import Span
from cache.names.tokens import as_tokens
from worker.device.device import Device
from worker.device.request import AuditedBlock, TurnRequest
from worker.device.served_model import DeviceOptions
from worker.engine import audit
from worker.observe.telemetry import TenantCounters
from worker.recomputation import Recomputation, compare, engine_on

PROMPT = [1 + i % 90 for i in range(6 * BLOCK + 3)]


@asynccontextmanager
async def auditing(opened: AbstractAsyncContextManager[Process]) -> AsyncIterator[Process]:
    """Run a `Process` that audits all restored blocks."""
    async with opened as process:
        assert process.engine._audit is not None
        process.engine._audit._one_in = 1
        task = asyncio.create_task(process.engine.chores["audit"](), name="audit")
        try:
            yield process
        finally:
            task.cancel()


async def audited(process: Process, num: int) -> int:
    """Wait until `num` blocks were audited; return how many were wrong."""
    totals = process.engine._telemetry.totals
    await until(lambda: totals.audited_blocks >= num)
    return totals.wrong_blocks


async def stored(opened: AbstractAsyncContextManager[Process]) -> list[int]:
    """Answer `PROMPT`, store its KV, and return the answer."""
    async with opened as process:
        _, said, _ = await process.generate(PROMPT, 4)
        assert await process.store.queue.drained(5)
        return said


@pytest.mark.parametrize(("kind", "kv_bits"), [("llama", 4), ("qwen3_next", None)])
async def test_the_kv_audit_recomputes_restored_blocks_and_reports_no_correct_block_as_wrong(
    make_model, open_process, kind, kv_bits
) -> None:
    model = make_model(kind, kv_bits)
    said = await stored(open_process(model))
    async with auditing(open_process(model)) as process:
        tenants = process.engine._telemetry.tenants = TenantCounters(1)
        found, again, _ = await process.generate(PROMPT, 4)
        figures = tenants.figures({})
        assert found.num_prefilled <= 3
        assert again == said
        assert await audited(process, 6) == 0
        assert tenants.figures({}) == figures, "no tenant has asked for an audit"
        assert process.engine._telemetry.totals.prefilled_tokens == found.num_prefilled
        found, _, _ = await process.generate([*PROMPT, *said, 5], 1)
        assert found.num_prefilled <= 2, "the session's KV is still on the device"


@pytest.mark.parametrize("is_used", [False, True], ids=["block not in use", "block in use by a turn"])
async def test_the_kv_audit_quarantines_a_wrong_block_and_removes_all_later_blocks_that_continue_it(
    build_model, open_process, tmp_path, monkeypatch, is_used
) -> None:
    """Also if a turn has restored it just before: its answer goes on, but leaves no KV."""
    await stored(open_process(build_model("llama")))
    other = build_model("llama")
    other.update(tree_map(lambda w: w + mx.random.normal(w.shape) * 0.1, other.parameters()))
    mx.eval(other.parameters())
    drawn = iter([1, 1, 0, 1, 1, 1])  # the third of six blocks is audited
    monkeypatch.setattr(audit.random, "randrange", lambda stop: next(drawn, 1))
    async with auditing(open_process(other)) as process:
        begun, goes_on, turns = asyncio.Event(), asyncio.Event(), list[asyncio.Task[Any]]()
        condemn = process.store.kv.condemn

        async def publish(_: object) -> bool:
            begun.set()
            return await goes_on.wait()

        async def condemn_beside(*args: Any) -> str:
            if is_used:
                asked = TurnRequest(key("used"), as_tokens(PROMPT), answer=answer(2 * BLOCK))
                turns.append(asyncio.create_task(process.engine.run(asked, lambda: False, publish)))
                await begun.wait()
            return await condemn(*args)

        monkeypatch.setattr(process.store.kv, "condemn", condemn_beside)
        await process.generate(PROMPT, 1)
        assert await audited(process, 1) == 1
        goes_on.set()
        await asyncio.gather(*turns)
        assert await process.store.queue.drained(5)
        assert len(list((tmp_path / "kv" / "quarantine").iterdir())) == 1
        assert process.store.stats().stored == 2
        found, _, _ = await process.generate(PROMPT, 1, name="used" if is_used else "s")
        assert found.num_cached == 2 * BLOCK, "also the session's KV on the device is gone"


async def test_the_kv_audit_skips_an_evicted_block_and_releases_the_snapshots_of_the_blocks_before_it(
    make_model, open_process, monkeypatch
) -> None:
    model = make_model("llama")
    await stored(open_process(model))
    drawn = iter([0, 1, 1, 0, 1, 1])  # the first and the fourth of six blocks are audited
    monkeypatch.setattr(audit.random, "randrange", lambda stop: next(drawn, 1))
    async with auditing(open_process(model)) as process:
        read = process.store.kv.block

        async def evict_the_third_block_before_reading(chain: Any, tokens: Any, span: Span) -> Any:
            if span.start:
                await process.store.kv.condemn(
                    chain, PROMPT[: 3 * BLOCK], Span(2 * BLOCK, 3 * BLOCK), "as if evicted"
                )
            return await read(chain, tokens, span)

        monkeypatch.setattr(process.store.kv, "block", evict_the_third_block_before_reading)
        await process.generate(PROMPT, 1)
        await until(lambda: not process.engine._audit._noted)
        assert await audited(process, 1) == 0


@pytest.mark.parametrize("fault", ["the worker stops", "the disk fails"])
async def test_a_disk_error_or_a_worker_stop_during_a_kv_audit_does_not_end_the_audit_task(
    make_model, open_process, monkeypatch, fault
) -> None:
    model = make_model("llama")
    await stored(open_process(model))
    async with auditing(open_process(model)) as process:
        read, reading = process.store.kv.block, asyncio.Event()

        async def broken(*args: Any) -> Any:
            reading.set()
            if fault == "the disk fails":
                raise OSError(5, "input/output error")
            process.engine.stop()
            return await read(*args)

        monkeypatch.setattr(process.store.kv, "block", broken)
        await process.generate(PROMPT, 1)
        await asyncio.wait_for(reading.wait(), 10)
        await asyncio.sleep(0.2)
        (task,) = (one for one in asyncio.all_tasks() if one.get_name() == "audit")
        assert not task.done()


async def test_the_kv_audit_compares_a_stored_block_only_with_a_recomputation_that_was_not_interrupted(
    make_model, open_process, monkeypatch
) -> None:
    model = make_model("llama")
    await stored(open_process(model))
    drawn = iter([0, 0, 1, 1, 1, 1])  # the first two of six blocks are audited
    monkeypatch.setattr(audit.random, "randrange", lambda stop: next(drawn, 1))
    async with auditing(open_process(model)) as process:
        run, blocks = process.engine.run, list[AuditedBlock]()

        async def interrupted_first_then_without_room(request: TurnRequest, *args: Any) -> Any:
            result = await run(request, *args)
            if request.audited is None:
                return result
            blocks.append(request.audited)
            assert request.audited.tensors
            if len(blocks) == 2:
                request.audited.tensors = ()
            return None if len(blocks) == 1 else result

        monkeypatch.setattr(process.engine, "run", interrupted_first_then_without_room)
        await process.generate(PROMPT, 1)
        assert await audited(process, 1) == 0, "the first block, in its second run"
        assert len(blocks) == 3


async def test_a_kv_audit_that_a_request_interrupts_starts_again_once_no_request_runs(
    make_model, open_process, monkeypatch
) -> None:
    model = make_model("llama")
    await stored(open_process(model))
    async with auditing(open_process(model)) as process:
        read, requests, num_read = process.store.kv.block, list[asyncio.Task[Any]](), 0

        async def read_beside_a_request(*args: Any) -> Any:
            nonlocal num_read
            found, num_read = await read(*args), num_read + 1
            if len(requests) < 3:
                requests.append(asyncio.create_task(process.append([7] * 40, name="other")))
                await asyncio.sleep(0)
            return found

        monkeypatch.setattr(process.store.kv, "block", read_beside_a_request)
        await process.generate(PROMPT, 1)
        assert await audited(process, 6) == 0
        assert len(await asyncio.gather(*requests)) == 3
        assert num_read == 6 + 3


LONG = [1 + i % 90 for i in range(4 * BLOCK + 3)]
#: Continues the first two blocks in another way, and ends in two pieces of a block.
OTHER = [*LONG[: 2 * BLOCK], *range(5, 5 + BLOCK + 3)]


async def recomputed(model: Any, directory: Path, trials: Path) -> tuple[Recomputation, int]:
    """Compute all blocks in a directory again; return the result, and how many files there are."""
    device = Device(
        lambda: loaded(model),
        lambda error: None,
        DeviceOptions(block_tokens=BLOCK, max_batch=1, stall_s=0.25, trials=trials),
    )
    await asyncio.to_thread(device.start)
    try:
        stored = StoredBlocks(directory, PLAIN)
        identity = replace(IDENTITY, caches=device.served.caches, block_tokens=BLOCK)
        num, blocks = stored.of(identity.digest())
        return await compare(engine_on(device, 1 << 30), blocks, stored.read), num
    finally:
        assert device.stop()


async def stored_twice(opened: AbstractAsyncContextManager[Process]) -> None:
    """Store the KV of two sessions that share two blocks; the second one grows in two turns."""
    async with opened as process:
        for name, tokens in (("a", LONG), ("b", OTHER[:-2]), ("b", OTHER)):
            await process.generate(tokens, 2, name=name)
            assert await process.store.queue.drained(5)


@pytest.mark.parametrize(("kind", "kv_bits"), [("llama", 4), ("exaone4", None), ("qwen3_next", None)])
async def test_recomputing_the_kv_of_a_correct_cache_covers_every_block_and_finds_none_wrong(
    make_model, open_process, tmp_path, trials, kind, kv_bits
) -> None:
    model = make_model(kind, kv_bits)
    await stored_twice(open_process(model))
    found, num = await recomputed(model, tmp_path / "kv", trials)
    assert (found.num_blocks, found.wrong) == (num, [])
    assert num == len(list((tmp_path / "kv" / "snapshots").iterdir())) >= 7


@pytest.mark.parametrize("kv_bits", [None, 4])
async def test_recomputing_the_kv_of_a_cache_lists_each_file_that_was_written_with_other_weights(
    make_model, open_process, tmp_path, trials, kv_bits
) -> None:
    model = make_model("llama", kv_bits)
    await stored_twice(open_process(model))
    right = model.parameters()
    model.update(tree_map(lambda w: w + mx.random.normal(w.shape) * 0.1, right))
    mx.eval(model.parameters())
    try:
        found, num = await recomputed(model, tmp_path / "kv", trials)
    finally:
        model.update(right)
    assert {file for file, _ in found.wrong} == {
        path.name for path in (tmp_path / "kv" / "snapshots").iterdir()
    }
    assert found.num_blocks == num
