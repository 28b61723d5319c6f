"""In each API a text replaces content that the model cannot read, unless the gateway refuses such content."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from crafted import user

from gateway.dialects.anthropic import messages
from gateway.dialects.openai import chat
from gateway.dialects.responses import requests as responses
from gateway.turn import ClientTurn

IMAGE = "[image: this model cannot see images]"
READ = {"chat": chat.read, "messages": messages.read, "responses": responses.read}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
#: Images whose files are elsewhere.
PICTURES: dict[str, dict[str, Any]] = {
    "chat": {"type": "image_url", "image_url": {"file_id": "a"}},
    "messages": {"type": "image", "source": {"type": "file", "file_id": "a"}},
    "responses": {"type": "input_image", "file_id": "a"},
}
FOUND = {"type": "search_result", "source": "https://a.example", "title": "A", "content": [
    {"type": "text", "text": "It is red."}, {"type": "image", "source": {}}]}  # fmt: skip


def body(dialect: str, said: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    most = {"max_output_tokens" if dialect == "responses" else "max_tokens": 4}
    return {"input" if dialect == "responses" else "messages": said, "temperature": 0, **most, **more}


def read(dialect: str, *said: dict[str, Any], **more: Any) -> ClientTurn:
    return READ[dialect](json.dumps(body(dialect, [*said], **more)).encode())


@pytest.mark.parametrize(
    ("dialect", "block", "text"),
    [
        *((dialect, picture, IMAGE) for dialect, picture in PICTURES.items()),
        ("chat", {"type": "input_audio", "input_audio": {}}, "[audio: this model cannot hear audio]"),
        ("chat", {"type": "video_url", "video_url": {}}, "[video: this model cannot watch videos]"),
        ("chat", {"type": "file", "file": {"file_id": "a"}}, "[file: this model cannot read files]"),
        ("chat", {"type": "of a\nlater day"}, "[of_a_later_day: this model cannot read it]"),
        ("chat", {"type": "thinking", "thinking": "Hm."}, ""),
        ("chat", "bare", "bare"),
        ("responses", {"type": "input_file", "file_data": "a"}, "[file: this model cannot read files]"),
        ("messages", {"type": "document", "source": {"type": "base64", "data": "AAAA"}},
         "[document: this model cannot read documents]"),
        ("messages", {"type": "document", "source": {"type": "text", "data": "A letter."}}, "A letter."),
        ("messages", {"type": "document", "source": {"type": "content", "content": [
            {"type": "text", "text": "A page."}]}}, "A page."),
        ("messages", FOUND, f"It is red.{IMAGE}"),
        ("messages", {"type": "tool_reference", "tool_name": "Bash"}, "[tool_reference: Bash]"),
        ("messages", {"type": "compaction", "content": "They spoke of tea."}, "They spoke of tea."),
        ("messages", {"type": "compaction", "content": None}, "[compaction: this model cannot read it]"),
        ("messages", {"type": "container_upload", "file_id": "a"},
         "[container_upload: this model cannot read it]"),
        ("messages", {"type": "code_execution_tool_result", "content": {"stdout": "a"}, "text": 5},
         "[code_execution_tool_result: this model cannot read it]"),
    ],
)  # fmt: skip
def test_a_content_block_becomes_its_text_or_a_placeholder(dialect: str, block: Any, text: str) -> None:
    turn = read(dialect, user([{"type": "input_text", "text": "See: "}, block]))
    assert [one.content for one in turn.messages or ()] == [f"See: {text}"]
    is_known = isinstance(block, str) or block["type"] == "thinking"
    assert [one.where.rpartition(".")[2] for one in turn.warnings] == ([] if is_known else ["content[1]"])
    assert all(one.what.endswith("placeholder") == text.startswith("[") for one in turn.warnings)


def test_unreadable_blocks_in_system_prompts_answers_and_tool_results_become_placeholders() -> None:
    picture = PICTURES["messages"]
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [picture, {"type": "text", "text": "!"}]}
    search = {"type": "server_tool_use", "id": "b", "name": "web_search", "input": {"query": "a"}}
    turn = read(
        "messages",
        user("Look."),
        {"role": "assistant", "content": [search, call]},
        user([result]),
        system=[picture],
    )
    assert [(one.role, one.content) for one in turn.messages or ()] == [
        ("system", IMAGE),
        ("user", "Look."),
        ("assistant", "[server_tool_use: this model cannot read it]"),
        ("tool", f"{IMAGE}!"),
    ]
    assert [one.where for one in turn.warnings] == [
        "system[0]",
        "messages[1].content[0]",
        "messages[2].content[0].content[0]",
    ]
    custom = {"id": "a", "type": "custom", "custom": {"name": "edit", "input": "x"}}
    turn = read("chat", user("Edit."), {"role": "assistant", "tool_calls": [custom]}, user([FOUND]))
    assert turn.messages is not None
    assert turn.messages[1].tool_calls[0].function.arguments == '{"input":"x"}'
    old = {"name": "look", "arguments": "{}"}
    turn = read(
        "chat",
        user("Hi."),
        {"role": "assistant", "content": None, "function_call": old},
        {"role": "function", "name": "look", "content": "Red."},
    )
    assert turn.messages is not None
    call, result = turn.messages[1:]
    assert call.tool_calls[0].function.name == "look"
    assert (result.role, result.content, result.tool_call_id) == ("tool", "Red.", call.tool_calls[0].id)
    other = {"id": "a", "type": "web_search", "web_search": {}}
    turn = read("chat", user("Hi."), {"role": "assistant", "tool_calls": [other]}, user("And?"))
    assert turn.messages is not None
    assert turn.messages[1].content == "[web_search: this model cannot read it]"
    assert [one.where for one in turn.warnings] == ["messages[1].tool_calls[0]"]


def test_a_tool_result_without_content_is_read_as_empty_text() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [user("Go."), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a"}]
    assert [one.content for one in read("chat", *said).messages or ()] == ["Go.", None, ""]
    called = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    nothing = {"type": "function_call_output", "call_id": "a", "output": None}
    assert [one.content for one in read("responses", called, nothing).messages or ()] == [None, ""]
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": None}
    told = read("messages", user("Go."), used, user([result]))
    assert [one.content for one in told.messages or ()] == ["Go.", "", ""]


def test_items_of_unsupported_types_in_the_responses_api_become_placeholders_with_warnings() -> None:
    turn = read(
        "responses",
        {"type": "compaction", "encrypted_content": "x"},
        user("Look."),
        {"type": "computer_call", "call_id": "a", "action": {"type": "screenshot"}},
        {"type": "computer_call_output", "call_id": "a", "output": {"type": "computer_screenshot"}},
        {"type": "mcp_call", "name": "f", "arguments": "{}", "output": "It is red."},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": [PICTURES["responses"]]},
    )
    assert [(one.role, one.content) for one in turn.messages or ()] == [
        ("user", "[compaction: this model cannot read it]"),
        ("user", "Look."),
        ("assistant", "[computer_call: this model cannot read it]"),
        ("user", "[computer_call_output: this model cannot read it]"),
        ("assistant", "It is red."),
        ("tool", IMAGE),
    ]
    assert [one.where for one in turn.warnings if one.what.endswith("placeholder")] == [
        "input[0]",
        "input[2]",
        "input[3]",
        "input[6].output[0]",
    ]


@pytest.mark.parametrize("dialect", READ)
async def test_a_conversation_with_a_placeholder_continues_in_its_session(
    dialect: str, http: httpx2.AsyncClient
) -> None:
    text = {"type": "input_text" if dialect == "responses" else "text", "text": "What is it?"}
    told = [user([text, PICTURES[dialect]])]
    more = {"store": False} if dialect == "responses" else {}
    first = await http.post(PATHS[dialect], json=body(dialect, told, **more))
    assert first.status_code == 200
    where = f"{'input' if dialect == 'responses' else 'messages'}[0].content[1]"
    kind = PICTURES[dialect]["type"]
    assert first.headers["x-turnkeep-warnings"] == f"{where}: {kind} replaced by a placeholder"
    assert read(dialect, *told).messages[0].content == f"What is it?{IMAGE}"  # type: ignore[index]
    answer = first.json()
    said = {"chat": lambda: answer["choices"][0]["message"]["content"]} | {
        "messages": lambda: answer["content"][0]["text"] if answer["content"] else "",
        "responses": lambda: answer["output"][0]["content"][0]["text"],
    }
    told += [{"role": "assistant", "content": said[dialect]()}, user("And now?")]
    second = await http.post(PATHS[dialect], json=body(dialect, told, stream=dialect == "chat", **more))
    assert (second.status_code, "x-turnkeep-warnings" in second.headers) == (200, True)
    name = first.headers["x-turnkeep-session"].split()[0]
    assert second.headers["x-turnkeep-session"] == f"{name} continued"


async def test_a_token_count_warns_of_blocks_that_placeholders_replaced(http: httpx2.AsyncClient) -> None:
    asked = body("messages", [user([PICTURES["messages"]] * 30)])
    answer = await http.post("/v1/messages/count_tokens", json=asked)
    assert answer.json()["input_tokens"] > 30
    assert answer.headers["x-turnkeep-warnings"].endswith("; and 10 more")


async def test_the_warnings_header_says_that_a_developer_message_was_rendered_as_system(
    http: httpx2.AsyncClient,
) -> None:
    told = [{"role": "developer", "content": "Be brief."}, user([PICTURES["chat"]])]
    for is_streamed in (False, True):
        answer = await http.post(PATHS["chat"], json=body("chat", told, stream=is_streamed))
        assert answer.headers["x-turnkeep-warnings"] == (
            "messages[1].content[0]: image_url replaced by a placeholder;"
            " answer: 1 message is told to the model in another form: developer as system"
        )
