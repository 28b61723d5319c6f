"""Answers of workers and gateways that are killed, stopped, restarted or silent for long."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from crafted import LETTERS
from openai import AsyncOpenAI
from parts import free_port, until

from gateway import conversations, removal
from turnkeep_client.errors import NoAnswerError
from turnkeep_client.messages import (
    Close,
    Generated,
    MetricsRequest,
    decode_control,
    decode_request,
    decode_result,
    failure,
)
from turnkeep_client.wire import NatsWire
from worker.sessions.control import Control

if TYPE_CHECKING:  # its import takes a second, in each process of a run
    from anthropic import AsyncAnthropic

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"


def question(text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": max_tokens, "logit_bias": LETTERS, "temperature": 0.9, **more}


async def forgotten(client: Any, session: str | None = None) -> None:
    """Wait until the log, or a session's part of it, has no text with the word `secret`."""
    async with asyncio.timeout(30):
        while any(b"secret" in one.body for one in await client.log(*filter(None, [session]))):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture
async def started(worker_process: Any, endless_model: Path) -> Any:
    process = worker_process(model=endless_model)
    process.start()
    client = await process.client()
    await until(lambda: '"event": "ready"' in process.log)
    yield process, client
    await client.close()


class Followed:
    """What a client receives of a streamed chat completion: lines, text, the answer's id, the session."""

    def __init__(self) -> None:
        self.text = ""
        self.id = ""
        self.lines: list[str] = []
        self.session = ""

    async def follow(self, url: str, body: dict[str, Any]) -> None:
        async with (
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
            http.stream("POST", CHAT, json={**body, "stream": True}) as response,
        ):
            assert response.status_code == 200
            self.session = response.headers["x-turnkeep-session"]
            async for line in response.aiter_lines():
                self.lines.append(line)
                if line.startswith("data: {"):
                    body = json.loads(line.removeprefix("data: "))
                    assert "error" not in body, body
                    self.id = body["id"]
                    self.text += "".join(one["delta"].get("content") or "" for one in body["choices"])


async def recorded(client: Any, session: str) -> list[Generated]:
    entries = [one for one in await client.log(session.split(maxsplit=1)[0]) if one.kind == "out"]
    return [one for one in map(decode_result, (one.body for one in entries)) if isinstance(one, Generated)]


async def test_a_chat_stream_whose_worker_is_killed_twice_completes_with_the_text_of_the_logged_result(
    started: Any, door: Any
) -> None:
    process, client = started
    served = await door(process.url)
    one = Followed()
    task = asyncio.create_task(one.follow(served.url, question("Begin.", 600)))
    for num_tokens in (20, 80):
        await until(lambda: len(one.text) > num_tokens)  # noqa: B023
        process.kill()
        process.start()
    await asyncio.wait_for(task, 60)
    (result,) = await recorded(client, one.session)
    assert (len(result.tokens), one.text) == (600, result.text)
    assert process.log.count("resuming an interrupted answer") >= 1
    assert 20 < result.resumed_tokens < 600
    assert served.gateway.counters.num_resumed == 1
    assert one.lines[-2] == "data: [DONE]"
    more = question("Begin.", 4)
    more["messages"] += [{"role": "assistant", "content": one.text}, {"role": "user", "content": "On."}]
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        answer = await http.post(CHAT, json=more)
    assert answer.headers["x-turnkeep-session"] == f"{one.session.split(maxsplit=1)[0]} continued"


async def test_a_gateway_answers_503_while_the_nats_server_it_needs_has_not_started_yet(
    worker_process: Any, tmp_path: Path
) -> None:
    port, nats_port, log = free_port(), free_port(), tmp_path / "gateway.log"
    process = worker_process(port=nats_port)
    command = [sys.executable, "-m", "commands", "gateway", "--listen", str(port)]
    command += ["--data-dir", str(process.data_dir), "--nats-port", str(nats_port)]
    with log.open("wb") as output:
        gateway = subprocess.Popen(command, stderr=output)  # noqa: ASYNC220
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            await until(lambda: "the gateway is at" in log.read_text())
            for path in (CHAT, "/v1/messages", "/v1/responses", "/api/chat"):
                refused = await http.post(path, json=question("Begin.", 4) | {"input": "Begin."})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5"), refused.text
            assert (await http.get("/health")).status_code == 503
            assert "no NATS server at" in log.read_text()
            process.start()
            async with asyncio.timeout(60):
                while (await http.post(CHAT, json=question("Begin.", 4))).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
    finally:
        gateway.terminate()
        assert gateway.wait(30) == 143
    assert log.read_text().splitlines()[1:] == [f"the gateway is at http://127.0.0.1:{port}/v1"]


@pytest.mark.serves("endless_model")
async def test_a_gateway_stopped_before_an_answer_is_complete_asks_its_client_to_repeat_the_request(
    worker: Any, gateway: Any
) -> None:
    stopped = await gateway()
    stopped.server.config.timeout_graceful_shutdown = 0
    paths, asked = (CHAT, "/v1/messages", "/v1/responses", "/api/chat"), question("Begin.", 600)
    asked |= {"input": "Begin.", "stream": False}
    async with httpx2.AsyncClient(base_url=stopped.url, timeout=60) as http:
        waiting = [asyncio.create_task(http.post(path, json=asked)) for path in paths]
        await until(lambda: stopped.gateway.counters.num_running == len(paths))
        await asyncio.sleep(0.5)
        stopped.server.should_exit = True
        for one in waiting:
            cut = await one
            assert (cut.status_code, cut.headers["retry-after"]) == (503, "1"), cut.text
            assert "send the request again" in str(cut.json()["error"])
        await stopped.task
    served = await gateway()
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        again = await http.post(CHAT, json=asked)
    assert (again.status_code, again.headers["x-turnkeep-session"].split()[1]) == (200, "repeated")


async def test_a_gateway_that_stops_while_a_request_body_is_incomplete_returns_an_error_in_the_apis_form(
    worker: Any, gateway: Any
) -> None:
    stopped = await gateway()
    stopped.server.config.timeout_graceful_shutdown = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx2.URL(stopped.url).port)
    writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
    await until(lambda: stopped.server.server_state.tasks)
    stopped.server.should_exit = True
    told = await reader.readuntil(b'"}}')
    assert (b" 503 " in told, b'"overloaded_error"' in told) == (True, True), told
    writer.close()
    await stopped.task


STREAMS: dict[str, dict[str, Any]] = {
    CHAT: {},
    "/v1/completions": {"prompt": "Begin."},
    "/v1/messages": {},
    "/v1/responses": {"input": "Begin.", "max_output_tokens": 1200},
    "/api/chat": {"model": "m"},
    "/api/generate": {"model": "m", "prompt": "Begin."},
}


@pytest.mark.serves("endless_model")
async def test_a_stream_cut_by_a_stopping_gateway_ends_with_an_error_event_and_is_resumed_at_another_gateway(
    worker: Any, gateway: Any
) -> None:
    stopped, found = await gateway(), dict.fromkeys(STREAMS, "")
    stopped.server.config.timeout_graceful_shutdown = 0

    async def follow(url: str, path: str, headers: Any) -> str:
        body, written = question("Begin.", 1200) | STREAMS[path] | {"stream": True}, ""
        async with (
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
            http.stream("POST", path, json=body, headers=headers) as response,
        ):
            assert response.status_code == 200
            async for part in response.aiter_text():
                written += part
                found[path] = written
        return written

    tasks = {path: asyncio.create_task(follow(stopped.url, path, {})) for path in STREAMS}
    await until(lambda: all(one.count("\n") > 9 for one in found.values()))
    stopped.server.should_exit = True
    cut = {path: await task for path, task in tasks.items()}
    await stopped.task
    served = await gateway()
    for path, written in cut.items():
        last = written.strip().splitlines()[-1].removeprefix("data: ")
        assert "send the request again" in str(json.loads(last)["error"]), (path, last)
        if not path.startswith("/api/"):
            ids = [line.removeprefix("id: ") for line in written.splitlines() if line.startswith("id: ")]
            rest = await follow(served.url, path, {"last-event-id": ids[-1]})
            async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
                whole = await http.get(f"{path}/{ids[0].partition('.')[0]}?stream=true")
                if path.endswith("responses"):
                    number = json.loads(last)["sequence_number"]
                    behind = await http.get(f"{whole.url}&starting_after={number}")
                    assert read_text(behind.text) == read_text(rest)
            parts = [read_text(one) for one in (written, rest, whole.text)]
            assert (len(parts[2]), parts[0] + parts[1]) == (1200, parts[2]), path


def read_text(written: str) -> str:
    """Return the text of the answer in a stream of any of OpenAI's and Anthropic's APIs."""
    lines = [line.removeprefix("data: ") for line in written.splitlines() if line.startswith("data: {")]
    return "".join(text_in(json.loads(line)) for line in lines)


def text_in(event: dict[str, Any]) -> str:
    for choice in event.get("choices", ()):
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    delta = event.get("delta", "")
    return delta if isinstance(delta, str) else delta.get("text", "")


@pytest.mark.serves("endless_model")
async def test_openais_and_anthropics_clients_raise_an_error_when_a_stopping_gateway_cuts_a_stream(
    worker: Any, gateway: Any
) -> None:
    from anthropic import APIStatusError, AsyncAnthropic
    from openai import APIError

    stopped = await gateway()
    stopped.server.config.timeout_graceful_shutdown = 0
    parts = dict.fromkeys(BY_CLIENT, 0)

    async def follow(name: str, anthropic: AsyncAnthropic) -> None:
        async for part in texts(stopped.openai, anthropic, name, 2000):
            parts[name] += len(part)

    async with AsyncAnthropic(base_url=stopped.url, api_key="none", max_retries=0) as anthropic:
        tasks = {name: asyncio.create_task(follow(name, anthropic)) for name in BY_CLIENT}
        await until(lambda: min(parts.values()) > 20)
        stopped.server.should_exit = True
        for name, task in tasks.items():
            error = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(error, APIStatusError if name == "message" else APIError), (name, error)
            assert "send the request again" in str(error)
    await stopped.task


async def stopped_in_mid_answer(gateway: Any, asked: dict[str, Any]) -> Followed:
    """Stop a gateway while it streams an answer; return what the client has received by then."""
    one = Followed()
    task = asyncio.create_task(one.follow(gateway.url, asked))
    await until(lambda: len(one.text) > 20)
    await gateway.stop()
    task.cancel()
    return one


@pytest.mark.serves("endless_model")
@pytest.mark.parametrize(("is_fork", "more"), [(False, {}), (True, {}), (False, {"user": "u"})])
async def test_a_request_repeated_after_a_gateway_restart_gets_the_answer_that_is_still_running(
    worker: Any, gateway: Any, is_fork: bool, more: dict[str, Any]
) -> None:
    """With other fields (`more`) that do not change the answer, the answer has an id of its own."""
    stopped = await gateway()
    asked = question("Begin.", 4)
    if is_fork:
        async with httpx2.AsyncClient(base_url=stopped.url, timeout=60) as http:
            said = (await http.post(CHAT, json=asked)).json()["choices"][0]["message"]
            for text in ("On.", "Or."):
                said_on = [*asked["messages"], said, {"role": "user", "content": text}]
                assert (await http.post(CHAT, json=asked | {"messages": said_on})).status_code == 200
        asked["messages"] = [*said_on[:-1], {"role": "user", "content": "Else."}]
    asked["max_tokens"] = 300
    cut, again = await stopped_in_mid_answer(stopped, asked), Followed()
    name, how = cut.session.split()
    assert how == ("forked" if is_fork else "begun")
    served = await gateway()
    await again.follow(served.url, asked | more)
    assert again.session == f"{name} repeated"
    result = (await recorded(worker.client, name))[0]
    assert (again.text, again.id == cut.id) == (result.text, not more)
    assert again.text.startswith(cut.text)
    requests = [decode_request(one.body) for one in await worker.client.log(name) if one.kind == "in"]
    assert not any(isinstance(one, Close) for one in requests)


@pytest.mark.serves("endless_model")
async def test_a_restarted_gateway_removes_the_session_of_a_running_request_that_no_client_repeats(
    worker: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, settled, has_started = removal.settle, [], threading.Event()
    monkeypatch.setattr(removal, "settle", lambda *args: settled.append(args[2].name) or settle(*args))
    stopped = await gateway()
    one = await stopped_in_mid_answer(stopped, question("My secret.", 300))
    worker.app._model.device.commands.put(lambda _: has_started.wait(30))  # so that the answer still runs
    served = await gateway(idle_s=0.8)
    has_started.set()
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        await http.post(CHAT, json=question("Other.", 4))
    name = one.session.split()[0]
    await forgotten(worker.client, name)
    await until(lambda: not served.index.sessions)
    assert name in settled, "its end was not known at the start"


@pytest.mark.serves("endless_model")
@pytest.mark.parametrize("is_stored", [False, True])
async def test_an_idle_conversation_is_removed_even_if_nats_did_not_confirm_its_last_request(
    worker: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    """As if the NATS servers had no leader for a while, before or after the log has stored the request."""
    served = await gateway(idle_s=1)
    publish = NatsWire.publish

    async def failing(wire: NatsWire, subject: str, body: bytes, headers: Any = None) -> int:
        if is_stored:
            await publish(wire, subject, body, headers)
        raise NoAnswerError("there is no leader")

    asked = question("My secret.", 4)
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        said = (await http.post(CHAT, json=asked)).json()["choices"][0]["message"]
        asked["messages"] += [said, {"role": "user", "content": "On."}]
        (name,) = served.index.sessions
        with monkeypatch.context() as patch:
            patch.setattr(NatsWire, "publish", failing)
            assert (await http.post(CHAT, json=asked)).status_code == 503
        assert (await http.post(CHAT, json=asked)).status_code == 200
    await forgotten(worker.client, name)
    await until(lambda: not served.index.sessions)


async def test_requests_and_removals_of_the_gateway_wait_while_a_worker_stops_and_succeed_afterwards(
    local_worker: Any, door: Any, endless_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stops refuses to tell its metrics, for which the gateway asks before both."""
    real, num, stops = Control.answer, 0, False

    async def answer(control: Control, subject: str, body: bytes) -> Any:
        nonlocal num
        if stops and isinstance(decode_control(body), MetricsRequest):
            num += 1
            return failure(None, "overloaded", "the worker stops: ask again")
        return await real(control, subject, body)

    monkeypatch.setattr(Control, "answer", answer)
    worker = await local_worker(model=str(endless_model))
    served = await door(worker.settings.nats, worker.settings.prefix, idle_s=1)
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        assert (await http.post(CHAT, json=question("My secret.", 4))).status_code == 200
        (name,) = served.index.sessions
        stops = True
        await asyncio.sleep(1.5)  # the conversation is idle by now, and is to be removed
        asking = asyncio.create_task(http.post(CHAT, json=question("Again.", 4)))
        await until(lambda: num > 2)
        stops = False
        assert (await asking).status_code == 200
    await forgotten(worker.client, name)


@pytest.mark.serves("endless_model")
async def test_after_a_disconnect_the_gateway_gives_up_cancelling_a_request_that_the_worker_has_refused(
    gateway: Any,
) -> None:
    """After a restart, and with other ids of its calls; its client has disconnected."""
    stopped = await gateway()
    first, again = await stopped_in_mid_answer(stopped, called("one")), Followed()
    served = await gateway()
    task = asyncio.create_task(again.follow(served.url, called("other")))
    await until(lambda: again.session)
    task.cancel()
    assert again.session == f"{first.session.split()[0]} repeated"
    await until(lambda: {one.state for one in served.index.asked.values()} == {"failed"})


def called(call_id: str) -> dict[str, Any]:
    """Return a request whose conversation has a tool call with this id."""
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = question("Begin.", 3000)
    asked["messages"] += [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "There."},
    ]
    return asked


async def cancelled(client: Any, session: str) -> Generated:
    async with asyncio.timeout(20):
        while not (results := await recorded(client, session)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert results[0].finish_reason == "cancelled"
    return results[0]


@pytest.mark.serves("endless_model")
async def test_a_disconnected_clients_answer_is_cancelled_and_can_be_continued_from_the_received_text(
    worker: Any, served: Any
) -> None:
    one = Followed()
    task = asyncio.create_task(one.follow(served.url, question("Begin.", 30_000)))
    await until(lambda: len(one.text) > 20)
    task.cancel()
    result = await cancelled(worker.client, one.session)
    assert len(result.tokens) < 10_000
    again = question("Begin.", 4)
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        answer = await http.post(CHAT, json=again)
        assert answer.json()["usage"]["completion_tokens"] == 4
        again["messages"] += [
            {"role": "assistant", "content": result.text},
            {"role": "user", "content": "Go on."},
        ]
        answer = await http.post(CHAT, json=again)
        assert answer.headers["x-turnkeep-session"] == f"{one.session.split(maxsplit=1)[0]} continued"
        # Without a stream the client says nothing until it goes.
        task = asyncio.create_task(http.post(CHAT, json=question("Other.", 30_000)))
        await until(lambda: any(held.num_running for held in served.index.sessions.values()))
        (name,) = [held.name for held in served.index.sessions.values() if held.num_running]
        await asyncio.sleep(0.3)
        task.cancel()
        await cancelled(worker.client, name)
    await until(lambda: not any(held.num_running for held in served.index.sessions.values()))


@pytest.mark.serves("endless_model")
@pytest.mark.parametrize("leaves", ["the first client", "the second client", "the first client at once"])
async def test_a_client_that_leaves_cancels_no_answer_that_a_client_of_another_gateway_has_joined(
    worker: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    """The other gateway's first request joins it, as it may be the repeat of one whose gateway has died."""
    asked, one, two = question("Begin.", 3_000), Followed(), Followed()
    first, second = await gateway(), await gateway()
    if leaves == "the first client at once":  # so that the cancel comes just before the join
        find = conversations.recover

        async def recovered(*args: Any) -> None:
            await find(*args)
            tasks[0].cancel()
            await cancelled(worker.client, one.session)

        tasks = [asyncio.create_task(one.follow(first.url, asked))]
        await until(lambda: len(one.text) > 20)
        monkeypatch.setattr(conversations, "recover", recovered)
        await two.follow(second.url, asked)
        assert len(two.text) > len(one.text)
        assert two.lines[-2] == "data: [DONE]"
        return
    tasks = [asyncio.create_task(one.follow(first.url, asked))]
    await until(lambda: len(one.text) > 20)
    tasks.append(asyncio.create_task(two.follow(second.url, asked)))
    await until(lambda: len(two.text) > 20)
    assert two.session == f"{one.session.split()[0]} repeated"
    leaving, staying = tasks if leaves == "the first client" else reversed(tasks)
    leaving.cancel()
    assert not staying.done()
    await staying
    result, *_ = await recorded(worker.client, one.session)
    assert (result.finish_reason, max(one.text, two.text, key=len)) == ("length", result.text)


@pytest.mark.serves("endless_model")
async def test_an_answer_goes_on_when_two_clients_of_one_gateway_leave_but_a_client_of_another_gateway_stays(
    worker: Any, gateway: Any
) -> None:
    asked, clients = question("Begin.", 3_000, temperature=0.0), [Followed(), Followed(), Followed()]
    first, second = await gateway(), await gateway()
    tasks = []
    for one, served in zip(clients, (first, second, first), strict=True):
        tasks.append(asyncio.create_task(one.follow(served.url, asked)))
        await until(lambda: len(one.text) > 20)  # noqa: B023
    assert len({one.session.split()[0] for one in clients}) == 1
    tasks[0].cancel()
    tasks[2].cancel()
    assert not tasks[1].done()
    await tasks[1]
    result, *_ = await recorded(worker.client, clients[0].session)
    assert (result.finish_reason, clients[1].text) == ("length", result.text)


async def test_a_chat_completion_deleted_while_no_worker_runs_is_removed_by_the_next_worker(
    local_worker: Any, door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the session was closed, without forget, after the answer."""
    monkeypatch.setattr("gateway.conversations.LAST_PAUSE_S", 0.3)
    worker = await local_worker()
    served = await door(worker.settings.nats, worker.settings.prefix)
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        answer = (await http.post("/v1/completions", json={"prompt": "my secret", "max_tokens": 4})).json()
        name = "gw-" + answer["id"][-48:-16]
        async with asyncio.timeout(20):
            while not any(b'"closed"' in one.body for one in await worker.client.log(name)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await worker.stop()
        assert (await http.delete(f"/v1/completions/{answer['id']}")).json()["deleted"]
    worker = await local_worker()
    await forgotten(worker.client, name)


NUM_TOKENS = 300
HELLO = [{"role": "user", "content": "Hello."}]
BIASED = {"logit_bias": LETTERS}
CHAT_BODY: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": NUM_TOKENS, "stream": True}
COMPLETION = {"model": "m", "prompt": "Hello.", "max_tokens": NUM_TOKENS, "stream": True}
MESSAGE: dict[str, Any] = {"model": "m", "messages": HELLO, "max_tokens": NUM_TOKENS}
RESPONSE: dict[str, Any] = {"model": "m", "input": "Hello.", "max_output_tokens": NUM_TOKENS, "stream": True}
BY_CLIENT = ("chat", "completion", "message", "response")
RAW: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "raw chat": ("/v1/chat/completions", CHAT_BODY, {}),
    "two answers": ("/v1/chat/completions", CHAT_BODY | {"n": 2}, {}),
    "chat with a key": ("/v1/chat/completions", CHAT_BODY, {"idempotency-key": "one"}),
    "raw completion": ("/v1/completions", COMPLETION, {}),
    "raw message": ("/v1/messages", MESSAGE | {"stream": True}, {}),
    "raw response": ("/v1/responses", RESPONSE, {}),
    "durable stream": ("/v1/responses", RESPONSE | {"stream": False, "background": True}, {}),
}


async def texts(
    openai: AsyncOpenAI, anthropic: AsyncAnthropic, name: str, most: int = NUM_TOKENS
) -> AsyncIterator[str]:
    """Stream an answer from the API of this name with its client, and yield the parts of its text."""
    tokens = {"max_tokens": most}
    match name:
        case "chat":
            async for chunk in await openai.chat.completions.create(**CHAT_BODY | tokens, extra_body=BIASED):
                yield chunk.choices[0].delta.content or ""
        case "completion":
            async for part in await openai.completions.create(**COMPLETION | tokens, extra_body=BIASED):
                yield part.choices[0].text
        case "response":
            async for event in await openai.responses.create(
                **RESPONSE | {"max_output_tokens": most}, extra_body=BIASED
            ):
                yield event.delta if event.type == "response.output_text.delta" else ""
        case "message":
            async with anthropic.messages.stream(**MESSAGE | tokens, extra_body=BIASED) as stream:
                async for text in stream.text_stream:
                    yield text


async def blocks(url: str, name: str) -> AsyncIterator[str]:
    """Send a request without a client, and yield what is between two blank lines of its stream."""
    path, body, headers = RAW[name]
    asked = {"method": "POST", "url": path, "json": body | BIASED, "headers": headers}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        if name == "durable stream":
            begun = (await http.request(**asked)).json()
            asked = {"method": "GET", "url": f"{path}/{begun['id']}/stream?offset=-1&live=sse"}
        async with http.stream(**asked) as answer:
            written = ""
            async for text in answer.aiter_text():
                *whole, written = (written + text).split("\n\n")
                for block in whole:
                    yield block
            assert not written


@pytest.mark.parametrize("has_begun", [False, True], ids=["before the first chunk", "after it"])
async def test_client_libraries_read_a_keep_alive_of_an_answer_stream_neither_as_an_event_nor_as_the_end(
    worker_process: Any, endless_model: Path, door: Any, monkeypatch: pytest.MonkeyPatch, *, has_begun: bool
) -> None:
    """OpenAI's client for Python makes an event of each blank line once an event had an id."""
    from anthropic import AsyncAnthropic

    for name in ("answer_response._HEARTBEAT_S", "answer_response._PATIENCE_S", "durable._POLL_S"):
        monkeypatch.setattr(f"gateway.http.{name}", 0.05)
    monkeypatch.setattr("gateway.latest_metrics._SEEN_S", 60.0)
    process = worker_process(model=endless_model)
    process.start()
    while '"event": "ready"' not in process.log:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    served = await door(process.url)
    has_text = {name: asyncio.Event() for name in (*BY_CLIENT, *RAW)}

    async def follow(name: str, parts: AsyncIterator[str]) -> list[str]:
        found = []
        try:
            async for part in parts:
                found.append(part)
                if "delta" in part or '"text"' in part or (part and name in BY_CLIENT):
                    has_text[name].set()
        finally:
            has_text[name].set()
        return found

    async with AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as anthropic:
        await served.openai.chat.completions.create(model="m", messages=HELLO, max_tokens=1)
        if not has_begun:
            os.kill(process.worker_pid, signal.SIGSTOP)
        streams = {name: texts(served.openai, anthropic, name) for name in BY_CLIENT}
        streams |= {name: blocks(served.url, name) for name in RAW}
        tasks = {name: asyncio.create_task(follow(name, parts)) for name, parts in streams.items()}
        if has_begun:
            await asyncio.gather(*(one.wait() for one in has_text.values()))
            os.kill(process.worker_pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        os.kill(process.worker_pid, signal.SIGCONT)
        await asyncio.wait(tasks.values())
    assert {name: error for name, task in tasks.items() if (error := task.exception())} == {}
    found = {name: task.result() for name, task in tasks.items()}
    assert {name: len("".join(found[name])) for name in BY_CLIENT} == dict.fromkeys(BY_CLIENT, NUM_TOKENS)
    assert ": waiting" in "".join(found["raw chat"])
    for name in RAW:
        for block in found[name]:
            data = [line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")]
            assert len(data) == 1, (name, block)
            assert data == ["[DONE]"] or json.loads(data[0])
