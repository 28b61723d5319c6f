"""OpenAI's Responses API over HTTP: conversations, streams, answers retrieved later, and compaction."""

import asyncio
import json
import random
from base64 import b64decode
from pathlib import Path
from typing import Any

import openai
import pytest
from crafted import user

from gateway.keys import Keys

pytestmark = pytest.mark.serves("calling_model")

#: The ids of the tokens that are a call and the end of a turn.
CALL, END = 259, 2
#: So that answers are text that comes back as it was.
LETTERS = {str(token): 100 for token in range(68, 90)} | {str(END): -100, str(CALL): -100}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def options(**more: Any) -> dict[str, Any]:
    extra = {"logit_bias": LETTERS, **more.pop("extra_body", {})}
    return {"model": "m", "max_output_tokens": 8, "temperature": 0.9, "extra_body": extra, **more}


async def ask(served: Any, said: Any, **more: Any) -> tuple[Any, str]:
    """Send a request; return the response, and how its session was found (`begun`, `continued`, ...)."""
    raw = await served.openai.responses.with_raw_response.create(input=said, **options(**more))
    return raw.parse(), raw.headers["x-turnkeep-session"].split()[1]


def prefilled(response: Any) -> int:
    return response.usage.input_tokens - response.usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_result_sent_through_the_responses_api_continues_the_conversation_of_its_call(
    served: Any, *, stream: bool
) -> None:
    more = {"tools": [TOOL], "temperature": 0, "max_output_tokens": 1}
    bias = {"logit_bias": {str(CALL): 100}}
    called = {**more, "extra_body": bias, "parallel_tool_calls": False, "max_output_tokens": 8}
    if stream:
        async with served.openai.responses.stream(input="Weather?", model="m", **called) as events:
            kinds = [event.type async for event in events]
            first = await events.get_final_response()
        assert "response.function_call_arguments.done" in kinds
    else:
        first, _ = await ask(served, "Weather?", **called)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments) == {"city": "Rome", "days": 2}
    again = call.model_dump(exclude_none=True, exclude={"parsed_arguments"})
    again |= {"arguments": '{ "days":2, "city":"Rome" }'}
    output = {"type": "function_call_output", "call_id": call.call_id}
    parts = [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "ny"}]
    second, how = await ask(served, [user("Weather?"), again, {**output, "output": parts}], **more)
    assert how == "continued"
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1
    third, how = await ask(
        served, [{**output, "output": "sunny"}], previous_response_id=first.id, **more, top_p=0.9
    )
    assert (how, third.usage.input_tokens) == ("forked", second.usage.input_tokens)


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_request_with_previous_response_id_continues_the_conversation_of_that_response(
    worker: Any, door: Any, served: Any, *, restarts: bool
) -> None:
    """Instructions apply to one request only; two conversations may continue from the same answer."""
    first, _ = await ask(served, "One?", instructions="Rhyme.")
    second, how = await ask(served, "Two?", instructions="Rhyme.", previous_response_id=first.id)
    assert how == "continued"
    other, how = await ask(served, "Too?", instructions="Rhyme.", previous_response_id=first.id)
    assert (how, other.previous_response_id) == ("forked", first.id)
    if restarts:
        await served.stop()
        served = await door(worker.settings.nats, worker.settings.prefix)
    for before, asked in ((second, "Two?"), (other, "Too?")):
        third, how = await ask(served, "Three?", instructions="Rhyme.", previous_response_id=before.id)
        assert how == "continued"
        assert prefilled(third) == third.usage.input_tokens - before.usage.total_tokens + 1
        said = [user("One?"), first.output[0], user(asked), before.output[0], user("Three?")]
        bare, how = await ask(served, "Three?", previous_response_id=before.id)
        assert how == "begun"
        same, _ = await ask(served, [*said], store=False)
        assert same.usage.input_tokens == bare.usage.input_tokens < third.usage.input_tokens
    for wrong in (first.id[:-1] + "x", "resp_" + "0" * 48, "x"):
        with pytest.raises(openai.BadRequestError, match="not found") as refused:
            await ask(served, "Two?", previous_response_id=wrong)
        assert (refused.value.code, refused.value.param) == (
            "previous_response_not_found",
            "previous_response_id",
        )


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_forked_conversation_can_be_continued_by_its_response_id_after_the_parent_response_is_deleted(
    worker: Any, served: Any, monkeypatch: pytest.MonkeyPatch, *, is_long: bool
) -> None:
    """Unless the conversation before the fork is too long for a header in the log."""
    first, _ = await ask(served, f"One? {random.Random(5).randbytes(300).hex()}")
    await ask(served, "Two?", previous_response_id=first.id)
    if is_long:
        monkeypatch.setattr("gateway.logged_answers.MOST_BYTES", 400)
    fork, how = await ask(served, "Too?", previous_response_id=first.id, temperature=0)
    assert how == "forked"
    again, how = await ask(served, "Too?", previous_response_id=first.id, temperature=0)
    assert (how, again.output_text) == ("repeated", fork.output_text)
    if is_long:
        third, how = await ask(served, "Three?", previous_response_id=fork.id)
        assert how == "continued"
        assert prefilled(third) == third.usage.input_tokens - fork.usage.total_tokens + 1
    deleted = await served.openai.responses.with_raw_response.delete(first.id)
    assert json.loads(deleted.text) == {"id": first.id, "object": "response", "deleted": True}
    for gone in (served.openai.responses.retrieve, served.openai.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{first.id}' not found"):
            await gone(first.id)
    assert await served.openai.responses.retrieve(fork.id) == fork
    if is_long:
        session = worker.client.session(f"gw-{fork.id.removeprefix('resp_')[:32]}")
        async with asyncio.timeout(30):  # the worker empties the log soon after a forget
            while (await session.history()).is_whole:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await ask(served, "Four?", previous_response_id=fork.id)
    else:
        fourth, how = await ask(served, "Four?", previous_response_id=fork.id)
        assert how == "continued"
        assert prefilled(fourth) == fourth.usage.input_tokens - fork.usage.total_tokens + 1
        fifth, how = await ask(served, "Five?", previous_response_id=again.id)
        assert (how, fifth.usage.input_tokens) == ("forked", fourth.usage.input_tokens)


async def test_a_response_generated_in_a_new_session_because_its_fork_failed_lists_each_input_item_once(
    worker: Any, served: Any
) -> None:
    first, _ = await ask(served, "One?")
    await worker.client.session(f"gw-{first.id.removeprefix('resp_')[:32]}").close()
    said = [user("One?"), {"role": "assistant", "content": first.output_text}, user("Two?")]
    second, how = await ask(served, said, extra_headers={"Idempotency-Key": "key"})
    assert how == "begun"
    assert len((await served.openai.responses.input_items.list(second.id)).data) == 3


async def test_a_responses_request_includes_earlier_input_items_referenced_by_their_ids(served: Any) -> None:
    """The AI SDK for JavaScript sends ids instead of items."""
    first, _ = await ask(served, "One?")
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    for number, how in ((2, "continued"), (3, "forked")):
        named = {"type": "item_reference", "id": first.output[0].id}
        second, found = await ask(served, [user("One?"), thought, named, user(f"{number}?")])
        assert found == how
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    gone = {"type": "item_reference", "id": f"msg_{'0' * 48}"}
    with pytest.raises(openai.NotFoundError, match=r"Item with id 'msg_0+' not found") as refused:
        await ask(served, [user("One?"), gone, user("Two?")])
    assert refused.value.param == "input[1].id"


@pytest.mark.serves("endless_model", max_batch=1)
async def test_a_response_stream_that_moves_to_another_session_starts_again_with_a_new_response_id(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway has continued the conversation's session, and that answer runs for long."""
    monkeypatch.setattr("gateway.http.answer_response._PATIENCE_S", 0.1)
    one, other = [await gateway() for _ in range(2)]
    more = {"extra_body": {"logit_bias": {"70": 100}}}
    first, _ = await ask(one, "One?", **more)
    await ask(other, "Else?", **more)  # it knows the session from the log now
    asked = options(previous_response_id=first.id, stream=True, **more)
    running = await one.openai.responses.create(input="Two?", **asked | {"max_output_tokens": 30_000})
    await anext(aiter(running))
    waiting = await other.openai.responses.create(input="Or?", **asked)
    events = []
    async with asyncio.timeout(30):
        async for event in waiting:
            events.append(event)
            if len(events) == 2:
                await running.close()
    begun = [number for number, event in enumerate(events) if event.type == "response.created"]
    assert begun == [0, 2]
    assert [event.sequence_number for event in events[2:]] == list(range(len(events) - 2))
    ended = events[-1].response
    assert events[2].response.id == ended.id != events[0].response.id
    assert await other.openai.responses.retrieve(ended.id) == ended


async def test_a_previous_response_id_of_another_tenant_is_not_found(served: Any, tmp_path: Path) -> None:
    answer, _ = await ask(served, "Hello.")
    (tmp_path / "keys").write_text("none acme\nother default\n")
    served.gateway.access.keys = Keys.read(tmp_path / "keys")
    with pytest.raises(openai.NotFoundError):
        await served.openai.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        await ask(served, "Two?", previous_response_id=answer.id)
    other = served.openai.with_options(api_key="other")
    assert await other.responses.retrieve(answer.id) == answer


SAID = [
    {"role": "user", "content": "My cat is called Tom."},
    {"role": "assistant", "content": "What a good name."},
    {"role": "user", "content": "He sleeps."},
]


async def told(served: Any, answer_id: str) -> list[Any]:
    found = await served.openai.responses.input_items.list(answer_id, order="asc")
    return [(one.role, one.content[0].text) for one in found.data]


async def test_a_compacted_response_keeps_the_user_messages_and_a_summary_and_can_be_continued(
    served: Any,
) -> None:
    more: dict[str, Any] = {"extra_body": {"max_output_tokens": 12, "seed": 1, "ignore_eos": True}}
    compacted = await served.openai.responses.compact(model="m", input=SAID, instructions="Be brief.", **more)
    assert compacted.object == "response.compaction"
    *kept, summary = compacted.output
    assert [(one.role, one.content[0].text) for one in kept] == [
        ("user", SAID[0]["content"]),
        ("user", SAID[2]["content"]),
    ]
    assert summary.type == "compaction"
    assert compacted.usage.output_tokens == 12
    next_turn = [
        *(one.to_dict(warnings=False) for one in compacted.output),
        {"role": "user", "content": "Go on."},
    ]
    answer = await served.openai.responses.create(model="m", input=next_turn, max_output_tokens=2)
    first, second, written, last = await told(served, answer.id)
    assert [first, second, last] == [("user", text) for text in (SAID[0]["content"], "He sleeps.", "Go on.")]
    head, _, text = written[1].partition("\n\n")
    assert (written[0], head) == ("user", "Your own summary of our conversation before my next message:")
    assert text == b64decode(summary.encrypted_content.partition(":")[2]).decode() != ""
    again = await served.openai.responses.compact(model="m", input=SAID, instructions="Be brief.", **more)
    assert again.output[-1].encrypted_content == summary.encrypted_content, "the recorded answer, by its seed"


async def test_compacting_a_conversation_by_previous_response_id_reuses_kv_and_changes_no_stored_response(
    served: Any,
) -> None:
    create = served.openai.responses.create
    answer = await create(model="m", input=SAID, max_output_tokens=5, extra_body={"ignore_eos": True})
    compacted = await served.openai.responses.compact(
        model="m", previous_response_id=answer.id, extra_body={"max_output_tokens": 3}
    )
    assert [one.type for one in compacted.output] == ["message", "message", "compaction"]
    cached = compacted.usage.input_tokens_details.cached_tokens
    assert cached >= answer.usage.total_tokens - 1
    assert len(await told(served, answer.id)) == 3, "the conversation itself is as it was"


async def test_a_compaction_item_of_another_server_is_replaced_by_a_placeholder(served: Any) -> None:
    for content in ("gAAAAAB", "turnkeep1:%", None):
        item = {"type": "compaction", "encrypted_content": content}
        answer = await served.openai.responses.create(model="m", input=[item, *SAID[:1]], max_output_tokens=1)
        assert (await told(served, answer.id))[0] == ("user", "[compaction: this model cannot read it]")
