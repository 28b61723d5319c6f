"""`turnkeep open`, and what `turnkeep info` says of a session that keeps only a part of its KV."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from command_runs import turnkeep, where

SINK_WINDOW = ("--policy", "sink_window", "--sink", "2", "--window", "32")


async def test_open_sets_the_cache_policy_and_info_shows_it_with_the_visible_tokens(
    local_worker: Callable,
) -> None:
    worker = await local_worker()
    done = await asyncio.to_thread(turnkeep, "open", "s", *SINK_WINDOW, *where(worker))
    assert done.stdout == "opened s under sink_window (the first 2 tokens and the last 32)\n", done.stderr
    await worker.client.session("s").append(tokens=[5] * 50)
    rows = (await asyncio.to_thread(turnkeep, "info", "s", *where(worker))).stdout.splitlines()
    said = {row.split("  ")[0]: " ".join(row.split("  ")[1:]).strip() for row in rows}
    assert said["cache policy"] == "sink_window (the first 2 tokens and the last 32)"
    assert said["in sight"] == "34 of at most 34 tokens, all from position 18 on"
    raw = json.loads((await asyncio.to_thread(turnkeep, "info", "s", "--json", *where(worker))).stdout)
    assert raw["cache"] == {"policy": "sink_window", "sink": 2, "window": 32}
    assert (raw["capacity_tokens"], raw["visible_tokens"], raw["visible_from"]) == (34, 34, 18)
    again = await asyncio.to_thread(turnkeep, "open", "s", *SINK_WINDOW, *where(worker))
    assert (again.returncode, again.stdout) == (1, "")
    assert again.stderr.startswith("turnkeep: invalid_request: the session is open already, at position 50;")


async def test_info_on_a_session_under_the_full_policy_shows_no_visible_token_limits(
    local_worker: Callable,
) -> None:
    worker = await local_worker()
    done = await asyncio.to_thread(turnkeep, "open", "s", *where(worker))
    assert done.stdout == "opened s under full\n", done.stderr
    shown = (await asyncio.to_thread(turnkeep, "info", "s", *where(worker))).stdout
    assert "in sight" not in shown
    raw = json.loads((await asyncio.to_thread(turnkeep, "info", "s", "--json", *where(worker))).stdout)
    assert raw["policy"] == "full"
    assert not raw.keys() & {"cache", "capacity_tokens", "visible_tokens", "visible_from"}


async def test_invalid_options_of_open_fail_with_an_error_of_one_line(local_worker: Callable) -> None:
    worker = await local_worker()
    for options, says in (
        (("--sink", "4"), "cache takes sink with the policy sink_window only"),
        (("--policy", "full", "--window", "64"), "cache takes window with the policy sink_window only"),
        (("--policy", "sink_window", "--sink", "0"), "cache needs a sink of 1 to 2147483647 tokens, not 0"),
        (("--tag", "try", "--tag", ""), "tags[1] must be 1 to 64 printable characters"),
        (("--policy", "sink_window", "--window", "8"), "invalid_request: a window of 8 tokens is smaller"),
    ):
        done = await asyncio.to_thread(turnkeep, "open", "s", *options, *where(worker))
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"turnkeep: {says}")
    done = await asyncio.to_thread(turnkeep, "open", "s", "--policy", "half", *where(worker))
    assert done.returncode == 2
