"""Requests with fields, encodings and content of other servers' clients, or that the model cannot read."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx2
import pytest
from crafted import user

from gateway.dialects.anthropic import messages
from gateway.dialects.openai import chat, completions
from gateway.dialects.responses import requests as responses
from gateway.turn import ALL_THAT_FITS, ClientTurn, Fault, decoded

CHAT = "/v1/chat/completions"
MOST = 100_000
SAID = [{"role": "user", "content": "Hello."}]
HELLO = {"messages": SAID, "max_tokens": 2}


@pytest.fixture
async def served(gateway: Any) -> Any:
    return await gateway(max_body_bytes=MOST)


def asked(**more: Any) -> ClientTurn:
    return chat.read(json.dumps({"messages": SAID, **more}).encode())


def test_a_value_of_minus_one_means_no_limit_or_no_seed_in_each_api() -> None:
    for turn in (
        asked(max_tokens=-1),
        asked(max_completion_tokens=-1.0),
        completions.read(b'{"prompt": "a", "max_tokens": -1}'),
        messages.read(json.dumps({"messages": SAID, "max_tokens": -1}).encode()),
        responses.read(b'{"input": "a", "max_output_tokens": -1}'),
    ):
        assert turn.options["max_tokens"] == ALL_THAT_FITS
    options = asked(top_k=-1, seed=-1).options
    assert (options["top_k"], "seed" in options) == (0, False)
    thinking = {"type": "enabled", "budget_tokens": -1}
    turn = messages.read(json.dumps({"messages": SAID, "max_tokens": 9, "thinking": thinking}).encode())
    assert "reasoning" not in turn.options
    with pytest.raises(Fault, match="max_tokens"):
        asked(max_tokens=-2)


def test_options_of_other_servers_are_accepted_in_each_api_without_warnings() -> None:
    given = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True}
    given |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "chat_template_kwargs": {"a": 1}}
    for turn in (
        asked(**given),
        completions.read(json.dumps({"prompt": "a", **given}).encode()),
        messages.read(json.dumps({"messages": SAID, "max_tokens": 9, **given}).encode()),
        responses.read(json.dumps({"input": "a", **given}).encode()),
    ):
        assert turn.options.items() >= given.items()
        assert not turn.warnings


def test_integer_fields_of_a_request_may_be_written_as_floats() -> None:
    turn = asked(max_tokens=2.0, n=2.0, top_k=5.0, seed=7.0, logprobs=True, top_logprobs=1.0)
    given = [turn.n, *(turn.options[name] for name in ("max_tokens", "top_k", "seed", "top_logprobs"))]
    assert given == [2, 2, 5, 7, 1]
    assert {type(one) for one in given} == {int}
    for wrong, found in [(2.5, "float"), ("2", "str"), (True, "bool"), ([2], "array")]:
        with pytest.raises(Fault, match=f"Expected `int | null`, got `{found}`") as refused:
            asked(max_tokens=wrong)
        assert refused.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("read", "body", "warned"),
    [
        (chat.read, {"messages": SAID, "repeat_penalty": 1, "guided_json": {}, "temprature": 1, "user": "a"},
         ["guided_json", "repeat_penalty", "temprature"]),
        (chat.read, {"messages": SAID, "verbosity": None, "store": True, "a\r\nb: c\u00e9": 1}, ["a_b:_c_"]),
        (completions.read, {"prompt": "a", "max_completion_tokens": 5}, ["max_completion_tokens"]),
        (messages.read, {"messages": SAID, "max_tokens": 9, "n": 2, "logprobs": True}, ["logprobs", "n"]),
        (responses.read, {"input": "a", "max_tokens": 5, "truncation": "auto"}, ["max_tokens", "truncation"]),
    ],
)  # fmt: skip
def test_fields_without_effect_are_named_in_warnings(
    read: Any, body: dict[str, Any], warned: list[str]
) -> None:
    assert [str(one.where) for one in read(json.dumps(body).encode()).warnings] == warned


async def test_the_warnings_header_names_fields_without_effect_on_answers_streams_and_refusals(
    http: httpx2.AsyncClient,
) -> None:
    for more, status in [({}, 200), ({"stream": True}, 200), ({"logit_bias": {"99999": 1}}, 400)]:
        answer = await http.post(CHAT, json=HELLO | {"repeat_penalty": 1.1} | more)
        assert answer.status_code == status
        assert answer.headers["x-turnkeep-warnings"] == "repeat_penalty: has no effect"
    assert "x-turnkeep-warnings" not in (await http.post(CHAT, json=HELLO)).headers


async def test_bodies_may_be_compressed_and_the_size_limit_applies_to_the_decompressed_body(
    http: httpx2.AsyncClient,
) -> None:
    body = json.dumps(HELLO).encode()
    for coding, sent, status in [
        ("gzip", gzip.compress(body), 200),
        ("GZIP", gzip.compress(body[:20]) + gzip.compress(body[20:]), 200),
        ("deflate", zlib.compress(body), 200),
        ("identity", body, 200),
        ("gzip", body, 400),
        ("gzip", gzip.compress(body)[:-20], 400),
        ("gzip", b"", 400),
        ("br", body, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(body)), 415),
        ("gzip", gzip.compress(body + b" " * (MOST - len(body))), 200),
        ("gzip", gzip.compress(body + b" " * (MOST - len(body) + 1)), 413),
        ("gzip", gzip.compress(b" " * 100_000_000), 413),
        ("gzip", gzip.compress(b"") * 63 + gzip.compress(body), 200),
        ("gzip", gzip.compress(b"") * 64 + gzip.compress(body), 400),
    ]:
        answer = await http.post(CHAT, content=sent, headers={"content-encoding": coding})
        assert answer.status_code == status, (coding, sent[:20], answer.text)


async def test_a_path_may_end_with_a_slash(http: httpx2.AsyncClient) -> None:
    assert (await http.post(f"{CHAT}/", json=HELLO)).status_code == 200
    for path in ("/", "/health/", "/v1/models/", "/v1/models/tiny/"):
        assert (await http.get(path)).status_code == 200, path
    assert 'path="/v1/chat/completions",status="200"' in (await http.get("/metrics/")).text


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (r"a\ud800", "a\ufffd"),
        (r"\udc00b", "\ufffdb"),
        (r"\ud83d\u0041\n", "\ufffdA\n"),
        (r"\ud83d\ude00 \uDC00", "\U0001f600 \ufffd"),
        (r"\\ud800 \ud800", "\\ud800 \ufffd"),
        (r"\ud800\ud83d\ude00", "\ufffd\U0001f600"),
    ],
)
def test_only_unpaired_surrogates_are_replaced_in_a_message(sent: str, text: str) -> None:
    body = '{"messages": [{"role": "user", "content": "%s"}]}' % sent  # noqa: UP031  # JSON has braces
    assert chat.read(body.encode()).messages[0].content == text  # type: ignore[index]


def test_a_broken_escape_sequence_is_refused_as_invalid_json() -> None:
    for body in (rb'{"messages": "\ud8"}', rb'{"messages": "\ud800', rb'"\x"'):
        with pytest.raises(Fault, match="not JSON"):
            decoded(chat.DECODER, body)


@pytest.mark.parametrize("strict", [None, False, True])
async def test_a_schema_with_unsupported_keywords_gets_a_warning_or_a_refusal_if_strict(
    http: httpx2.AsyncClient, strict: bool | None
) -> None:
    described = {"name": "a", "schema": {"type": "string", "format": "phone"}} | (
        {} if strict is None else {"strict": strict}
    )
    form = {"type": "json_schema", "json_schema": described}
    flat = {"type": "json_schema", **described}
    for path, body in [
        (CHAT, HELLO | {"response_format": form}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "response_format": form}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "text": {"format": flat}}),
    ]:
        answer = await http.post(path, json=body)
        assert answer.status_code == (400 if strict else 200), answer.text
        if strict:
            named = "text.format" if path == "/v1/responses" else "response_format"
            assert answer.json()["error"]["param"] == named
        else:
            assert answer.headers["x-turnkeep-warnings"].startswith("answer: ")


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
