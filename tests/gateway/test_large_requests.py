"""New messages that do not fit in one NATS message are appended in pieces before the generate."""

import asyncio
import math
from typing import Any

import httpx2
import pytest
from crafted import LETTERS, generated

from gateway import boundaries
from gateway.dialects.openai import chat
from gateway.index import append_id
from gateway.sending import _with_appended
from turnkeep_client.messages import Appended, decode_request, encode
from turnkeep_client.session import Session

CHAT = "/v1/chat/completions"
MAX_BYTES = 4096

pytestmark = pytest.mark.serves("endless_model", max_message_bytes=MAX_BYTES)

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SAID = [
    {"role": ("user", "assistant")[number % 2], "content": f"{number} " + "word " * 200}
    for number in range(9)
]


def body(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 8, "logit_bias": LETTERS, "temperature": 0, **more}


async def requests_of(served: Any, session: str) -> list[bytes]:
    return [one.body for one in await served.worker.client.log(session) if one.kind == "in"]


async def test_messages_too_large_for_one_request_are_appended_in_pieces_and_then_answered(
    served: Any, http: httpx2.AsyncClient
) -> None:
    answer = await http.post(CHAT, json=body(SAID, tools=TOOLS))
    assert answer.status_code == 200, answer.text
    session, how = answer.headers["x-turnkeep-session"].split()
    sent = await requests_of(served, session)
    kinds = [one.split(b'"', 4)[3] for one in sent]
    assert (how, kinds) == ("begun", [b"append", b"append", b"append", b"generate"])
    assert all(len(one) <= MAX_BYTES for one in sent)
    used = answer.json()["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] == 0, "they were prefilled for this answer"
    assert not served.index.rewrites, "the tools came first"

    direct = served.worker.client.session("direct")
    for number, message in enumerate(SAID[:-1]):
        await direct.append(messages=[message], tools=TOOLS if number == 0 else None)
    biases = {int(token): bias for token, bias in LETTERS.items()}
    alone = await direct.generate(messages=SAID[-1:], max_tokens=8, logit_bias=biases)
    text = answer.json()["choices"][0]["message"]["content"]
    assert (alone.text, alone.usage.prompt_tokens) == (text, used["prompt_tokens"])

    again = await http.post(CHAT, json=body(SAID, tools=TOOLS))
    assert again.headers["x-turnkeep-session"] == f"{session} repeated"
    assert again.json()["choices"] == answer.json()["choices"]
    assert len(await requests_of(served, session)) == len(sent) + 1, "nothing is appended twice"
    on = [*SAID, {"role": "assistant", "content": text}, {"role": "user", "content": "On."}]
    more = await http.post(CHAT, json=body(on, tools=TOOLS))
    assert more.headers["x-turnkeep-session"] == f"{session} continued"
    cached = more.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == used["total_tokens"] - 1


async def test_a_restarted_gateway_does_not_append_again_the_messages_that_were_appended_before(
    worker: Any, gateway: Any
) -> None:
    turn = chat.read(encode(body(SAID)))
    known = boundaries.chain(turn.messages or (), turn.options)
    session = worker.client.session("gw-left")
    piece = {"messages": SAID[:3], "request_id": append_id(known[3], 0), "expect_position": 0}
    first = await session.append(**piece)
    served = await gateway()
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        answer = await http.post(CHAT, json=body(SAID))
        assert answer.headers["x-turnkeep-session"] == "gw-left continued"
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == first.position - 1
        sent = await requests_of(served, "gw-left")
        assert sum(b'"0 word' in one for one in sent) == 1
        await served.stop()
        served = await gateway()
    again = await served.http.post(CHAT, json=body(SAID))
    assert again.headers["x-turnkeep-session"] == "gw-left repeated", "after another restart too"
    assert again.json()["choices"] == answer.json()["choices"]


async def test_a_large_request_repeated_after_a_disconnect_appends_each_piece_only_once(
    served: Any, http: httpx2.AsyncClient
) -> None:
    long = [{"role": "user", "content": f"{number} " + "word " * 200} for number in range(12)]

    def running() -> list[Any]:
        return [one for one in served.index.sessions.values() if one.num_running]

    await http.post(CHAT, json=body([{"role": "user", "content": "First."}]))
    (first,) = served.index.sessions
    async with asyncio.timeout(60):
        leaving = asyncio.create_task(http.post(CHAT, json=body(long)))
        while not any((one.position or 0) > 3000 for one in running()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        leaving.cancel()
        while running():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (session,) = {*served.index.sessions} - {first}
    before = await requests_of(served, session)
    assert not any(b'"generate"' in one for one in before), "the rest was not sent"
    answer = await http.post(CHAT, json=body(long))
    assert answer.headers["x-turnkeep-session"] == f"{session} continued"
    done = [one for one in await served.worker.client.log(session) if one.kind == "out"]
    appended = [one.body for one in done if b'"appended"' in one.body]
    assert len(appended) == 4, "each piece once"


async def test_a_client_that_disconnects_during_a_large_append_cancels_the_running_append(
    served: Any, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[str] = []

    async def cancel(_session: Session, request_id: str) -> None:
        cancelled.append(request_id)

    monkeypatch.setattr(Session, "cancel", cancel)
    monkeypatch.setattr("gateway.latest_metrics._SEEN_S", math.inf)
    await http.post(CHAT, json=body(SAID[:1]))
    served.worker.app.stop()  # so that the append is never answered
    await served.worker.task
    leaving = asyncio.create_task(http.post(CHAT, json=body(SAID)))
    async with asyncio.timeout(30):
        while not (running := [one for one in served.index.asked.values() if one.append]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while not (sent := await requests_of(served, running[0].session.name)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        leaving.cancel()
        while not cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert cancelled[0] == decode_request(sent[0]).id


def test_the_usage_of_a_request_does_not_count_tokens_that_an_earlier_attempt_of_it_has_appended() -> None:
    counts = {"tokens": 7, "cached_tokens": 0, "prefilled_tokens": 7, "kv_live_bytes": 0}
    again = Appended(id="a", seq=6, position=7, repeat_of=5, seconds=0, **counts)
    assert _with_appended(generated(), [again]).usage == generated().usage


async def test_a_message_over_the_size_limit_is_refused_with_the_limit_and_opens_no_session(
    served: Any, http: httpx2.AsyncClient
) -> None:
    large = {"role": "user", "content": "x" * 5000}
    for messages in ([*SAID, large], [large, *SAID]):
        answer = await http.post(CHAT, json=body(messages))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (413, "request_too_large")
        assert f"at most {MAX_BYTES} (max_message_bytes)" in error["message"]
    assert not served.index.sessions
    assert not await served.worker.client.stored.subjects()
