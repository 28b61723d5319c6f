"""`turnkeep close`, `cancel`, `rewind`, `sessions` and `drain`; `ask` closes its temporary session."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from command_runs import WAIT_S, command, environment, turnkeep, where
from nats.js.errors import NotFoundError

from cache.index import remote
from tests.parts import LocalWorker, free_port, until
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.writes import LIKELY
from worker.wire import connection, erasures


async def states(worker: LocalWorker, *options: object) -> dict[str, str]:
    """Return the state of each session that is idle or closed, or that `turnkeep sessions` lists."""
    options = options or ("--state", "idle", "--state", "closed")
    done = await command("sessions", "--json", *options, *where(worker))
    assert done.returncode == 0, done.stderr
    return {row["session"]: row["state"] for row in json.loads(done.stdout)["sessions"]}


async def secrets(worker: LocalWorker) -> list[str]:
    """Return the sessions of the requests and results with the text "a secret"."""
    return [entry.key.session for entry in await worker.client.log() if b"a secret" in entry.body]


async def test_the_command_close_closes_the_named_sessions_and_with_the_option_forget_removes_their_data(
    worker: LocalWorker,
) -> None:
    for name in ("a", "b", "c"):
        await worker.client.session(name).append(text="a secret")
    done = await command("close", "a", "b", *where(worker))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "closed a at position 8\nclosed b at position 8\n"
    for name in ("c", "b"):  # also one that is closed already
        done = await command("close", "--forget", name, *where(worker))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == f"removed {name} from the log and the worker's disk\n"
    assert await states(worker) == {"a": "closed"}
    assert await states(worker, "--state", "forgotten") == {"b": "forgotten", "c": "forgotten"}
    async with asyncio.timeout(20):  # entries are overwritten one by one
        while (await secrets(worker)) != ["a", "a"]:  # noqa: ASYNC110 - the worker removes them
            await asyncio.sleep(0.05)
    listed = await command("sessions", *where(worker))
    assert listed.stdout == "0 of 0 sessions; 3 ended: --state closed and --state forgotten list them\n"
    done = await command("close", "--forget", "b", *where(worker))
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr == "turnkeep: session b was closed or removed; turnkeep chat --session b starts it anew\n"
    ), "a removal of what is gone"


async def test_close_with_forget_says_that_content_stays_in_a_failing_remote_tier_until_a_worker_can_erase_it(
    local_worker: Callable[..., Awaitable[LocalWorker]],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(erasures, "_PERIOD_S", 0.1)
    monkeypatch.setattr(remote, "_FIRST_PAUSE_S", 0.1)
    tier = tmp_path / "tier"
    worker = await local_worker(model=str(tiny_model), remote_tier=str(tier))
    await worker.client.session("s").append(text="a secret " * 60)
    await until(lambda: [*tier.glob("*/*/*.safetensors")])
    tier.rename(tmp_path / "away")
    tier.touch()
    done = await command("close", "--forget", "s", *where(worker))
    assert done.returncode == 0
    assert done.stderr == "turnkeep: some of s may stay on a disk until a worker can erase it\n"
    tier.unlink()
    (tmp_path / "away").rename(tier)
    await until(lambda: not [*tier.glob("*/*/*.safetensors")])


@pytest.mark.parametrize("words", [("close", "s"), ("rewind", "s", "--position", "0"), ("fork", "s", "new")])
async def test_the_commands_close_rewind_and_fork_say_that_a_full_disk_keeps_their_request_out_of_the_log(
    worker: LocalWorker, words: tuple[str, ...]
) -> None:
    await worker.client.session("s").append(text="hello")
    js = worker.app._nc.jetstream()
    log = (await js.stream_info(worker.client.subjects.log_stream)).config
    # A server with a full disk answers nothing.
    await js.update_stream(log.evolve(max_bytes=1, no_ack=True))
    shorter = "import turnkeep_client.writes as w; w.UNSTORED_S = 0.5"
    program = f"{shorter}; from commands.cli import main; main()"
    asked = [sys.executable, "-c", program, *words, "--timeout", "4", *where(worker)]
    done = await asyncio.to_thread(
        subprocess.run, asked, env=environment(), capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    told, why = done.stderr.splitlines()
    assert told == f"turnkeep: the NATS server has not stored the request; {LIKELY} Still waiting"
    assert "the NATS server has not confirmed that the request is stored" in why
    await js.update_stream(log)


async def test_commands_that_name_an_unknown_session_fail_with_one_line_and_create_no_session(
    worker: LocalWorker,
) -> None:
    await worker.client.session("garden").append(text="x")
    deeds = ["close", "rewind", "info", "show"]
    for deed in (*deeds, ("fork", "new"), ("cancel", "r"), ("export", "file")):
        name, *more = [deed] if isinstance(deed, str) else deed
        for typed, says in (
            ("gardn", "there is no session gardn; did you mean garden?"),
            ("typo", "there is no session typo; see turnkeep sessions"),
        ):
            done = await command(name, typed, *more, *where(worker))
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == f"turnkeep: {says}\n"
    assert list(await states(worker)) == ["garden"]
    done = await command("export", "garden", "no/folder/file", *where(worker))
    assert done.stderr == "turnkeep: there is no folder no/folder for the file; make it first\n"


async def test_close_with_forget_removes_the_known_sessions_and_reports_each_unknown_name(
    worker: LocalWorker,
) -> None:
    for name in ("garden", "house", "lake"):
        await worker.client.session(name).append(text="x")
    done = await command("close", "--forget", "typo", "house", "gardn", "lake", *where(worker))
    assert done.returncode == 1
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["removed", "house"],
        ["removed", "lake"],
    ]
    assert done.stderr == (
        "turnkeep: there is no session typo; see turnkeep sessions\n"
        "turnkeep: there is no session gardn; did you mean garden?\n"
    )
    assert (await states(worker))["garden"] == "idle"


@pytest.mark.serves("endless_model")
async def test_the_command_cancel_without_a_request_id_cancels_the_running_request_of_the_session(
    worker: LocalWorker,
) -> None:
    answer = worker.client.session("s").generate(text="x", max_tokens=50_000, request_id="turn")
    async for _ in answer:
        break
    done = await command("cancel", "s", *where(worker))
    assert (done.returncode, done.stdout) == (0, "cancelled turn, which was running\n")
    assert (await answer).finish_reason == "cancelled"
    done = await command("cancel", "s", *where(worker))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("turnkeep: no request of session s is running;")


@pytest.mark.serves("endless_model")
async def test_the_command_close_waits_for_a_running_answer_and_prints_its_request_id(
    worker: LocalWorker,
) -> None:
    answer = worker.client.session("s").generate(text="x", max_tokens=50_000, request_id="turn")
    async with answer:
        async for _ in answer:
            break
        words = [sys.executable, "-m", "commands", "close", "--forget", "s", *where(worker)]
        removing = await asyncio.create_subprocess_exec(
            *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        assert removing.stderr
        said = (await removing.stderr.readline()).decode()
        assert said == "turnkeep: waiting until turn is answered; turnkeep cancel s stops it\n"
    out, err = await removing.communicate()
    assert (out, err) == (b"removed s from the log and the worker's disk\n", b"")


async def end_of(answer: Any) -> str | None:
    return (await answer).finish_reason


@pytest.mark.serves("endless_model")
async def test_close_with_cancel_and_forget_removes_a_session_with_a_running_and_a_waiting_request(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("s")
    async with session.generate(text="x", max_tokens=50_000) as answer:
        async for _ in answer:
            break
        ended = asyncio.ensure_future(end_of(answer))  # who listens later may find that it is removed
        await session.generate(text="y", max_tokens=50_000).send()
        done = await command("close", "--forget", "--cancel", "s", *where(worker))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "removed s from the log and the worker's disk\n"
        assert await ended == "cancelled"


@pytest.mark.serves("endless_model")
async def test_the_command_fork_at_a_position_inside_a_running_answer_fails_and_prints_the_sessions_end(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("s")
    position = (await session.append(text="hello")).position
    async with session.generate(text="x", max_tokens=50_000) as answer:
        async for _ in answer:
            break
        done = await command("fork", "s", "new", "--position", position + 1, *where(worker))
    why = f"it ends at {position}, until its waiting requests are answered"
    assert done.stderr == f"turnkeep: cannot fork s at {position + 1}: {why}\n"


async def test_the_command_rewind_removes_the_last_exchanges_or_everything_after_a_given_position(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("s")
    ends = [(await session.append(text="x")).position]
    for word in ("one", "two", "three"):
        messages = [{"role": "user", "content": word}]
        ends.append((await session.generate(messages=messages, max_tokens=2)).position)

    async def rewind(*options: object) -> tuple[str, int]:
        done = await command("rewind", "s", *options, *where(worker))
        return done.stdout or done.stderr, (await session.info()).position

    assert await rewind() == (f"rewound s to position {ends[2]}; removed: three\n", ends[2])
    assert await rewind("--last", 5) == ("turnkeep: the session has 2 exchanges, not 5\n", ends[2])
    assert await rewind("--last", 2) == (f"rewound s to position {ends[0]}; removed: one\n", ends[0])
    assert await rewind("--position", 0) == ("rewound s to position 0\n", 0)
    said, _ = await rewind("--position", 9)
    assert said.startswith("turnkeep: invalid_request: cannot rewind to 9")
    said, _ = await rewind("--position", 0, "--last", 1)
    assert "give --last or --position, not both" in said


async def test_the_command_rewind_also_removes_exchanges_that_a_fork_has_taken_over_from_its_parents(
    worker: LocalWorker,
) -> None:
    session, ends = worker.client.session("s"), [0]
    for number, word in enumerate(("one", "two", "three", "four")):
        asked = session.generate(messages=[{"role": "user", "content": word}], max_tokens=2)
        ends.append((await asked).position)
        if number in {1, 2}:
            session = await session.fork(f"fork{number}")
    await worker.client.session("s").rewind(0)
    done = await command("rewind", "fork2", "--last", 5, *where(worker))
    assert done.stderr == "turnkeep: the session has 4 exchanges, not 5\n"
    fresh = await session.fork("fresh", ends[3] - 1)  # without the end of the third answer
    done = await command("rewind", "fresh", *where(worker))
    assert done.stdout == f"rewound fresh to position {ends[1]}; removed: two\n", done.stderr
    assert (await fresh.info()).position == ends[1]
    for last, word in enumerate(("four", "three", "two", "one"), 1):
        done = await command("rewind", "fork2", *where(worker))
        assert done.stdout == f"rewound fork2 to position {ends[4 - last]}; removed: {word}\n", done.stderr


@pytest.mark.serves("endless_model")
async def test_the_command_rewind_removes_nothing_if_the_session_changes_before_the_request_runs(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("s")
    await session.generate(messages=[{"role": "user", "content": "one"}], max_tokens=2)
    second = session.generate(messages=[{"role": "user", "content": "two"}], max_tokens=50_000)
    await second.send()
    while not (await session.info()).progress:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    rewinding = asyncio.create_task(command("rewind", "s", *where(worker)))
    while not (await session.info()).num_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await second.cancel()
    done = await rewinding
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "turnkeep: the session has changed meanwhile, and nothing was removed; look"
    )
    end = (await second).position
    await session.append(text="behind it")
    done = await command("rewind", "s", *where(worker))
    assert done.stdout.endswith("removed: two\n"), done.stderr
    assert (await session.info()).position < end


async def test_the_command_ask_closes_its_session_even_if_its_question_is_refused(
    worker: LocalWorker,
) -> None:
    """It erases nothing: that would rewrite up to 8 MB of the log after each question."""
    for text, code in (("a question", 0), ("a question " * 400, 1)):
        done = await asyncio.to_thread(turnkeep, "ask", text, "--max-tokens", 2, *where(worker))
        assert done.returncode == code, done.stderr
    assert [*(await states(worker)).values()] == ["closed", "closed"]
    requests = [entry for entry in await worker.client.log() if entry.kind == "in"]
    closes = [entry for entry in requests if b'"type":"close"' in entry.body]
    assert len(closes) == 2
    assert not any(b"forget" in entry.body for entry in closes)


async def test_a_refused_request_leaves_an_idle_session_idle_and_a_closed_session_closed(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("s")
    await session.append(text="x")
    for state, deed in (("idle", session.rewind(99)), ("closed", session.append(text="y"))):
        with pytest.raises(RequestFailedError):
            await deed
        assert await states(worker) == {"s": state}
        if state == "idle":
            await session.close()


@pytest.fixture
async def two(local_worker: Callable[..., Awaitable[Any]], tmp_path: Path) -> tuple[Any, Any]:
    """Callable[..., Awaitable[LocalWorker]] two workers of one prefix."""
    return tuple([await local_worker(data_dir=tmp_path / name, worker=name) for name in ("one", "two")])


async def test_new_sessions_avoid_a_drained_worker_until_the_command_drain_is_undone(
    two: tuple[Any, Any],
) -> None:
    one, _ = two
    done = await command("drain", "one", *where(one))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "one gives its sessions to two\n"
        "one has nothing to do; stop it, or let it take sessions again: turnkeep drain one --undo\n"
    )
    async with asyncio.timeout(WAIT_S):
        async for metrics in one.client.metrics("one"):
            if metrics.drains:
                break
    session = one.client.session("s")
    await session.append(text="hello")
    assert (await session.info()).worker.worker == "two"
    done = await command("drain", "two", *where(one))
    assert done.stderr == "turnkeep: no other worker takes the sessions of two; start one first\n"
    done = await command("drain", "one", "--undo", *where(one))
    assert (done.returncode, done.stdout) == (0, "one takes sessions again\n")
    assert (await command("drain", "two", *where(one))).returncode == 0


async def test_draining_an_unknown_worker_fails_and_lists_the_running_workers(two: tuple[Any, Any]) -> None:
    one, _ = two
    done = await command("drain", "three", *where(one))
    prefix = one.settings.prefix
    assert done.returncode == 1
    assert done.stderr == f"turnkeep: no worker three serves the prefix {prefix!r}; there are: one, two\n"


async def test_the_command_drain_without_a_nats_server_prints_the_command_that_starts_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connection.connect.__kwdefaults__, "timeout_s", 0.5)
    place = f"--data-dir {tmp_path} --nats-port {free_port()}"
    done = await command("drain", "one", *place.split())
    assert done.returncode == 1
    assert done.stderr.endswith(f"(connection refused); start a worker with: turnkeep serve {place}\n")


async def test_the_command_drain_waits_for_a_busy_worker_whose_membership_record_is_lost(
    local_worker: Callable[..., Awaitable[Any]], tmp_path: Path, endless_model: Path
) -> None:
    """The worker is still at work, and makes its record again."""
    one = await local_worker(data_dir=tmp_path / "one", worker="one", model=str(endless_model))
    await one.client.session("s").append(text="a")  # which makes it this worker's
    await local_worker(data_dir=tmp_path / "two", worker="two", model=str(endless_model))
    js, stream = one.app._nc.jetstream(), one.app._members.stream
    answering = asyncio.create_task(busy(one))
    await asyncio.sleep(1)
    draining = asyncio.create_task(command("drain", "one", *where(one)))
    await asyncio.sleep(1)
    for _ in range(20):
        with contextlib.suppress(NotFoundError):
            await js.delete_stream(stream)
        await asyncio.sleep(0.05)
    assert not draining.done(), draining.result()
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    assert (await draining).stdout.endswith(
        "stop it, or let it take sessions again: turnkeep drain one --undo\n"
    )


async def busy(worker: Any) -> None:
    """Keep the worker at work until cancelled."""
    async with worker.client.session("s").generate(text="a", max_tokens=30_000) as answer:
        async for _ in answer:
            pass
