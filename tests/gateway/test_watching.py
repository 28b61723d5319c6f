"""The gateway's metrics, its header `x-turnkeep-explain`, and which web pages may send requests."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest
from crafted import LETTERS, user
from prometheus_client.parser import text_string_to_metric_families

from gateway import app
from gateway.boundaries import RecentBoundaries
from gateway.keys import Keys

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "A secret of 22 letters"}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 4, "logit_bias": LETTERS, **more}


def said(answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]}


async def samples(http: httpx2.AsyncClient) -> dict[tuple[str, ...], float]:
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name.removeprefix("turnkeep_gateway_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.mark.serves("endless_model")
async def test_a_gateway_publishes_its_request_and_conversation_counts_over_nats(
    worker: Any, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_PUBLISH_S", 0.2)
    served = await gateway(name="laptop-8080")
    await served.http.post(CHAT, json=body(user("Hello.")))
    await served.http.get("/nowhere")
    async with asyncio.timeout(20):
        async for told in worker.client.gateways():
            if told.requests == {"200": 1, "404": 1}:
                break
    assert (told.gateway, told.conversations) == ("laptop-8080", 1)
    assert told.answers == {"begun": 1}
    assert told.tokens["generated"] == 4


@pytest.mark.serves("endless_model")
async def test_the_gateways_metrics_endpoint_counts_requests_conversations_and_tokens(
    gateway: Any, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("secret acme\n")
    keys = Keys.read(tmp_path / "keys")
    served = await gateway(keys=keys)
    headers = {"authorization": "Bearer secret"}
    first = await served.http.post(CHAT, json=body(user("Hello.")), headers=headers)
    on = body(user("Hello."), said(first), user("On."))
    second = await served.http.post(CHAT, json=on, headers=headers)
    await served.http.post(CHAT, json=body(user("Hello.")))
    await served.http.post("/no/such/path")
    found = await samples(served.http)
    used = second.json()["usage"]
    num_prompt = used["prompt_tokens"]
    assert found["http_requests_total", CHAT, "200"] == 2
    assert found["http_requests_total", CHAT, "401"] == 1
    assert found["http_requests_total", "other", "404"] == 1
    assert found["requests_in_flight",] == 1, "this one"
    assert found["conversations",] == 1
    assert (found["answers_total", "begun"], found["answers_total", "continued"]) == (1, 1)
    cached = used["prompt_tokens_details"]["cached_tokens"]
    assert found["tokens_total", "reused"] == cached
    before = first.json()["usage"]["prompt_tokens"]
    assert found["tokens_total", "prefilled"] == before + num_prompt - cached
    assert found["tokens_total", "generated"] == 8
    for more in ({"host": "a.example"}, {"x-forwarded-for": "10.1.1.1"}, {"forwarded": "for=10.1.1.1"}):
        refused = await served.http.get("/metrics", headers=more)
        assert refused.status_code == 403


@pytest.mark.serves("endless_model")
async def test_the_explain_header_names_the_first_unknown_message_by_number_but_not_the_messages_content(
    gateway: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway")
    served = await gateway(explain=True)

    async def explained(*messages: dict[str, Any], **more: Any) -> tuple[list[str], httpx2.Response]:
        answer = await served.http.post(CHAT, json=body(*messages, **more))
        how, session, *rest = answer.headers["x-turnkeep-explain"].split("; ")
        assert answer.headers["x-turnkeep-session"] == f"{session.removeprefix('session=')} {how}"
        return [how, *rest], answer

    told = [SYSTEM, user("Hello.")]
    found, first = await explained(*told)
    assert found == ["begun", "messages=0/2", "tokens=0", "differs=none"]
    told += [said(first), user("On.")]
    num_tokens = first.json()["usage"]["total_tokens"]
    found, second = await explained(*told)
    assert found == ["continued", "messages=3/4", f"tokens={num_tokens}", "differs=none"]
    assert not caplog.records, "all was found"
    told += [said(second), user("Again.")]
    changed = [{**SYSTEM, "content": "Another"}, *told[1:]]
    found, _ = await explained(*changed)
    assert found == ["begun", "messages=0/6", "tokens=0", "differs=messages[0] (system, 7 characters)"]
    found, _ = await explained(*told[:4], {"role": "assistant", "content": "No"}, told[5])
    assert found[0] == "forked"
    assert found[1:] == [
        "messages=3/6",
        f"tokens={num_tokens}",
        "differs=messages[4] (assistant, 2 characters)",
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    found, _ = await explained(*told, tools=[tool])
    assert found[-1] == "differs=tools"
    text = caplog.text
    assert "0 of a conversation's 6 messages were found: messages[0] (system, 7 characters)" in text
    assert text.count("differs from all known") == 3
    assert "secret" not in text
    assert "Again" not in text


def test_the_conversation_index_of_a_gateway_keeps_about_the_20000_most_recent_message_boundaries() -> None:
    seen = RecentBoundaries()
    for number in range(50_000):
        known = [number.to_bytes(4, "big") + bytes([at]) for at in range(3)]
        assert seen._add(known) == 0
    assert seen._add([*known, b"new"]) == 3
    assert len(seen._young) + len(seen._old) <= 20_003


async def test_cors_allows_requests_from_local_pages_and_configured_sites_and_refuses_all_others(
    gateway: Any,
) -> None:
    named = ["https://chat.example", "https://b.example:8443"]
    served = await gateway(cors=named)
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    local = ["http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:80", "http://tauri.localhost"]
    for site in (*named, *local, "app://obsidian.md", "vscode-file://vscode-app"):
        preflight = await served.http.options(CHAT, headers={"origin": site, **asks})
        assert preflight.status_code == 200, site
        assert preflight.headers["access-control-allow-origin"] == site
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answer = await served.http.post(CHAT, json=body(user("a")), headers={"origin": site})
        assert answer.status_code == 200, site
        assert answer.headers["access-control-allow-origin"] == site
        exposed = answer.headers["access-control-expose-headers"]
        assert {"x-turnkeep-session", "x-turnkeep-warnings"} <= {*exposed.split(", ")}
    for site in (
        "https://other.example",
        "null",
        "https://localhost.example",
        "https://b.example",
        "app",
    ):
        other = {"origin": site}
        answer = await served.http.post(CHAT, json=body(user("a")), headers=other)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (403, False)
        preflight = await served.http.options(CHAT, headers={**other, **asks})
        assert "access-control-allow-origin" not in preflight.headers


async def test_a_host_header_of_an_unknown_domain_is_refused_unless_the_gateway_has_keys(
    worker: Any, gateway: Any, door: Any, tmp_path: Path
) -> None:
    """Prevents DNS rebinding: a page whose domain resolves to the gateway sends a GET without an Origin."""
    (tmp_path / "keys").write_text("secret acme\n")
    nats, prefix = worker.settings.nats, worker.settings.prefix
    served = await door(nats, prefix, cors=["https://chat.example"])
    guarded = await door(nats, prefix, keys=Keys.read(tmp_path / "keys"))
    async with httpx2.AsyncClient(timeout=20) as http:
        for host, status in [
            ("evil.example", 403),
            ("evil.example:8080", 403),
            ("localhost.evil.example", 403),
            ("evil.example.", 403),
            ("localhost:1", 200),
            ("127.0.0.1", 200),
            ("192.168.1.7:80", 200),
            ("[::1]:80", 200),
            ("gateway", 200),
            ("host.docker.internal:8080", 200),
            ("chat.example", 200),
            ("[", 200),
        ]:
            answer = await http.get(f"{served.url}/v1/models", headers={"host": host})
            assert answer.status_code == status, host
            if status == 403:
                assert answer.json()["error"]["code"] == "forbidden_host"
            behind = {"host": host, "x-api-key": "secret"}  # a proxy, perhaps; who has a key may ask
            assert (await http.get(f"{guarded.url}/v1/models", headers=behind)).status_code == 200
