"""Pins, closes with `forget`, and disk limits on a running worker, by clients and operators."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pty
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner
from raw_wire import Start, Wire, append, generate

from cache.disk import format as snapshot_format
from cache.names import blocks
from cache.names.tokens import unpack
from commands.cli import main
from tests.parts import BLOCK, WorkerProcess
from turnkeep_client.errors import RequestFailedError


def text(letter: str, num_tokens: int = 3 * BLOCK) -> str:
    return letter * num_tokens


def snapshots(w: Wire) -> int:
    return len(list((w.worker.settings.data_dir / "snapshots" / "snapshots").iterdir()))


async def settled(w: Wire) -> None:
    assert await w.worker.app._store.barrier(10)


async def test_a_pinned_prompt_stays_cached_when_other_sessions_fill_the_disk(wire: Start) -> None:
    w = await wire(max_disk=2**20)
    session = w.worker.client.session("prompt")
    await session.append(text=text("p"))
    pinned = await session.pin()
    assert (pinned.tokens, pinned.stored_tokens, pinned.noted) == (3 * BLOCK, 3 * BLOCK - 1, True)
    await session.close()
    w.worker.app.reload(dataclasses.replace(w.worker.settings, max_disk=3 * pinned.size_bytes))
    for i in range(6):
        await w.send(f"s{i}", append("a", text("abcdef"[i])))
        await settled(w)
    assert w.worker.app._store.stats().evicted > 0

    again = await w.send("other", generate("g", text=text("p"), max_tokens=2))
    assert again["usage"]["cached_tokens"] == 3 * BLOCK - 1
    await settled(w)
    kept = max(entry.end for entry in w.worker.app._store._index if entry.kept)
    assert kept == 3 * BLOCK, "the prompt's last token is pinned as well, since an answer has run it"
    unpinned = await w.worker.client.session("other").unpin()
    assert (unpinned.prefixes, unpinned.pinned_bytes) == ((3 * BLOCK,), 0)


async def test_a_turn_hashes_each_of_its_blocks_once(wire: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding, holding, copying and saving blocks share the hashes."""
    w = await wire()
    hashed, link = [], blocks.link

    def counting(parent: bytes, packed: bytes) -> bytes:
        hashed.append(packed)
        return link(parent, packed)

    monkeypatch.setattr(blocks, "link", counting)
    await w.send("s", append("a", text("x", 20 * BLOCK)))
    await settled(w)
    assert snapshots(w) == 20
    assert len(hashed) == 20
    await w.send("s", generate("g", max_tokens=BLOCK))
    assert len(hashed) <= 2 * 20 + 1


async def test_the_commands_pin_unpin_and_info_print_the_pinned_tokens(wire: Start) -> None:
    w = await wire(max_disk=2**20)
    await w.send("s", append("a", text("x")))

    def turnkeep(*arguments: str) -> Any:
        where = ("--nats", w.worker.settings.nats, "--prefix", w.prefix)
        return CliRunner().invoke(main, [*arguments, *where])

    pinned = await asyncio.to_thread(turnkeep, "pin", "s", "--position", str(2 * BLOCK))
    assert f"pinned {2 * BLOCK} tokens, all of them stored in" in pinned.stdout
    told = (await asyncio.to_thread(turnkeep, "info", "s")).stdout
    assert re.search(rf"^pinned +the first {2 * BLOCK} tokens: their KV stays on SSD$", told, re.MULTILINE)
    refused = await asyncio.to_thread(turnkeep, "pin", "s", "--position", "999")
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)
    assert "a position must be from 1 to that" in refused.stderr
    unpinned = await asyncio.to_thread(turnkeep, "unpin", "s")
    assert unpinned.stdout == f"unpinned {2 * BLOCK}; 0 B stay pinned\n"
    assert "pinned  " not in (await asyncio.to_thread(turnkeep, "info", "s")).stdout
    assert "unpinned nothing" in (await asyncio.to_thread(turnkeep, "unpin", "s")).stdout


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"type": "pin", "position": 999}, "the session holds 96 tokens: a position must be from 1 to that"),
        ({"type": "unpin", "position": 97}, "the session holds 96 tokens"),
        ({"type": "pin", "position": 0}, "position"),
        ({"type": "pin", "tokens": 3}, "tokens"),
    ],
)
async def test_an_invalid_pin_or_unpin_is_refused_with_the_reason(
    wire: Start, body: dict[str, Any], why: str
) -> None:
    w = await wire()
    await w.send("s", append("a", text("x")))
    reply = await w.control("s", body)
    assert (reply["type"], reply["code"]) == ("failed", "invalid_request")
    assert why in reply["message"]


async def test_pins_beyond_half_of_the_disk_limit_are_refused_with_the_numbers(wire: Start) -> None:
    w = await wire(max_disk=2**20)
    await w.send("s", append("a", text("x", 50 * BLOCK)))
    with pytest.raises(RequestFailedError, match=r"at most 524288 may be \(50% of the limit of 1048576\)"):
        await w.worker.client.session("s").pin()
    assert (await w.worker.client.session("s").pin(BLOCK)).tokens == BLOCK


async def test_a_worker_that_never_had_snapshots_refuses_pins_and_reports_a_forget_as_settled(
    wire: Start,
) -> None:
    w = await wire(snapshots="off")
    await w.send("s", append("a", "hello"))
    assert "keeps no snapshots" in (await w.control("s", {"type": "pin"}))["message"]
    closed = await w.send("s", {"type": "close", "id": "c", "forget": True})
    assert (closed["type"], closed["forgotten"]) == ("closed", 0)
    assert closed.get("settled", True), "there never were any"


async def test_a_worker_restarted_with_snapshots_off_does_not_report_a_forget_as_settled(wire: Start) -> None:
    w = await wire()
    await w.send("s", append("a", text("x")))
    await w.worker.stop()
    w = await wire(snapshots="off", data_dir=w.worker.settings.data_dir, prefix=w.prefix)
    closed = await w.send("s", {"type": "close", "id": "c", "forget": True})
    assert (closed["forgotten"], closed["settled"]) == (0, False)


async def test_a_close_with_forget_is_not_settled_while_another_turn_uses_the_snapshots(
    wire: Start,
) -> None:
    w = await wire()
    await w.send("s", append("a", text("x")))
    await settled(w)
    store = w.worker.app._store
    entries = sorted(store._index, key=lambda entry: entry.start)
    tokens = unpack(b"".join(entry.tokens for entry in entries))
    held = store.hold("default", tokens)
    closed = await w.send("s", {"type": "close", "id": "c", "forget": True})
    assert (closed["forgotten"], closed["settled"]) == (3, False)
    store.release(held)
    await settled(w)
    assert snapshots(w) == 0


async def test_an_unknown_session_cannot_be_pinned(wire: Start) -> None:
    w = await wire()
    assert (await w.control("nobody", {"type": "pin"}))["code"] == "unknown_session"


async def test_a_close_with_forget_removes_the_sessions_snapshots_except_shared_ones(wire: Start) -> None:
    w = await wire()
    await w.send("s", append("a", text("x")))
    await w.send("other", append("a", text("x", BLOCK) + text("y", BLOCK)))
    await settled(w)
    assert snapshots(w) == 3 + 1
    closed = await w.worker.client.session("s").close(forget=True)
    assert (closed.forgotten, closed.settled) == (2, True)
    assert snapshots(w) == 2, "what the other one shares stays"
    plain = await w.worker.client.session("other").close()
    assert plain.forgotten is None
    assert snapshots(w) == 2


async def test_a_close_with_forget_is_answered_in_time_while_the_disk_hangs(
    wire: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer thread hangs on one of the session's blocks, and must not store this block afterwards."""
    w = await wire()
    loop, busy, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    write = snapshot_format.write

    def stuck(*arguments: Any) -> None:
        loop.call_soon_threadsafe(busy.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        write(*arguments)

    monkeypatch.setattr(snapshot_format, "write", stuck)
    await w.send("s", append("a", text("x")))
    await busy.wait()
    started = time.monotonic()
    closed = await w.send("s", {"type": "close", "id": "c", "forget": True})
    assert 2 <= time.monotonic() - started < 3
    assert (closed["forgotten"], closed["settled"]) == (3, False)
    answered = await w.send("t", generate("g", text="hello"))
    assert answered["type"] == "generated", "others go on"
    go_on.set()
    await settled(w)
    assert w.worker.app._store.stats().cancelled == 3
    assert w.worker.app._store.match("default", [1] * BLOCK).num_tokens == 0
    assert snapshots(w) == w.worker.app._store.stats().stored


async def test_temporary_snapshots_are_removed_when_the_worker_stops(wire: Start) -> None:
    w = await wire(snapshots="temporary")
    await w.send("s", append("a", text("x")))
    await settled(w)
    assert snapshots(w) == 3
    await w.worker.stop()
    assert snapshots(w) == 0


async def test_a_reload_changes_disk_limits_and_names_the_settings_that_need_a_restart(wire: Start) -> None:
    w = await wire()
    for i in range(4):
        await w.send(f"s{i}", append("a", text("abcd"[i])))
    await settled(w)
    app, settings = w.worker.app, w.worker.settings
    with structlog.testing.capture_logs() as logs:
        app.reload(dataclasses.replace(settings, max_disk=2**16, min_free_disk=5, max_batch=3))
    said = {log["event"]: log for log in logs}
    assert said["these settings need a restart"]["settings"] == ["max_batch"]
    assert said["read the settings again"]["changed"] == ["max_disk", "min_free_disk"]
    await asyncio.sleep(0.1)  # there are steps to take, of 10 ms each
    await settled(w)
    assert 0 < app._store.stats().stored_bytes <= 2**16


async def said(worker: WorkerProcess, event: str) -> dict[str, Any]:
    """Wait for a line with `event` in the worker's log; return it as a dict."""
    async with asyncio.timeout(60):
        while True:
            for line in worker.log.splitlines():
                if event in line:
                    found: dict[str, Any] = json.loads(line)
                    return found
            assert worker.running, worker.log
            await asyncio.sleep(0.05)


@pytest.mark.process
async def test_sighup_makes_a_worker_read_its_settings_file_again(
    worker_process: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    config = tmp_path / "turnkeep.toml"
    config.write_text('max_disk = "1GiB"\nmin_free_disk = 0\n')
    worker = worker_process("--config", str(config))
    worker.start()
    await said(worker, '"ready"')
    config.write_text("max_disk = 'much'\n")
    os.kill(worker.pid, signal.SIGHUP)
    assert "'much' is not valid" in (await said(worker, "the settings stay as they are"))["reason"]
    config.write_text('max_disk = "2MiB"\nmin_free_disk = 0\n')
    os.kill(worker.pid, signal.SIGHUP)
    assert (await said(worker, "read the settings again"))["changed"] == ["max_disk"]
    assert (await said(worker, "cache_limits_changed"))["max_bytes"] == 2 * 2**20
    assert worker.stop() == 0


@pytest.mark.process
async def test_sighup_ends_a_worker_on_a_terminal_with_exit_status_0(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker, (terminal, end) = worker_process(), pty.openpty()
    try:
        worker.start(end)
        await said(worker, '"ready"')
        os.kill(worker.pid, signal.SIGHUP)
        assert worker.wait() == 0
    finally:
        os.close(terminal)
        os.close(end)


async def test_a_pin_under_a_window_policy_serves_only_sessions_under_the_same_policy(wire: Start) -> None:
    """KV differs if fewer tokens were visible when it was computed."""
    w = await wire()
    cache = {"policy": "sink_window", "sink": 2, "window": 4 * BLOCK}
    session = w.worker.client.session("s", cache=cache)
    await session.append(text=text("p"))
    pinned = await session.pin()
    assert (pinned.tokens, pinned.stored_tokens) == (3 * BLOCK, 3 * BLOCK - 1)
    plain = w.worker.client.session("plain")
    await plain.append(text=text("p"))
    assert (await plain.unpin()).prefixes == ()
    assert (await w.worker.client.session("other", cache=cache).append(text=text("p"))).cached_tokens > 0
    assert (await w.worker.client.session("other").unpin()).prefixes == (3 * BLOCK,)
