"""Any request is answered in the form of its API, and costs a bounded amount of time and memory."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from gateway.http.handlers import Handlers

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
#: For each path, the field with the messages, and other fields that a request needs.
PATHS = {
    CHAT: ("messages", {}),
    "/v1/responses": ("input", {}),
    "/v1/messages": ("messages", {"max_tokens": 2}),
}
LINK = "http://a.example/b"
PAGE = {"origin": "http://localhost:3000"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [{}, {"type": 5}, {"type": ["image"]}, {"type": "text"}])
async def test_a_link_in_a_part_of_no_known_type_is_refused_in_the_apis_form(
    http: httpx2.AsyncClient, path: str, kind: dict[str, Any]
) -> None:
    field, more = PATHS[path]
    for link in ({"image_url": {"url": LINK}}, {"image_url": LINK}, {"source": {"url": LINK}}):
        said = {field: [{"role": "user", "content": [{**kind, **link}]}], **more}
        answer = await http.post(path, json=said, headers=PAGE)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("a part of "), answer.text


@pytest.mark.parametrize("source", [{"type": "url", "url": LINK}, {"type": "base64", "data": "aGk="}])
async def test_a_document_by_url_gets_the_placeholder_of_a_document(
    http: httpx2.AsyncClient, source: dict[str, str]
) -> None:
    said = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    answer = await http.post("/v1/messages", json={"max_tokens": 2, "messages": said})
    warnings = "messages[0].content[0]: document replaced by a placeholder"
    assert (answer.status_code, answer.headers["x-turnkeep-warnings"]) == (200, warnings)


@pytest.mark.parametrize("path", PATHS)
async def test_a_fault_of_the_gateway_is_answered_in_the_apis_form_and_readable_by_pages(
    gateway: Any, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> bytes:
        raise KeyError("secret")

    monkeypatch.setattr(Handlers, "_body", fail)
    served = await gateway()
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        answer = await http.post(path, json=HELLO, headers=PAGE)
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the gateway failed: KeyError")
    assert answer.headers["access-control-allow-origin"] == PAGE["origin"]
    assert "KeyError: 'secret'" in caplog.text
