"""`turnkeep ask --cache-policy`, and what `turnkeep info` says of a session that keeps a part of its KV."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from command_runs import turnkeep, where

ASKED = ("ask", "--session", "s", "--max-tokens", 2, "hello")


async def test_ask_starts_a_session_under_a_cache_policy_and_info_shows_its_visible_tokens(
    local_worker: Callable,
) -> None:
    worker = await local_worker()
    asked = (*ASKED, "--cache-policy", "sink_window:2,32", *where(worker))
    for _ in range(2):  # the second time the session has this policy
        done = await asyncio.to_thread(turnkeep, *asked)
        assert done.returncode == 0, done.stderr
    position = (await worker.client.session("s").append(tokens=[5] * 50)).position
    rows = (await asyncio.to_thread(turnkeep, "info", "s", *where(worker))).stdout.splitlines()
    said = {row.split("  ")[0]: " ".join(row.split("  ")[1:]).strip() for row in rows}
    assert said["cache policy"] == "sink_window (the first 2 tokens and the last 32)"
    assert said["in sight"] == f"34 of at most 34 tokens, all from position {position - 32} on"
    raw = json.loads((await asyncio.to_thread(turnkeep, "info", "s", "--json", *where(worker))).stdout)
    assert raw["cache"] == {"policy": "sink_window", "sink": 2, "window": 32}
    assert (raw["capacity_tokens"], raw["visible_tokens"]) == (34, 34)
    other = await asyncio.to_thread(turnkeep, *ASKED, "--cache-policy", "full", *where(worker))
    assert (other.returncode, other.stdout) == (1, "")
    assert other.stderr.startswith("turnkeep: invalid_request: the session is open under sink_window")


async def test_a_closed_session_starts_anew_under_a_cache_policy_only(local_worker: Callable) -> None:
    worker = await local_worker()
    await worker.client.session("s").append(text="x")
    await worker.client.session("s").close()
    done = await asyncio.to_thread(turnkeep, *ASKED, *where(worker))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "turnkeep: session s was closed or removed; turnkeep chat --session s starts it anew\n"
    )
    done = await asyncio.to_thread(turnkeep, *ASKED, "--cache-policy", "full", *where(worker))
    assert done.returncode == 0, done.stderr
    shown = (await asyncio.to_thread(turnkeep, "info", "s", *where(worker))).stdout
    assert "in sight" not in shown
    raw = json.loads((await asyncio.to_thread(turnkeep, "info", "s", "--json", *where(worker))).stdout)
    assert raw["policy"] == "full"
    assert not raw.keys() & {"cache", "capacity_tokens", "visible_tokens", "visible_from"}


@pytest.mark.parametrize("policy", ["half", "full:1", "sink_window:4", "sink_window:0,64", "paged:x"])
def test_an_invalid_cache_policy_is_a_usage_error_that_says_what_one_is_like(policy: str) -> None:
    done = turnkeep(*ASKED, "--cache-policy", policy)
    assert done.returncode == 2
    assert f"'{policy}' must be full, sink_window:SINK,WINDOW with two numbers" in " ".join(
        done.stderr.split()
    )


async def test_ask_starts_a_session_without_snapshots_and_info_says_so(local_worker: Callable) -> None:
    worker = await local_worker()
    asked = (*ASKED, "--snapshots", "none", *where(worker))
    for _ in range(2):  # the second time the session has none
        done = await asyncio.to_thread(turnkeep, *asked)
        assert done.returncode == 0, done.stderr
    shown = (await asyncio.to_thread(turnkeep, "info", "s", *where(worker))).stdout
    assert "full, no snapshots" in shown
    assert "in sight" not in shown
    raw = json.loads((await asyncio.to_thread(turnkeep, "info", "s", "--json", *where(worker))).stdout)
    assert raw["cache"] == {"policy": "full", "snapshots": "none"}
