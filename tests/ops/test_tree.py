"""`turnkeep fork` and `sessions --tree`, and how `show`, `sessions`, `info` and `export` treat forks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from commands.screen import printable
from ops.log.sessions import SessionRow, trees
from tests.commands.command_runs import command, where
from tests.parts import LocalWorker
from turnkeep_client.messages import Parent

Start = Callable[..., Awaitable[LocalWorker]]

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


async def test_show_tree_sessions_and_info_display_forks_with_their_parents(local_worker: Start) -> None:
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


async def test_a_fork_that_is_impossible_fails_and_says_why(local_worker: Start) -> None:
    worker = await family(local_worker)
    for asked, says in [
        (("nobody", "x"), "there is no session nobody; see turnkeep sessions"),
        (("garden", "red"), "the session is open already"),
        (("garden", "x", "--position", "99999"), "cannot fork garden at 99999"),
        (("garden", "x", "--without-last", "9"), "the session has 2 exchanges, not 9"),
        (("garden", "a.b"), "a.b"),
    ]:
        done = await command("fork", *asked, *where(worker))
        assert (done.returncode, done.stdout) == (1, "")
        assert says in done.stderr
    done = await command("sessions", "--tree", "nobody", *where(worker))
    assert done.stderr == "turnkeep: nobody is not forked, and no fork; see turnkeep sessions\n"


async def test_an_exported_fork_continues_in_another_log_with_its_inherited_conversation(
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
async def test_an_imported_fork_shows_the_turns_of_its_parent_and_none_of_another_session_of_that_name(
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


async def test_the_history_of_imported_sessions_that_name_each_other_as_parents_ends(
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


def test_sessions_forked_from_each_other_in_a_circle_are_shown_once() -> None:
    """This happens if a session is ended, and a new one of its name is made as a fork of its fork."""
    assert [
        [part.session for part in one] for one in trees([row("a", "b"), row("b", "a"), row("c", "b")])
    ] == [["a", "b", "c"]]


def row(name: str, parent: str) -> SessionRow:
    fields: dict[str, Any] = {"tenant": "t", "state": "idle", "last": datetime.now(UTC), "entries": 2}
    more: dict[str, Any] = {"waiting": 0, "position": 3, "dead": 0, "model": None, "worker": None}
    return SessionRow(session=name, parent=Parent(session=parent, position=3), **fields, **more)
