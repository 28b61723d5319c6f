"""`/v1/responses/compact`: the model summarises a conversation, which continues from the summary."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import httpx2

SAID = [
    {"role": "user", "content": "My cat is called Tom."},
    {"role": "assistant", "content": "What a good name."},
    {"role": "user", "content": "He sleeps."},
]


async def told(served: Any, answer_id: str) -> list[Any]:
    found = await served.openai.responses.input_items.list(answer_id, order="asc")
    return [(one.role, one.content[0].text) for one in found.data]


async def test_a_compacted_conversation_continues_from_the_users_messages_and_the_models_summary(
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


async def test_compacting_a_conversation_by_its_answers_id_does_not_prefill_it_again(
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


async def test_a_compaction_repeated_with_its_idempotency_key_returns_the_recorded_output(
    served: Any,
) -> None:
    body = {"model": "m", "input": "Hello.", "max_output_tokens": 8}
    async with httpx2.AsyncClient(base_url=served.url, timeout=60, headers={"idempotency-key": "a"}) as http:
        first, second = [(await http.post("/v1/responses/compact", json=body)).json() for _ in "ab"]
    assert first["output"] == second["output"]


async def test_a_compaction_item_of_another_server_is_replaced_by_a_placeholder(served: Any) -> None:
    for content in ("gAAAAAB", "turnkeep1:%", None):
        item = {"type": "compaction", "encrypted_content": content}
        answer = await served.openai.responses.create(model="m", input=[item, *SAID[:1]], max_output_tokens=1)
        assert (await told(served, answer.id))[0] == ("user", "[compaction: this model cannot read it]")
