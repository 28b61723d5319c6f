"""Requests with fields and encodings that clients of other inference servers use."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from gateway.dialects.anthropic import messages
from gateway.dialects.openai import chat, completions
from gateway.dialects.responses import requests as responses
from gateway.turn import ALL_THAT_FITS, Fault, decoded

if TYPE_CHECKING:
    import httpx2

    from gateway.turn import ClientTurn

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
