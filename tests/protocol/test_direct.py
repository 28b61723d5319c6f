"""A batched direct get returns all of its messages, or raises an error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest

from turnkeep_client.direct import DirectGets


def sent(seq: int, before: int) -> Any:
    return SimpleNamespace(headers={"Nats-Sequence": str(seq), "Nats-Last-Sequence": str(before)})


WHOLE = [sent(5, 0), sent(7, 5), sent(9, 7)]
END = SimpleNamespace(headers={"Status": "204", "Nats-Num-Pending": "3", "Nats-Last-Sequence": "9"})


class Connection:
    """Answers each direct get with these messages."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def subscribe(self, _: str, cb: Any) -> None:
        self._arrived = cb

    async def publish(self, _subject: str, _body: bytes, reply: str) -> None:
        for one in self._messages:
            one.subject = reply
            await self._arrived(one)


@pytest.mark.parametrize("missing", [None, 0, 1, 2])
async def test_a_batch_that_lost_a_message_with_the_connection_raises_a_timeout(missing: int | None) -> None:
    messages = [one for n, one in enumerate(WHOLE) if n != missing]
    gets = DirectGets(Connection([*messages, END]), timeout_s=1)  # type: ignore[arg-type]
    if missing is None:
        assert await gets.read("log", {}) == (WHOLE, 3)
        return
    with pytest.raises(nats.errors.TimeoutError):
        await gets.read("log", {})
