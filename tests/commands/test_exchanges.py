"""The last exchanges of a session are read from the end of its log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from commands.branches import rewind_last
from commands.exchanges import last_exchanges
from turnkeep_client import session_log
from turnkeep_client.errors import InvalidMessageError, RequestFailedError


def user(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 3}


async def test_the_last_exchanges_omit_failed_repeated_rewound_and_closed_ones(
    local_worker: Callable[..., Any],
) -> None:
    worker = await local_worker()
    session = worker.client.session("s")

    async def seen() -> list[tuple[str, int | None]]:
        return [(one.question, one.start) for one in await last_exchanges(worker.client, "s", 99)]

    assert await seen() == []
    first = await session.generate(**user("one"), request_id="one")
    told = await session.append(messages=[{"role": "system", "content": "Be brief."}])
    second = await session.generate(**user("two"))
    assert await seen() == [("one", 0), ("two", told.position)]
    with pytest.raises(RequestFailedError):
        await session.generate(**user("x" * 3000))
    assert (await session.generate(**user("one"), request_id="one")).repeat_of == first.seq
    await session.generate(**user("three"))
    assert await seen() == [("one", 0), ("two", told.position), ("three", second.position)]
    await session.rewind(second.position - 1)
    assert await seen() == [("one", 0)]
    await session.close()
    assert await seen() == []
    await session.open()
    await session.generate(text="raw", max_tokens=2)
    assert await seen() == [("raw", 0)]


async def test_the_last_exchanges_are_found_by_reading_only_the_end_of_a_long_log(
    local_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await local_worker()
    session = worker.client.session("s")
    for i in range(12):
        await session.generate(**user(f"question {i}"))
        await worker.client.session("other").append(text="x")
    monkeypatch.setattr(session_log, "TAIL", 8)
    parts = [part async for part in session_log.tails(worker.client.stored, session.key)]
    assert parts[-1] == await session_log.read(worker.client.stored, session.key)
    assert [len(part.exchanges) for part in parts] == [2, 8, 12]

    found = await last_exchanges(worker.client, "s")
    assert found[-1].question == "question 11"
    assert len(found) < 12
    all_of_them = await last_exchanges(worker.client, "s", 12)
    assert [one.question for one in all_of_them] == [f"question {i}" for i in range(12)]
    assert found[-1] == all_of_them[-1]
    assert found[-1].start is not None


async def test_an_exchange_has_no_start_position_if_a_later_one_has_moved_its_tokens(
    local_worker: Callable[..., Any],
) -> None:
    worker = await local_worker()
    session = worker.client.session("s")
    for word in ("one", "two"):
        await session.generate(**user(word))
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    third = await session.generate(**user("three"), tools=tools)
    assert third.rewritten_from == 1
    assert [one.start for one in await last_exchanges(worker.client, "s", 9)] == [0, None, None]
    with pytest.raises(InvalidMessageError, match="rewind further"):
        await rewind_last(worker.client, "s", 2, 20)
    await session.append(messages=[{"role": "system", "content": "Be brief."}], tools=[])
    fourth = await session.generate(**user("four"))
    assert [one.start is None for one in await last_exchanges(worker.client, "s", 9)] == [
        False,
        True,
        True,
        False,
    ]
    assert fourth.position < third.position, "without the tools"
    await rewind_last(worker.client, "s", 1, 20)
    assert [one.question for one in await last_exchanges(worker.client, "s", 9)] == ["one", "two", "three"]
