"""`turnkeep dead` and `sessions --state dead`, with requests that a real worker has given up."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.commands.command_runs import command, where
from tests.parts import LocalWorker
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Append
from worker.sessions.dead_letters import Doubt

attempt = Doubt.attempt


async def venomous(self: Doubt, pending: Any, answer: Any) -> Any:
    if isinstance(pending.request, Append) and "VENOM" in (pending.request.text or ""):
        raise LookupError("bitten \x1b[2J")
    return await attempt(self, pending, answer)


@pytest.fixture
async def worker(
    local_worker: Callable[..., Awaitable[LocalWorker]], monkeypatch: pytest.MonkeyPatch
) -> LocalWorker:
    """A worker that has given up a request at position 3, but would now execute it without a fault."""
    monkeypatch.setattr(Doubt, "attempt", venomous)
    worker = await local_worker(max_attempts=1)
    await worker.client.session("s").append(tokens=[5] * 3)
    with pytest.raises(RequestFailedError, match="LookupError: bitten"):
        await worker.client.session("s").append(text="VENOM\x1b[2J", request_id="bad")
    monkeypatch.undo()
    return worker


async def dead(worker: LocalWorker, *arguments: object) -> subprocess.CompletedProcess[str]:
    return await command("dead", *arguments, *where(worker))


async def listed(worker: LocalWorker) -> list[dict[str, Any]]:
    done = await command("sessions", "--state", "dead", "--json", *where(worker))
    found: list[dict[str, Any]] = json.loads(done.stdout)["dead"]
    return found


async def test_the_command_dead_lists_a_given_up_request_and_shows_its_text(
    worker: LocalWorker,
) -> None:
    (letter,) = await listed(worker)
    assert (letter["session"], letter["letter"]["id"], letter["letter"]["position"]) == ("s", "bad", 3)
    row = (await command("sessions", "--state", "dead", *where(worker))).stdout.splitlines()[1]
    assert row.startswith("s        default  bad      append  1")
    assert "\x1b" not in row
    shown = (await dead(worker, "show", "s", "bad")).stdout
    assert "it failed for an unknown reason: LookupError: bitten [2J" in shown
    assert shown.endswith("  text\n    VENOM[2J\n")
    raw = json.loads((await dead(worker, "show", "s", str(letter["letter"]["seq"]), "--json")).stdout)
    assert raw["asked"]["text"] == "VENOM\x1b[2J"
    assert "1 dead" in (await command("sessions", *where(worker))).stdout


async def test_a_retry_that_succeeds_removes_the_dead_letter(worker: LocalWorker) -> None:
    done = await dead(worker, "retry", "s", "bad")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": appended, position 12\n")
    assert await listed(worker) == []
    assert (await worker.client.session("s").info()).position == 12
    again = await dead(worker, "retry", "s", "bad")
    assert again.returncode == 1
    assert (
        again.stderr
        == "turnkeep: session s has no dead letter of a request bad; see turnkeep sessions --state dead\n"
    )


async def test_a_retry_is_refused_without_anyway_if_the_sessions_position_has_changed(
    worker: LocalWorker,
) -> None:
    await worker.client.session("s").append(tokens=[5])
    done = await dead(worker, "retry", "s", "bad")
    assert done.returncode == 1
    assert done.stderr.startswith("turnkeep: position_conflict: the session is at position 4")
    assert len(await listed(worker)) == 1
    assert (await dead(worker, "retry", "s", "bad", "--anyway")).returncode == 0
    assert await listed(worker) == []


async def test_a_retry_that_fails_again_leaves_one_dead_letter(
    worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Doubt, "attempt", venomous)
    done = await dead(worker, "retry", "s", "bad")
    assert done.returncode == 1
    assert done.stderr.startswith("turnkeep: internal: ")
    (letter,) = await listed(worker)
    assert letter["letter"]["id"].startswith("retry-")


async def test_dropping_a_dead_letter_leaves_its_request_in_the_log(worker: LocalWorker) -> None:
    assert (await dead(worker, "drop", "s", "bad")).returncode == 0
    done = await command("sessions", "--state", "dead", *where(worker))
    assert done.stdout == "there are no dead letters\n"
    assert len(await worker.client.log("s")) == 4
    assert (await dead(worker, "drop", "s", "bad")).returncode == 1
