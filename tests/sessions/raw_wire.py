"""A raw sight of a worker's subjects: publish any bytes, see every answer, and check the log at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client as Nats
from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from worker.wire.connection import confirm_subscriptions

PATIENCE_S = 20.0

#: Takes many steps: the random model does not end its turn behind this text.
LONG = {"text": "eee", "max_tokens": 1900}


def append(request_id: str, text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"type": "append", "id": request_id, "text": text, **more}


def generate(request_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "generate", "id": request_id, "max_tokens": 4} | more


class Wire:
    """A NATS connection that knows the protocol's subjects, and nothing of what may be sent there."""

    def __init__(self, nc: Nats, worker: Any) -> None:
        self.nc = nc
        self.js = nc.jetstream()
        self.worker = worker
        self.prefix: str = worker.settings.prefix
        self.results: dict[int, list[dict[str, Any]]] = {}
        #: What a test put on `out` itself, by stream sequence.
        self.forged: set[int] = set()
        self._news = asyncio.Event()

    async def listen(self) -> None:
        await self.nc.subscribe(f"{self.prefix}.*.*.out", cb=self._arrived)
        await confirm_subscriptions(self.nc)

    async def _arrived(self, message: Msg) -> None:
        try:
            result = json.loads(message.data)
            self.results.setdefault(result["seq"], []).append(result)
        except (ValueError, LookupError, TypeError):
            return
        self._news.set()

    def subject(self, session: str, kind: str, tenant: str = "default") -> str:
        return f"{self.prefix}.{tenant}.{session}.{kind}"

    async def publish(
        self, session: str, body: bytes | dict[str, Any], *, tenant: str = "default", **headers: str
    ) -> int:
        """Store `body` on a session's `in`; returns its sequence."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        ack = await self.js.publish(self.subject(session, "in", tenant), raw, headers=named or None)
        return int(ack.seq)

    async def result(self, seq: int) -> dict[str, Any]:
        """Wait for the result of the request at `seq`."""
        async with asyncio.timeout(PATIENCE_S):
            while seq not in self.results:
                self._news.clear()
                await self._news.wait()
        return self.results[seq][0]

    async def send(self, session: str, body: bytes | dict[str, Any], **more: Any) -> dict[str, Any]:
        """Publish a request and return its result."""
        return await self.result(await self.publish(session, body, **more))

    async def forge(self, session: str, body: bytes, tenant: str = "default") -> int:
        """Put something on a session's `out` that no worker has put there."""
        ack = await self.js.publish(self.subject(session, "commit", tenant), body)
        self.forged.add(ack.seq)
        return int(ack.seq)

    async def control(self, session: str, body: bytes | dict[str, Any], **more: Any) -> dict[str, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self.nc.request(self.subject(session, "ctl", **more), raw, timeout=PATIENCE_S)
        found: dict[str, Any] = json.loads(reply.data)
        return found

    async def position(self, session: str, **more: Any) -> int:
        """Ask for a session's position; one that does not exist has 0."""
        return int((await self.control(session, {"type": "info"}, **more)).get("position", 0))

    async def until(self, session: str, state: str) -> dict[str, Any]:
        """Wait until a session is in this state."""
        async with asyncio.timeout(PATIENCE_S):
            while (info := await self.control(session, {"type": "info"})).get("state") != state:
                pass
        return info

    async def entries(self) -> list[tuple[int, str, bytes]]:
        """Read the whole log: sequence, subject and body of each entry."""
        stream = f"{self.prefix.replace('.', '_')}_log"
        state = (await self.js.stream_info(stream)).state
        found = []
        for seq in range(max(state.first_seq, 1), state.last_seq + 1):
            with contextlib.suppress(NotFoundError):  # counts of attempts are removed
                message = await self.js.get_msg(stream, seq)
                found.append((seq, str(message.subject), message.data or b""))
        return found

    async def check_log(self) -> None:
        """Assert that every entry of `in` has exactly one in `out`, of its session, and `out` no more."""
        for _ in range(50):  # who listens may hear of a result before it is stored
            asked, answered = [], []
            for seq, subject, body in await self.entries():
                session, _, kind = subject.rpartition(".")
                if kind == "in":
                    asked.append((seq, session))
                elif kind == "out" and seq not in self.forged:
                    answered.append((json.loads(body)["seq"], session))
            if len(answered) >= len(asked):
                break
            await asyncio.sleep(0.1)
        assert sorted(answered) == sorted(asked)


#: The fixture `wire`: starts a worker with these settings.
Start = Callable[..., Awaitable[Wire]]
