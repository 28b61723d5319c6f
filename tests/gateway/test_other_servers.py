"""Requests with fields, encodings and content of other servers' clients, or that the model cannot read."""

import codecs
import gzip
import json
import zlib
from typing import Any

import httpx2
import pytest
from apis import APIS
from crafted import user

from gateway.dialects.openai import chat
from gateway.turn import Fault

CHAT = "/v1/chat/completions"
MOST = 100_000
SAID = [{"role": "user", "content": "Hello."}]
HELLO = {"messages": SAID, "max_tokens": 2}


@pytest.fixture
async def served(gateway: Any) -> Any:
    return await gateway(max_body_bytes=MOST)


async def test_the_gateway_accepts_compressed_bodies_and_applies_the_size_limit_to_the_decompressed_body(
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


async def test_a_request_body_may_begin_with_a_byte_order_mark_even_if_the_body_is_compressed(
    http: httpx2.AsyncClient,
) -> None:
    body = codecs.BOM_UTF8 + json.dumps(HELLO | {"input": "Hello."}).encode()
    for path in (CHAT, "/v1/responses", "/v1/messages", "/api/chat"):
        assert (await http.post(path, content=body)).status_code == 200, path
    sent = gzip.compress(body)
    assert (await http.post(CHAT, content=sent, headers={"content-encoding": "gzip"})).status_code == 200


async def test_the_gateway_serves_each_path_also_with_a_trailing_slash(http: httpx2.AsyncClient) -> None:
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
def test_unpaired_surrogate_escapes_in_a_message_become_replacement_characters_and_pairs_stay(
    sent: str, text: str
) -> None:
    body = '{"messages": [{"role": "user", "content": "%s"}]}' % sent  # noqa: UP031  # JSON has braces
    assert chat.read(body.encode()).messages[0].content == text  # type: ignore[index]


def test_a_request_with_an_unfinished_or_unknown_json_escape_is_refused() -> None:
    for body in (rb'{"messages": "\ud8"}', rb'{"messages": "\ud800', rb'"\x"'):
        with pytest.raises(Fault, match="not JSON"):
            chat.read(body)


@pytest.mark.parametrize("strict", [False, True])
async def test_a_json_schema_with_unsupported_keywords_gets_a_warning_or_if_strict_a_refusal(
    http: httpx2.AsyncClient, *, strict: bool
) -> None:
    described = {"name": "a", "schema": {"type": "string", "format": "phone"}}
    described |= {"strict": True} if strict else {}
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


async def test_the_warning_header_of_a_token_count_names_content_blocks_replaced_by_placeholders(
    http: httpx2.AsyncClient,
) -> None:
    api = APIS["messages"]
    answer = await http.post(f"{api.path}/count_tokens", json=api.body([user([api.picture] * 30)]))
    assert answer.json()["input_tokens"] > 30
    assert answer.headers["x-turnkeep-warnings"].endswith("; and 10 more")


async def test_the_warnings_header_says_that_a_developer_message_was_rendered_as_system(
    http: httpx2.AsyncClient,
) -> None:
    told = [{"role": "developer", "content": "Be brief."}, user([APIS["chat"].picture])]
    for is_streamed in (False, True):
        answer = await http.post(
            CHAT, json=HELLO | {"messages": told, "stream": is_streamed, "temperature": 0}
        )
        assert answer.headers["x-turnkeep-warnings"] == (
            "messages[1].content[0]: image_url replaced by a placeholder;"
            " answer: 1 message is told to the model in another form: developer as system"
        )
