"""Simulated gateways, and HTTP clients that disconnect during an answer and resume it at any gateway."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gateway.app import Gateway
from gateway.index import PREFIX
from gateway.keys import Keys
from tests.at_rest import held
from turnkeep_client.client import connect
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.subjects import DEFAULT_TENANT, SessionKey

from .loop import Process

if TYPE_CHECKING:
    from random import Random

    from turnkeep_client.client import Client

    from .actors import History

#: HTTP statuses after which a client may send the same request again.
_AGAIN: Final = frozenset({408, 409, 429, 500, 502, 503, 504})
_PAUSE_S: Final = 0.2
_NUM_STARTING: Final = 2
_LAST: Final = frozenset({"response.completed", "response.incomplete", "response.failed"})


class CutError(Exception):
    """The gateway has died, or has answered that the request may be sent again."""


class Event(NamedTuple):
    """An event of a streamed answer: its sequence number, and its JSON text."""

    number: int
    said: str


class Exchange:
    """One HTTP request, and the parts of its response that have arrived."""

    def __init__(self, process: Process) -> None:
        self.status = 0
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._left = asyncio.Event()
        self._rest = b""
        process.on_death.append(lambda: self._parts.put_nowait(None))

    async def run(self, app: Any, scope: dict[str, Any], body: bytes) -> None:
        """Run the gateway's ASGI application on the request. Runs in the gateway's process."""
        sent = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await self._left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif message.get("body"):
                self._parts.put_nowait(message["body"])
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._parts.put_nowait(b"")

        await app(scope, receive, send)

    def leave(self) -> None:
        """Close the client's connection."""
        self._left.set()

    async def _part(self) -> bytes:
        if (part := await self._parts.get()) is None:
            raise CutError
        return part

    async def whole(self) -> Any:
        """Wait for the whole body, and return it as parsed JSON. Raises `CutError`."""
        body = b""
        while part := await self._part():
            body += part
        if self.status in _AGAIN:
            raise CutError
        return json.loads(body)

    async def event(self) -> Event | None:
        """Return the next event of the stream, or None at its end. Raises `CutError`."""
        while True:
            while b"\n\n" not in self._rest:
                part = await self._part()
                if self.status in _AGAIN:
                    raise CutError
                if not part:
                    return None
                self._rest += part
            block, _, self._rest = self._rest.partition(b"\n\n")
            for line in block.decode().split("\n"):  # not `splitlines`: texts may contain other line ends
                if line.startswith("data: {"):
                    said = json.loads(line[6:])
                    return Event(said["sequence_number"], line[6:])


class Gate:
    """A simulated gateway process, which is replaced by another one when it is killed."""

    def __init__(self, history: History, number: int) -> None:
        self._history = history
        self._number = number
        self.process = Process(history.loop, f"gateway {number}")
        self._gateway: Gateway | None = None
        self._clients: list[Client] = []

    def start(self) -> None:
        async def connected(tenant: str, _: str) -> Client:
            while True:
                try:
                    client = await connect(
                        "nats://world:4222", tenant=tenant, timeout_s=60.0, control_timeout_s=1.0
                    )
                except TurnkeepError:
                    await asyncio.sleep(_PAUSE_S)
                else:
                    return client

        self._gateway = Gateway(connected, Keys(), idle_s=1e6, patience_s=1.0, name=f"g{self._number}")

    def kill(self) -> None:
        """Kill the process as `kill -9` does, and start another one."""
        self._history.note(self.process.name, "killed")
        self.process.kill()
        self.process = Process(self._history.loop, f"gateway {self._number}")
        self.start()

    def ask(self, method: str, path: str, body: Any = None, *, query: str = "", key: str = "") -> Exchange:
        """Start a request to this gateway. `key` is the request's `Idempotency-Key`."""
        assert self._gateway is not None
        given = {"host": "localhost", "content-type": "application/json"}
        given |= {"idempotency-key": key} if key else {}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8080),
        }
        exchange = Exchange(self.process)
        self.process.start(exchange.run(self._gateway.app, scope, json.dumps(body).encode() if body else b""))
        return exchange

    @property
    def leftovers(self) -> Counter[str]:
        """What must not be there in an idle gateway, such as running answers."""
        return held(self._gateway)

    async def close(self) -> None:
        if self._gateway is not None:
            await self.process.start(self._gateway.connections.close())


class Visitor:
    """A client of the gateways. Its requests have idempotency keys; it disconnects and resumes answers."""

    def __init__(self, history: History, number: int) -> None:
        self._history = history
        self._number = number
        self.process = Process(history.loop, f"visitor {number}")
        self.is_done = asyncio.Event()

    def start(self) -> None:
        self.process.start(self._live())

    def kill(self) -> None:
        """Kill a random gateway instead of the visitor, which must remember the events that it has read."""
        self._history.loop.random.choice(self._history.gates).kill()

    async def _live(self) -> None:
        try:
            for number in range(self._history.plan.num_requests):
                act = f"visitor {self._number} request {number}"
                if (random := self._history.begin(act)) is not None:
                    await self._visit(random, f"k{self._number}-{number}")
        except Exception as error:
            self._history.faults.append(f"a visitor ended by {error!r}")
        self.is_done.set()

    async def _visit(self, random: Random, key: str) -> None:
        """Send a request, read its answer over many connections, and compare it with the recorded answer."""
        body = {"model": "x", "input": random.choice(("hello", "what now?", "é")), "stream": True}
        body |= {"background": True, "max_output_tokens": random.choice((1, 3, 8, 30))}
        body["temperature"] = random.choice((0.0, 1.0))
        seen: dict[int, str] = {}
        answer_id, is_over = "", False  # the id comes with the first event
        while not is_over:
            gate = random.choice(self._history.gates)
            if answer_id and random.random() < 0.7:
                after = max(seen, default=-1) if random.random() < 0.8 else -1
                query = "stream=true" + (f"&starting_after={after}" if after >= 0 else "")
                exchange = gate.ask("GET", f"/v1/responses/{answer_id}", query=query)
            else:
                after = -1
                exchange = gate.ask("POST", "/v1/responses", body, key=key)
            self._history.note(self.process.name, f"{key} from {after} at {gate.process.name}")
            try:
                is_over = await self._read(exchange, key, seen, after, random.choice((1, 2, 5, 99)))
            except CutError:
                await asyncio.sleep(_PAUSE_S)
            exchange.leave()
            answer_id = ""
            if seen:
                answer_id = json.loads(seen[min(seen)])["response"]["id"]
            await asyncio.sleep(random.choice((0.0, 0.0, 0.05, 1.0)))
        await self._compare(random, key, answer_id, body, seen)

    async def _read(self, exchange: Exchange, key: str, seen: dict[int, str], after: int, most: int) -> bool:
        """Read up to `most` events after number `after`; return whether the answer's last event came."""
        while most and (event := await exchange.event()) is not None:
            most -= 1
            if event.number == after and '"type":"response.in_progress"' in event.said:
                continue  # a keep-alive
            if json.loads(event.said)["type"] == "error":
                raise CutError
            if event.number != after + 1:
                self._history.faults.append(f"{key}: event {event.number} came behind {after}")
            if seen.setdefault(event.number, event.said) != event.said:
                self._history.faults.append(
                    f"{key}: event {event.number} was {seen[event.number]}, then {event.said}"
                )
            after = event.number
            if json.loads(event.said)["type"] in _LAST:
                return True
        if exchange.status == 404 and max(seen, default=0) < _NUM_STARTING:
            seen.clear()  # the log never had the request; the event with the error was not read
        elif exchange.status >= 400:
            raise AssertionError(f"{key}: refused with {exchange.status}")
        return False

    async def _compare(
        self, random: Random, key: str, answer_id: str, body: Any, seen: dict[int, str]
    ) -> None:
        """Check that the recorded answer has the streamed text, and that no other request can use the key."""
        deltas = [json.loads(seen[number]) for number in sorted(seen)]
        streamed = "".join(one["delta"] for one in deltas if one["type"] == "response.output_text.delta")
        while True:
            gate = random.choice(self._history.gates)
            try:
                shown = await gate.ask("GET", f"/v1/responses/{answer_id}").whole()
                other = gate.ask("POST", "/v1/responses", body | {"input": "other"}, key=key)
                await other.whole()
                break
            except CutError:
                await asyncio.sleep(_PAUSE_S)
        said = "".join(part["text"] for item in shown.get("output", ()) for part in item.get("content", ()))
        if sorted(seen) != list(range(len(seen))):
            self._history.faults.append(f"{key}: of its events {sorted(seen)} were seen")
        session = f"{PREFIX}{answer_id.removeprefix('resp_')[:32]}"
        self._history.shown[SessionKey(DEFAULT_TENANT, session)] = shown, said
        if said != streamed:
            fault = f"{key}: {streamed!r} was streamed, and {said!r} is recorded"
            self._history.differing.append((session, fault))
        if other.status != 422:
            self._history.faults.append(f"{key}: another request with this key got {other.status}")
