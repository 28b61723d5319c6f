"""`turnkeep sessions`, `show`, `fork` and `dead`: what they print for a real worker's log and forks."""

import asyncio
import json
import re
import subprocess
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest

from commands.screen import printable
from ops.log.conversation import taken_over
from ops.log.sessions import SessionRow, list_sessions, trees
from tests.commands.command_runs import command, where
from tests.parts import LocalWorker
from turnkeep_client.client import connect
from turnkeep_client.errors import RequestFailedError, TurnkeepError
from turnkeep_client.messages import Append, Appended, Model, Parent, encode, failure
from turnkeep_client.session_log import ends
from turnkeep_client.stream import LogStream
from turnkeep_client.subjects import SessionKey
from worker.sessions.dead_letters import RequestAttempts

Start = Callable[..., Awaitable[LocalWorker]]


async def listed(worker: LocalWorker, *options: object) -> list[dict[str, Any]]:
    done = await command("sessions", "--json", *options, *where(worker))
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["sessions"]
    return rows


async def filled(start: Start) -> LocalWorker:
    """Fill a log with sessions in several states, one of another tenant; return the worker, stopped."""
    worker = await start()
    for name in ("idle", "closed", "failed"):
        await worker.client.session(name).append(tokens=[5] * 10)
    await worker.client.session("closed").close()
    async with connect(worker.settings.nats, prefix=worker.settings.prefix, tenant="b") as other:
        await other.session("idle").append(tokens=[5] * 1500)
    await worker.stop()
    raw = await nats.connect(worker.settings.nats)
    diverged = failure("r", "history_diverged", "its digest differs", seq=7, position=10)
    await raw.jetstream().publish(f"{worker.settings.prefix}.default.failed.commit", encode(diverged))
    for i in range(2):
        body = json.dumps({"type": "append", "id": f"r{i}", "text": "x"}).encode()
        await raw.jetstream().publish(f"{worker.settings.prefix}.default.waiting.in", body)
    await raw.close()
    return worker


async def test_the_command_sessions_lists_state_position_worker_model_and_entry_count_of_each_session(
    local_worker: Start,
) -> None:
    worker = await filled(local_worker)
    found = await listed(worker) + await listed(worker, "--state", "closed")
    rows = {(row["tenant"], row["session"]): row for row in found}
    assert {key[1]: (row["state"], row["position"]) for key, row in rows.items() if key[0] == "default"} == {
        "idle": ("idle", 10),
        "closed": ("closed", 10),
        "failed": ("failed", 10),
        "waiting": ("waiting", None),
    }
    assert (rows["b", "idle"]["position"], rows["b", "idle"]["worker"], rows["b", "idle"]["model"]) == (
        *(1500, "test", "tiny"),
    )
    assert (rows["default", "idle"]["entries"], rows["default", "waiting"]["waiting"]) == (1, 2)
    shown = await command("sessions", *where(worker))
    assert "waiting (2)" in shown.stdout
    last = "4 of 4 sessions; 1 ended: --state closed and --state forgotten list them"
    assert shown.stdout.splitlines()[-1] == last


async def test_the_command_sessions_prints_the_same_list_after_answered_requests_are_removed_from_the_log(
    local_worker: Start,
) -> None:
    worker = await filled(local_worker)
    raw = await nats.connect(worker.settings.nats)
    before = [await listed(worker), await listed(worker, "--state", "closed")]
    for subject in ("default.idle", "default.closed", "default.failed", "b.idle"):
        await raw.jetstream().purge_stream(
            f"{worker.settings.prefix}_log", subject=f"{worker.settings.prefix}.{subject}.in"
        )
    assert [await listed(worker), await listed(worker, "--state", "closed")] == before
    await raw.close()


async def test_a_session_is_listed_as_waiting_if_a_request_before_a_cancelled_request_has_no_result(
    worker: LocalWorker,
) -> None:
    await worker.stop()
    raw, subject = await nats.connect(worker.settings.nats), f"{worker.settings.prefix}.default.s"
    for name in ("a", "b"):
        body = json.dumps({"type": "append", "id": name, "text": "x"}).encode()
        ack = await raw.jetstream().publish(f"{subject}.in", body)
    cancelled = failure("b", "expired", "cancelled before it began", seq=ack.seq, position=0)
    await raw.jetstream().publish(f"{subject}.commit", encode(cancelled))
    (row,) = await listed(worker)
    assert (row["state"], row["waiting"]) == ("waiting", 1)
    await raw.close()


async def test_the_command_sessions_lists_a_reopened_session_with_its_new_tags_and_first_words(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("s")
    await session.open(tags=["old"])
    await session.append(text="before")
    await session.close()
    await session.open(tags=["new"])
    await session.append(text="after")
    (row,) = await listed(worker)
    assert (row["tags"], row["begins"]) == (["new"], "after")
    assert len(await listed(worker, "--tag", "new")) == 1


async def test_options_of_the_command_sessions_filter_and_sort_its_list(local_worker: Start) -> None:
    worker = await filled(local_worker)

    async def names(*options: str) -> list[str]:
        return [row["session"] for row in await listed(worker, *options)]

    assert await names("--tenant", "b") == ["idle"]
    assert await names("*l*ed", "--sort", "name") == ["failed"]
    assert await names("--state", "waiting", "--state", "closed", "--sort", "name") == ["closed", "waiting"]
    for mode in ("--tree", "--verify", "--state=dead"):
        mixed = await command("sessions", mode, "--limit", 1, *where(worker))
        assert (mixed.returncode, "take only names, --tenant and --json" in mixed.stderr) == (2, True)
    bad = await command("sessions", "--tenant", "b.>", *where(worker))
    assert bad.stderr.startswith("turnkeep: tenant 'b.>' is not valid: it must be 1 to 64 of the characters")
    assert await names("--since", "2100-01-01") == []
    assert len(await names("--since", "1h", "--until", "2100-01-01")) == 4
    assert await names("--limit", "1") == ["waiting"]
    assert await names("--reverse", "--limit", "1", "--tenant", "default") == ["idle"]
    assert (await listed(worker, "--sort", "position"))[0]["tenant"] == "b"
    largest, *others = await listed(worker, "--sort", "bytes")
    assert largest["tenant"] == "b"
    assert largest["size_bytes"] > others[0]["size_bytes"] > 200


@pytest.mark.serves("endless_model")
async def test_the_command_sessions_lists_a_session_of_any_tenant_with_an_answer_in_progress_as_running(
    worker: LocalWorker,
) -> None:
    async with connect(worker.settings.nats, prefix=worker.settings.prefix, tenant="b") as other:
        session = other.session("s")
        answer = session.generate(text="x", max_tokens=50_000)
        async for _ in answer:
            break
        assert await listed(worker, "--state", "waiting") == []
        assert [row["state"] for row in await listed(worker, "--state", "running")] == ["running"]
        assert " running  " in (await command("sessions", *where(worker))).stdout
        await other.submit(session.key, Append(id="next", text="x"))
        assert "running, 1 waiting" in (await command("sessions", *where(worker))).stdout
        await worker.stop()
        assert "waiting (2)" in (await command("sessions", *where(worker))).stdout


async def test_all_sessions_are_listed_even_if_more_exist_than_fit_in_one_reply_of_the_nats_server(
    worker: LocalWorker,
) -> None:
    await worker.client.session("first").append(tokens=[5])
    await worker.stop()
    raw = await nats.connect(worker.settings.nats)
    prefix, js = worker.settings.prefix, raw.jetstream()
    for i in range(2100):
        await raw.publish(f"{prefix}.default.s{i}.in", b"{}")
        seq = 2 * i + 3
        result = {"type": "rewound", "id": "r", "seq": seq, "position": i}
        await raw.publish(f"{prefix}.default.s{i}.commit", json.dumps(result).encode())
    await raw.flush()
    async with asyncio.timeout(10):
        while (await js.stream_info(f"{prefix}_log")).state.messages < 4202:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await raw.close()
    async with connect(worker.settings.nats, prefix=prefix) as client:
        rows = await list_sessions(client)
    assert {row.session: row.position for row in rows} == {f"s{i}": i for i in range(2100)} | {"first": 1}


async def test_the_command_sessions_prints_an_empty_list_if_no_worker_has_created_a_log(
    nats_url: str,
) -> None:
    done = await command("sessions", "--nats", nats_url, "--prefix", "none")
    assert (done.returncode, done.stdout) == (0, "0 of 0 sessions\n"), done.stderr


async def test_the_command_show_prints_the_tool_call_of_an_answer(worker: LocalWorker) -> None:
    sky = {"properties": {"sky": {"const": "blue"}}, "required": ["sky"], "additionalProperties": False}
    await worker.client.session("garden").generate(
        messages=[{"role": "user", "content": "How is the sky?"}],
        tools=[{"type": "function", "function": {"name": "look", "parameters": sky}}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
    )
    done = await command("show", "garden", *where(worker))
    assert re.search(r'^  assistant\n    look\(\{\s*"sky"\s*:\s*"blue"\s*\}\)\n', done.stdout, re.MULTILINE)


async def test_the_command_show_prints_each_request_of_a_conversation_with_its_result_tokens_and_seconds(
    worker: LocalWorker,
) -> None:
    session = worker.client.session("garden")
    await session.append(messages=[{"role": "system", "content": "Be \x1b[2Jbrief."}], request_id="sys")
    await session.generate(messages=[{"role": "user", "content": "Red?"}], max_tokens=3, request_id="q")
    await session.rewind(5, request_id="back")
    with pytest.raises(RequestFailedError):
        await session.rewind(99, request_id="far")
    await session.append(tokens=[5, 6], request_id="ids")
    done = await command("show", "garden", *where(worker))
    assert done.returncode == 0, done.stderr
    heads = [line.split("  ")[:3] for line in done.stdout.splitlines() if line.startswith("#")]
    assert heads == [
        ["#1", "append", "sys"],
        ["#2", "generate", "q"],
        ["#3", "rewind", "back"],
        ["#4", "rewind", "far"],
        ["#5", "append", "ids"],
    ]
    assert "  system\n    Be [2Jbrief.\n  prefilled " in done.stdout, "what was said controls no terminal"
    assert "  user\n    Red?\n  assistant\n" in done.stdout
    assert "answer 3 tokens in " in done.stdout
    assert "  back to position 5\n  rewound; position 5\n" in done.stdout
    assert "  invalid_request: cannot rewind to 99" in done.stdout
    assert "  2 tokens by their ids\n" in done.stdout
    raw = await command("show", "garden", "--last", "4", "--json", *where(worker))
    turns = json.loads(raw.stdout)["turns"]
    assert [turn["number"] for turn in turns] == [2, 3, 4, 5]
    assert turns[0]["request"]["messages"] == [{"role": "user", "content": "Red?"}]
    assert turns[0]["result"]["usage"]["completion_tokens"] == 3
    assert turns[0]["build"]["worker"] == "test"


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (None, ""),
        (Model(name="large", weights="2", tokenizer="1"), "by small, after large"),
        (Model(name="small", weights="2", tokenizer="1"), "by small, after small with other weights"),
        (Model(name="small", weights="2", tokenizer="2"), "by small, after small with another tokenizer"),
    ],
)
def test_the_command_show_says_whether_name_weights_or_tokenizer_of_the_model_changed_in_a_session(
    before: Model | None, says: str
) -> None:
    result = Appended(
        id="a",
        seq=1,
        position=1,
        tokens=0,
        cached_tokens=0,
        prefilled_tokens=0,
        kv_live_bytes=0,
        seconds=0.0,
        model=Model(name="small", weights="1", tokenizer="1"),
        previous_model=before,
    )
    assert taken_over(result) == says


SAY = [{"role": "user", "content": "What is red?"}]


async def family(start: Start) -> LocalWorker:
    """Create a session with two questions, a fork of it before the second one, and a fork of that fork."""
    worker = await start()
    garden = worker.client.session("garden")
    for number in range(2):
        await garden.generate(messages=SAY, max_tokens=4, request_id=f"q{number}")
    for asked in (("garden", "red", "--without-last", 1, "--tag", "try"), ("red", "rose")):
        done = await command("fork", *asked, *where(worker))
        assert done.returncode == 0, done.stderr
    return worker


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in printable(text).splitlines())


async def test_forks_are_listed_with_their_parents_by_info_show_and_sessions_with_the_option_tree(
    local_worker: Start,
) -> None:
    worker = await family(local_worker)
    position = (await worker.client.session("red").info()).position
    end = (await worker.client.session("garden").info()).position
    assert position < end
    answers = {
        name: (await worker.client.session(name).history()).turns[0].answer.text for name in ("garden", "red")
    }
    assert answers["garden"] == answers["red"]
    said = (
        f"  fork of {{}}\n  user\n    What is red?\n  assistant\n{indented(answers['red'])}  opened; position"
    )
    for name, parent in (("red", "garden"), ("rose", "red")):
        shown = (await command("show", name, *where(worker))).stdout
        assert said.format(parent) in shown, "what it has of its parent, and not the second question"
        assert shown.count("What is red?") == 1
    raw = json.loads((await command("show", "rose", "--json", *where(worker))).stdout)
    [inherited] = raw["inherited"].values()
    assert [one["content"] for one in inherited] == ["What is red?", answers["red"]]
    await worker.client.session("garden").close(forget=True)
    done = await command("sessions", "--tree", *where(worker))
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["session", "forked", "at", "position", "state", "tags"],
        ["garden", "-", str(end), "forgotten"],
        ["└─", "red", str(position), str(position), "idle", "try"],
        ["└─", "rose", str(position), str(position), "idle"],
    ]
    (found,) = json.loads((await command("sessions", "--tree", "rose", "--json", *where(worker))).stdout)[
        "trees"
    ]
    assert found["forks"][0]["row"]["tags"] == ["try"]
    listed = (await command("sessions", "--tag", "try", *where(worker))).stdout
    assert f"[try] fork of garden at {position}" in listed
    assert "1 of 2 sessions" in listed
    shown = (await command("show", "red", *where(worker))).stdout
    assert "  fork of garden\n  its beginning is no longer in the log\n  opened; position" in shown
    info = (await command("info", "red", *where(worker))).stdout
    assert f"garden at position {position}" in info


async def test_the_command_fork_fails_for_an_unknown_parent_a_taken_name_or_a_position_beyond_the_end(
    local_worker: Start,
) -> None:
    worker = await family(local_worker)
    end = (await worker.client.session("garden").info()).position
    for asked, says in [
        (("nobody", "x"), "there is no session nobody; see turnkeep sessions"),
        (("garden", "red"), "the session is open already"),
        (("garden", "x", "--position", "99999"), f"cannot fork garden at 99999: it ends at {end}\n"),
        (("garden", "x", "--without-last", "9"), "the session has 2 exchanges, not 9"),
        (("garden", "a.b"), "a.b"),
    ]:
        done = await command("fork", *asked, *where(worker))
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
    assert {row["session"] for row in await listed(worker)} == {"garden", "red", "rose"}
    done = await command("sessions", "--tree", "nobody", *where(worker))
    assert done.stderr == "turnkeep: nobody is not forked, and no fork; see turnkeep sessions\n"


async def test_an_exported_fork_imported_into_another_log_gives_the_same_next_answer_as_the_original(
    local_worker: Start, tmp_path: Path
) -> None:
    worker = await family(local_worker)
    file, data = tmp_path / "red.turnkeep", ("--data-dir", worker.settings.data_dir)
    done = await command("export", "red", file, *data, *where(worker))
    assert done.returncode == 0, done.stderr
    second = await local_worker(prefix=f"other{tmp_path.name}", data_dir=tmp_path / "other")
    done = await command("import", file, *where(second))
    assert done.returncode == 0, done.stderr
    sessions = [one.client.session("red") for one in (worker, second)]
    answers = [await session.generate(messages=SAY, max_tokens=20) for session in sessions]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].position == answers[1].position
    done = await command("replay", "red", "--speed", "max", *where(worker))
    assert "all requests are left out (2 of a fork)" in done.stderr


@pytest.mark.parametrize("of", ["its parent", "its parent, imported later", "another session"])
async def test_an_imported_fork_shows_the_turns_of_its_parent_and_not_of_another_session_of_the_same_name(
    local_worker: Start, tmp_path: Path, of: str
) -> None:
    worker = await family(local_worker)
    second = await local_worker(prefix=f"other{tmp_path.name}", data_dir=tmp_path / "other")
    if of == "another session":
        said = [{"role": "user", "content": "A stranger's secret. " * 9}]
        await second.client.session("garden").generate(messages=said, max_tokens=4)
    files = {"its parent": ["garden", "red"], "its parent, imported later": ["red", "garden"]}
    for name in files.get(of, ["red"]):
        file = tmp_path / name
        for done in (
            await command("export", name, file, *where(worker)),
            await command("import", file, *where(second)),
        ):
            assert done.returncode == 0, done.stderr
    history = await second.client.session("red").history()
    expected = await worker.client.session("red").history()
    assert expected.messages
    assert history.is_whole == (of in files)
    assert history.messages == (expected.messages if history.is_whole else [])


async def test_reading_the_history_of_imported_sessions_that_name_each_other_as_parents_terminates(
    local_worker: Start, tmp_path: Path
) -> None:
    worker = await local_worker()
    second = await local_worker(prefix=f"other{tmp_path.name}", data_dir=tmp_path / "other")
    await worker.client.session("chat").append(text="ab")
    await worker.client.session("chat").fork("tmp")
    await worker.client.session("chat").close()
    await worker.client.session("tmp").fork("chat")
    for name in ("chat", "tmp"):
        file = tmp_path / name
        await command("export", name, file, *where(worker))
        assert (await command("import", file, *where(second))).returncode == 0
    async with asyncio.timeout(5):
        assert (await second.client.session("chat").history()).turns == ()


def test_imported_sessions_that_name_each_other_as_parents_are_shown_once_in_the_tree() -> None:
    """This happens if a session is ended, and a new one of its name is made as a fork of its fork."""
    assert [
        [part.session for part in one] for one in trees([row("a", "b"), row("b", "a"), row("c", "b")])
    ] == [["a", "b", "c"]]


def test_the_command_show_tree_refuses_a_tree_with_too_many_fork_levels_in_one_line() -> None:
    with pytest.raises(TurnkeepError, match="too many levels deep"):
        trees([row(f"s{number}", f"s{number - 1}") for number in range(5000)])


def row(name: str, parent: str) -> SessionRow:
    fields: dict[str, Any] = {"tenant": "t", "state": "idle", "last": datetime.now(UTC), "entries": 2}
    more: dict[str, Any] = {"waiting": 0, "position": 3, "dead": 0, "model": None, "worker": None}
    return SessionRow(session=name, parent=Parent(session=parent, position=3), **fields, **more)


attempt = RequestAttempts.attempt


async def venomous(self: RequestAttempts, pending: Any, answer: Any) -> Any:
    if isinstance(pending.request, Append) and "VENOM" in (pending.request.text or ""):
        raise LookupError("bitten \x1b[2J")
    return await attempt(self, pending, answer)


@pytest.fixture
async def bitten(
    local_worker: Callable[..., Awaitable[LocalWorker]], monkeypatch: pytest.MonkeyPatch
) -> LocalWorker:
    """A worker that has given up a request at position 3, but would now execute it without a fault."""
    monkeypatch.setattr(RequestAttempts, "attempt", venomous)
    bitten = await local_worker(max_attempts=1)
    await bitten.client.session("s").append(tokens=[5] * 3)
    with pytest.raises(RequestFailedError, match="LookupError: bitten"):
        await bitten.client.session("s").append(text="VENOM\x1b[2J", request_id="bad")
    monkeypatch.undo()
    return bitten


async def dead(bitten: LocalWorker, *arguments: object) -> subprocess.CompletedProcess[str]:
    return await command("dead", *arguments, *where(bitten))


async def given_up(bitten: LocalWorker) -> list[dict[str, Any]]:
    done = await command("sessions", "--state", "dead", "--json", *where(bitten))
    found: list[dict[str, Any]] = json.loads(done.stdout)["dead"]
    return found


async def test_the_command_dead_prints_each_request_that_was_given_up_after_failures_with_its_text(
    bitten: LocalWorker,
) -> None:
    (letter,) = await given_up(bitten)
    assert (letter["session"], letter["letter"]["id"], letter["letter"]["position"]) == ("s", "bad", 3)
    row = (await command("sessions", "--state", "dead", *where(bitten))).stdout.splitlines()[1]
    assert row.startswith("s        default  bad      append  1")
    assert "\x1b" not in row
    shown = (await dead(bitten, "show", "s", "bad")).stdout
    assert "it failed for an unknown reason: LookupError: bitten [2J" in shown
    assert shown.endswith("  text\n    VENOM[2J\n")
    raw = json.loads((await dead(bitten, "show", "s", str(letter["letter"]["seq"]), "--json")).stdout)
    assert raw["asked"]["text"] == "VENOM\x1b[2J"
    assert "1 dead" in (await command("sessions", *where(bitten))).stdout


async def test_a_retried_dead_letter_is_kept_and_can_be_retried_again_if_the_first_retry_was_lost(
    bitten: LocalWorker,
) -> None:
    """So the request can be sent once more; by mistake it is not."""
    done = await dead(bitten, "retry", "s", "bad")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(": appended, position 12\n")
    assert [one["letter"]["id"] for one in await given_up(bitten)] == ["bad"]
    assert (await bitten.client.session("s").info()).position == 12
    again = await dead(bitten, "retry", "s", "bad")
    assert again.returncode == 1
    assert again.stderr.startswith("turnkeep: position_conflict: the session is at position 12")
    await bitten.client.session("s").rewind(position=3)  # as if a power cut had lost it
    assert (await dead(bitten, "retry", "s", "bad")).returncode == 0


async def test_a_dead_letter_is_retried_at_a_later_session_position_only_with_the_option_anyway(
    bitten: LocalWorker,
) -> None:
    await bitten.client.session("s").append(tokens=[5])
    done = await dead(bitten, "retry", "s", "bad")
    assert done.returncode == 1
    assert done.stderr.startswith("turnkeep: position_conflict: the session is at position 4")
    assert len(await given_up(bitten)) == 1
    assert (await dead(bitten, "retry", "s", "bad", "--anyway")).returncode == 0


async def test_dropping_a_dead_letter_keeps_its_request_in_the_log(bitten: LocalWorker) -> None:
    assert (await dead(bitten, "drop", "s", "bad")).returncode == 0
    done = await command("sessions", "--state", "dead", *where(bitten))
    assert done.stdout == "there are no dead letters\n"
    assert len(await bitten.client.log("s")) == 4
    again = await dead(bitten, "drop", "s", "bad")
    assert again.returncode == 1
    assert (
        again.stderr
        == "turnkeep: session s has no dead letter of a request bad; see turnkeep sessions --state dead\n"
    )


async def test_reading_the_end_of_a_session_finds_an_answer_that_is_stored_during_the_reading(
    worker: LocalWorker,
) -> None:
    """Its request is read before the answer is stored, and its results too."""

    class Early(LogStream):
        has_read = False

        async def last(self, keys: Any, kind: Any) -> Any:
            is_early = kind == "out" and not self.has_read
            self.has_read = self.has_read or is_early
            async for one in super().last(() if is_early else keys, kind):
                yield one

    await worker.client.session("s").append(text="hello")
    key = SessionKey("default", "s")
    found = await ends(Early(worker.client._wire), {key: {"in": 1}})
    assert found[key].answered is not None
    assert found[key].waiting == ()
