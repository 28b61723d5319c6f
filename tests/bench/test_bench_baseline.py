"""The program that a worker is compared with: what it answers, and what is left of it when it fails."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from bench import blas
from bench.baseline.messages import (
    Batch,
    Chat,
    Done,
    Encode,
    Forget,
    Load,
    Loaded,
    Ran,
    Stream,
    Tokens,
)
from bench.baseline.process import BaselineError, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.baseline.process import Baseline


@pytest.fixture
async def baseline(tiny_model: Path) -> AsyncIterator[Baseline]:
    async with running(tiny_model, preload=None, timeout_s=30) as found:
        yield found


@pytest.mark.process
async def test_one_by_one_or_batched_the_tokens_are_the_same_turn_after_turn(baseline):
    """Caches are kept: a second turn sees the first, however that was run."""
    first = (await baseline.ask(Chat("Be brief.", "What is a lighthouse?", first=True), Tokens)).tokens
    second = (await baseline.ask(Chat("Be brief.", "And a keeper?", first=False), Tokens)).tokens
    other = (await baseline.ask(Encode("a text of quite another length"), Tokens)).tokens
    for tokens in (first, second):
        alone = await baseline.ask(Stream("alone", tokens, 12), Ran)
        together = await baseline.ask(Batch(("a", "b"), (tokens, other), 12), Ran)
        assert together.rows[0].tokens == alone.rows[0].tokens
        for row in (*alone.rows, *together.rows):
            assert 1 <= len(row.tokens) == len(row.times_s) <= 12
            assert list(row.times_s) == sorted(row.times_s)
    fresh = await baseline.ask(Stream("fresh", second, 12), Ran)
    assert fresh.rows[0].tokens != alone.rows[0].tokens
    assert isinstance(await baseline.ask(Forget(), Done), Done)
    again = await baseline.ask(Stream("alone", second, 12), Ran)
    assert again.rows[0].tokens == fresh.rows[0].tokens


@pytest.mark.process
async def test_a_later_turn_has_no_system_message(baseline):
    first = (await baseline.ask(Chat("Be brief.", "Why?", first=True), Tokens)).tokens
    later = (await baseline.ask(Chat("Be brief.", "Why?", first=False), Tokens)).tokens
    assert first[-len(later) :] == later
    assert len(first) > len(later)


@pytest.mark.process
async def test_without_a_model_it_reads_files_and_refuses_the_rest_in_one_line(tiny_model, tmp_path):
    weights = tiny_model / "model.safetensors"
    async with running(None, preload=None) as baseline:
        loaded = await baseline.ask(Load((str(weights), str(weights))), Loaded)
        assert loaded.size_bytes == 2 * weights.stat().st_size
        assert loaded.seconds > 0
        with pytest.raises(BaselineError, match=r"refused: there is no model: start the program"):
            await baseline.ask(Encode("abc"), Tokens)
        with pytest.raises(BaselineError, match=r"refused: .*none\.safetensors"):
            await baseline.ask(Load((str(tmp_path / "none.safetensors"),)), Loaded)
        assert (await baseline.ask(Load(()), Loaded)).size_bytes == 0


@pytest.mark.process
async def test_a_folder_that_is_no_model_is_one_line(tmp_path):
    with pytest.raises(BaselineError, match=r"refused: .* cannot be loaded: ") as caught:
        async with running(tmp_path, preload=None):
            raise AssertionError("it has no model")
    assert "\n" not in str(caught.value)


@pytest.mark.process
async def test_one_that_dies_is_told_by_its_exit_code(baseline):
    os.kill(baseline.pid, signal.SIGKILL)
    with pytest.raises(BaselineError, match="the baseline process ended with exit code -9"):
        await baseline.ask(Encode("abc"), Tokens)


@pytest.mark.process
@pytest.mark.parametrize("why", ["hang", "cancel"])
async def test_one_that_hangs_is_given_up_and_gone(tiny_model, why):
    async def hold() -> None:
        async with running(None, preload=None, timeout_s=0.3 if why == "hang" else 60) as baseline:
            process.append(psutil.Process(baseline.pid))
            process[0].suspend()
            await baseline.ask(Load(()), Loaded)

    process: list[psutil.Process] = []
    task = asyncio.create_task(hold())
    if why == "hang":
        with pytest.raises(BaselineError, match=r"did not answer within 0\.3 s"):
            await task
    else:
        await asyncio.sleep(1.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert psutil.wait_procs(process, timeout=5)[1] == []


@pytest.mark.process
async def test_a_library_of_the_worker_is_the_baselines_too(tiny_model):
    """This process has loaded OpenBLAS as a worker does."""
    mine = blas.mapped(os.getpid())
    library = blas.preload_of(mine)
    if library is None:
        pytest.skip("OpenBLAS is not installed here")
    async with running(tiny_model, preload=library) as baseline:
        assert blas.preload_of(blas.mapped(baseline.pid)) == library
    async with running(tiny_model, preload=None) as baseline:
        assert blas.preload_of(blas.mapped(baseline.pid)) is None
