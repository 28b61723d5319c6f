"""`turnkeep size` estimates the memory and disk that a worker with the same settings really uses."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.command_runs import command
from tests.ops.test_operating_page import block
from tests.parts import (
    ENDLESS_CONTEXT,
    TINY_KV_BYTES,
    LocalWorker,
    make_endless_model,
    make_tiny_model,
)
from turnkeep_client.messages import Metrics
from worker.process.setting_sources import load

TURN, ANSWER, TURNS = 150, 9, 7
MEMORY = 64 * 2**20


async def sized(model: Path, *options: object, **more: object) -> dict[str, Any]:
    flags = {"--sessions": 10, "--turns-per-hour": 6, "--context": 256} | more
    given = [str(part) for flag in flags.items() for part in flag]
    done = await command("size", "--model", model, "--json", *given, *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def settled(worker: LocalWorker) -> Metrics:
    """Return the metrics once no request runs and no snapshot waits to be written."""
    async with asyncio.timeout(20):
        async for metrics in worker.client.metrics():
            if not metrics.snapshots.in_flight and not metrics.running and metrics.resident_sessions:
                return metrics
    raise AssertionError("the client was closed")


@pytest.mark.parametrize("policy", ["full", "sink_window:4,64", "paged:324"])
async def test_size_predicts_the_memory_and_disk_that_a_session_takes_in_a_worker(
    local_worker: Callable[..., Awaitable[LocalWorker]], tmp_path: Path, policy: str
) -> None:
    model = make_endless_model(make_tiny_model(tmp_path / "tiny", num_attention_heads=2), tmp_path / "model")
    worker = await local_worker(
        model=str(model),
        device_memory=MEMORY,
        cache_policy=load({"cache_policy": policy}, {}).cache_policy,
        max_draft=0,
    )
    session = worker.client.session("s1")
    for _ in range(TURNS):
        await session.generate(text="x" * TURN, max_tokens=ANSWER, temperature=0)
    held = (await session.info()).position
    metrics = await settled(worker)
    said = await sized(
        model,
        *("--cache-policy", policy, "--device-memory", MEMORY),
        **{"--context": held, "--prompt-tokens": TURN, "--answer-tokens": held // TURNS - TURN},
    )
    token = 2 * TINY_KV_BYTES  # heads of twice as many dimensions
    # The last token of an answer has no KV yet; a token of a paged session has a sketch besides.
    assert 0 <= said["session_kv_bytes"] - metrics.resident_kv_bytes < 2 * token
    assert said["kv_limit_bytes"] == metrics.kv_limit_bytes
    assert said["sessions_on_device"] == 10
    snapshots = metrics.snapshots
    assert said["session_disk_bytes"] == pytest.approx(snapshots.stored_bytes, rel=0.01)
    assert said["written_bytes_per_turn"] * TURNS == pytest.approx(snapshots.written_bytes, rel=0.02)


async def test_size_does_not_read_the_weights_of_a_plain_model(endless_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(endless_model, broken)
    file = broken / "model.safetensors"
    header_bytes = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    size_bytes = file.stat().st_size
    os.truncate(file, header_bytes)
    os.truncate(file, size_bytes)  # zeros, which give no answer
    assert (await sized(broken))["weight_bytes"] == size_bytes - header_bytes


async def test_size_says_how_many_sessions_do_not_fit(endless_model: Path) -> None:
    limits = ("--device-memory", "2MiB", "--max-disk", "1MiB", "--drive", "1GB")
    few = await sized(endless_model, *limits, **{"--sessions": 100})
    assert 0 <= few["sessions_on_device"] < few["sessions_on_disk"] < 100
    assert few["sessions_nowhere"] == 100 - few["sessions_on_disk"]
    assert few["drive_writes_per_day"] == few["written_bytes_per_day"] / 1e9
    assert few["expected_tokens_per_s"] is None
    none = await sized(endless_model, "--snapshots", "off")
    assert (none["disk_bytes"], none["written_bytes_per_day"], none["sessions_on_disk"]) == (None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--context", ENDLESS_CONTEXT + 1),
            f"--context is {ENDLESS_CONTEXT + 1}; under the policy full it must be {ENDLESS_CONTEXT} or less",
        ),
        (
            ("--cache-policy", "sink_window:4,16"),
            "--cache-policy: a window of 16 tokens is smaller than this",
        ),
        (
            ("--cache-policy", "paged:300"),
            "--cache-policy: this model's keys cannot be sketched; use another",
        ),
        (("--drive", "big"), "'big' is no size; it must be like 512GB or 1TiB"),
    ],
)
async def test_size_refuses_impossible_options_and_says_why(
    endless_model: Path, options: tuple[object, ...], message: str
) -> None:
    load = ("--sessions", 1, "--turns-per-hour", 1, "--context", 64)
    done = await command("size", "--model", endless_model, *load, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("policy", ["full", "sink_window:4,1024", "paged:324", "paged:1000"])
async def test_size_shows_the_cache_policy_as_it_was_given(tmp_path: Path, policy: str) -> None:
    model = make_tiny_model(tmp_path / "tiny", num_attention_heads=2)
    load = ("--sessions", 1, "--turns-per-hour", 1, "--context", 256)
    done = await command("size", "--model", model, *load, "--cache-policy", policy)
    assert f"policy {policy}\n" in re.sub(r" +\n", "\n", done.stdout), done.stderr


async def test_the_table_of_size_shows_how_many_sessions_fit_and_the_daily_ssd_writes(
    endless_model: Path,
) -> None:
    _, *written = shlex.split(block("sh", "turnkeep size"))
    done = await command(*written, "--model", endless_model, "--cache-policy", "sink_window:4,1024")
    assert "200 of 200 sessions; up to 16 answer at once" in done.stdout
    assert re.search(r"written to the SSD .* a day, \S+ drive writes a day", done.stdout)
    assert "not known before it is measured" in done.stdout
