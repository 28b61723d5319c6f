"""A dialect is a folder of its own: nothing else of the gateway knows its paths, errors and fields."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx2
import msgspec

from gateway.app import DIALECTS
from gateway.form import Events, Form
from gateway.http.handlers import Dialect, Handlers, Route
from gateway.keys import Keys
from gateway.turn import ClientTurn, Fault, check
from turnkeep_client.messages import Message

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from turnkeep_client.messages import Chunk, Generated

Start = Any
PATH = "/v1beta/models/tiny"
HELLO = {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]}


class Asked(msgspec.Struct):
    """The body of a request."""

    contents: list[Any]


def read(body: bytes) -> ClientTurn:
    asked = json.loads(body)
    said = tuple(
        Message({"model": "assistant"}.get(one["role"], one["role"]), one["parts"][0]["text"])
        for one in asked["contents"]
    )
    options = {"max_tokens": asked.get("generationConfig", {}).get("maxOutputTokens", 8), "temperature": 0}
    turn = ClientTurn(messages=said, options=options, model=asked["model"], stream=asked["stream"])
    return check(turn, {"max_tokens": "generationConfig.maxOutputTokens"})


def complete(body: bytes, path: Mapping[str, str]) -> bytes:
    return json.dumps({**json.loads(body), "model": path["model"], "stream": "stream" in path}).encode()


def candidate(text: str) -> dict[str, Any]:
    return {"candidates": [{"content": {"role": "model", "parts": [{"text": text}]}}]}


def whole(turn: ClientTurn, answer_id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:
    return {**candidate(results[0].text), "modelVersion": turn.model, "responseId": answer_id}


def error(fault: Fault) -> dict[str, Any]:
    return {"error": {"code": fault.status, "message": fault.message, "status": "INVALID_ARGUMENT"}}


class Pieces(Events):
    heartbeat = b": waiting\n"

    def __init__(self, turn: ClientTurn, answer_id: str, created: int) -> None:
        pass

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        return b"data: %s\n\n" % json.dumps(candidate(chunk.text)).encode() if chunk.text else b""

    def finish(self, index: int, result: Generated) -> bytes:
        return b'data: {"candidates":[{"finishReason":"STOP"}]}\n\n'

    def error(self, fault: Fault) -> bytes:
        return b"data: %s\n\n" % json.dumps(error(fault)).encode()


FORM = Form("google", read, whole, Pieces, error, complete=complete)


MODEL = "/v1beta/models/{model}"
GOOGLE = Dialect(
    error,
    "/v1beta/",
    [
        Route(f"{MODEL}:generateContent", ["POST"], Handlers.answer, FORM, "Whole", Asked),
        Route(f"{MODEL}:{{stream}}GenerateContent", ["POST"], Handlers.answer, FORM, "As a stream", Asked),
    ],
    key_header="x-goog-api-key",
)


async def test_a_dialect_with_its_model_and_kind_of_answer_in_the_path_is_added_by_the_list_alone(
    local_worker: Start, door: Start, tmp_path: Path
) -> None:
    worker = await local_worker()
    (tmp_path / "keys").write_text("secret default\n")
    keys = Keys.read(tmp_path / "keys")
    served = await door(worker.settings.nats, worker.settings.prefix, keys=keys, dialects=(*DIALECTS, GOOGLE))
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        refused = await http.post(f"{PATH}:generateContent", json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, 401)
        assert "x-goog-api-key: KEY" in refused.text
        http.headers["x-goog-api-key"] = "secret"
        answer = (await http.post(f"{PATH}:generateContent", json=HELLO)).json()
        assert answer["modelVersion"] == "tiny"
        text = answer["candidates"][0]["content"]["parts"][0]["text"]
        assert text
        streamed = await http.post(f"{PATH}:streamGenerateContent", json=HELLO)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
        parts = [one["candidates"][0].get("content", {"parts": [{"text": ""}]}) for one in events]
        assert "".join(one["parts"][0]["text"] for one in parts) == text
        said = [*HELLO["contents"], {"role": "model", "parts": [{"text": text}]}, *HELLO["contents"]]
        again = await http.post(f"{PATH}:generateContent", json={"contents": said})
        assert again.headers["x-turnkeep-session"].endswith(" continued")
        for path, status in [(f"{PATH}:countTokens", 404), (f"{PATH}:generateContent", 405)]:
            assert (await http.get(path)).json()["error"]["code"] == status
        assert f"{MODEL}:generateContent" in (await http.get("/openapi.json")).text


async def test_an_error_has_the_form_of_the_api_that_the_path_or_a_header_belongs_to(
    http: httpx2.AsyncClient,
) -> None:
    anthropic = {"anthropic-version": "2023-06-01"}
    for path, headers, shape in [
        ("/v1/nothing", {}, {"error": dict}),
        ("/nothing", {}, {"error": dict}),
        ("/v2/nothing", {}, {"error": dict}),
        ("/v1/responses/x/y/z", {}, {"error": dict}),
        ("/v1/messages/x/y/z", {}, {"type": str, "error": dict}),
        ("/v1/nothing", anthropic, {"type": str, "error": dict}),
        ("/api/tags/x/y", {}, {"error": str}),
        ("/api/tags/x/y", anthropic, {"type": str, "error": dict}),
    ]:
        answer = await http.get(path, headers=headers)
        assert answer.status_code == 404, path
        assert {name: type(one) for name, one in answer.json().items()} == shape, path
