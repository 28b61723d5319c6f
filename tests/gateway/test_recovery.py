"""What a gateway that starts finds in the log of each session."""

from contextlib import suppress
from typing import Any

import pytest

from gateway import boundaries, recovery
from gateway.index import RequestName, SessionIndex
from gateway.recovery import recover
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.session import Session

#: Steps of a session: `a` and `b` are prompts that get an answer.
STORIES: dict[str, dict[str, Any]] = {
    "a b": {"found": {"a", "b"}, "position": "b"},
    "a b rewind": {"found": {"a"}, "position": "a"},
    "a append": {"found": {"a"}, "position": "append"},
    "a b a": {"found": {"a", "b"}, "position": "b"},  # the second `a` repeats the first one's id
    "a !b": {"found": {"a"}, "position": "a", "failed": {"b"}},
    "a !b b": {"found": {"a", "b"}, "position": "b"},
    "a close": {},
    "a close !b": {"found": set(), "position": 0, "failed": {"b"}},
    "a close open": {"found": set(), "position": 0},
    "a close open b": {"found": {"b"}, "position": "b"},
}


async def played(session: Session, story: str) -> dict[str, Any]:
    """Send a story's requests; return the position after each step, and by prompt the digests after it."""
    seen: dict[str, Any] = {0: 0}
    for number, step in enumerate(story.split()):
        match step:
            case "rewind":
                await session.rewind(seen["a"])
            case "append":
                seen[step] = (await session.append(text="More.")).position
            case "close":
                await session.close()
            case "open":
                await session.open()
            case _:
                prompt = prompt_of(session, step[-1])
                name = RequestName(prompt, b"o", number if "!" in step or f"!{step}" in story else 0)
                conflict = {"expect_position": 9999} if "!" in step else {}
                with suppress(RequestFailedError):
                    result = await session.generate(
                        text="Say.", request_id=str(name), max_tokens=3, **conflict
                    )
                    assert not conflict
                    seen[step] = result.position
                    seen[f"after {step}"] = boundaries.after_answer(prompt, result)
    return seen


def prompt_of(session: Session, letter: str) -> bytes:
    """Return the digest of a session's own prompt."""
    return f"{letter}{session.key.session[-15:]}".encode()


async def test_a_starting_gateway_indexes_each_session_by_the_turns_that_are_still_in_the_log(
    worker: Any,
) -> None:
    sessions = {story: worker.client.session(f"gw-{at:032x}") for at, story in enumerate(STORIES)}
    seen = {story: await played(session, story) for story, session in sessions.items()}
    index = SessionIndex()
    await recover(worker.client, index)
    for story, expected in STORIES.items():
        held = index.sessions.get(sessions[story].key.session)
        assert (held is not None) == bool(expected), story
        if held is None:
            continue
        assert held.position == seen[story][expected["position"]], story
        for letter in "ab":
            ends = [index.find(one) for one in seen[story].get(f"after {letter}", ())]
            end = (held, (seen[story][letter], True)) if letter in expected["found"] else None
            assert ends == [end] * len(ends), f"{letter} in {story}"
            asked = index.asked.get((prompt_of(sessions[story], letter), b"o"))
            state = asked.state if asked is not None else ""
            assert (state == "failed") == (letter in expected.get("failed", ())), f"{letter} in {story}"


async def test_a_starting_gateway_reads_recent_sessions_whole_and_of_older_sessions_only_the_last_position(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_MOST_READ", 1)
    seen = [await played(worker.client.session(f"gw-{at:032x}"), "a b") for at in (2, 1)]
    index = SessionIndex()
    await recover(worker.client, index)
    found = [[any(index.find(one) for one in each[f"after {letter}"]) for letter in "ab"] for each in seen]
    assert found == [[False, False], [True, True]]
    assert {one.position for one in index.sessions.values()} == {each["b"] for each in seen}
    assert len(index.sessions) == 2


async def test_after_a_gateway_reads_the_log_twice_a_running_request_in_its_index_has_a_session_in_the_index(
    worker: Any,
) -> None:
    """The first reading may have failed in the middle."""
    session = worker.client.session(f"gw-{3:032x}")
    name = RequestName(prompt_of(session, "a"), b"o", 0)
    running = session.generate(text="Say.", request_id=str(name), max_tokens=50_000)
    await running.send()
    index = SessionIndex()
    for _ in range(2):
        await recover(worker.client, index)
    [asked] = index.asked.values()
    assert asked.session is index.sessions[session.key.session]
    await session.cancel(str(name))
    await running
