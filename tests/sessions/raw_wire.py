"""Raw access to a worker's subjects: publishes any bytes, receives all results, checks the log at the end."""

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
#: A generate of many steps: the random model draws no end token after this text.
LONG = {"text": "eee", "max_tokens": 1900}


def append(request_id: str, text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"type": "append", "id": request_id, "text": text, **more}


def generate(request_id: str, **more: Any) -> dict[str, Any]:
    return {"type": "generate", "id": request_id, "max_tokens": 4} | more


def user(text: str) -> list[dict[str, str]]:
    """Return the messages of a request that has one, of a user."""
    return [{"role": "user", "content": text}]


class Wire:
    """A NATS connection with the protocol's subjects, on which tests may send any bytes."""

    def __init__(self, nc: Nats, worker: Any) -> None:
        self.nc = nc
        self.js = nc.jetstream()
        self.worker = worker
        self.prefix: str = worker.settings.prefix
        self.results: dict[int, list[dict[str, Any]]] = {}
        #: Stream sequences of the messages that a test itself has put on `out`.
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
        """Publish `body` on a session's `in`, so that the log stores it; return its sequence."""
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

    async def forge(self, session: str, body: bytes) -> int:
        """Store a message on a session's `out` that no worker has made."""
        ack = await self.js.publish(self.subject(session, "commit"), body)
        self.forged.add(ack.seq)
        return int(ack.seq)

    async def control(self, session: str, body: bytes | dict[str, Any], **more: Any) -> dict[str, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = await self.nc.request(self.subject(session, "ctl", **more), raw, timeout=PATIENCE_S)
        found: dict[str, Any] = json.loads(reply.data)
        return found

    async def position(self, session: str, **more: Any) -> int:
        """Return a session's position by an `info` request; 0 if there is no such session."""
        return int((await self.control(session, {"type": "info"}, **more)).get("position", 0))

    async def until(self, session: str, state: str) -> dict[str, Any]:
        """Wait until a session's `info` has this state; return the info."""
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
            with contextlib.suppress(NotFoundError):  # removed entries, such as notes of attempts
                message = await self.js.get_msg(stream, seq)
                found.append((seq, str(message.subject), message.data or b""))
        return found

    async def check_log(self) -> None:
        """Assert that each request in the log has a result of its session, and that none has two.

        Forged results are ignored.
        """
        for _ in range(50):  # a subscriber may receive a result before the log has stored it
            asked, answered = [], []
            for seq, subject, body in await self.entries():
                session, _, kind = subject.rpartition(".")
                if kind == "in":
                    asked.append((seq, session))
                elif kind == "out" and seq not in self.forged:
                    answered.append((json.loads(body)["seq"], session))
            if set(asked) <= set(answered):
                break
            await asyncio.sleep(0.1)
        assert set(asked) <= set(answered)
        assert len(set(answered)) == len(answered)


#: The fixture `wire`: starts a worker with these settings.
Start = Callable[..., Awaitable[Wire]]
