"""The HTTP API of `turnkeep console`: access, sessions, actions, streams; and the command's options."""

import asyncio
import json
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx2
import nats
import pytest
from msgspec.structs import replace

from commands import console as console_command
from commands.console import token_of
from ops.console import question_api, streams
from ops.console.app import Addresses, Console, behind_token
from ops.console.live import LiveFigures
from ops.console.model_api import ServedPrefix
from ops.console.token_check import PAGE
from ops.console.turns import shown
from ops.http_server import listening, server, url_of
from ops.log import searching, session_file
from ops.log.conversation import LoggedTurn, part
from tests.commands.command_runs import command, serving_process
from tests.ops.test_top import Watched
from tests.parts import LocalWorker, WorkerProcess, free_port, until
from tests.protocol.scripted_worker import metrics
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import NoWorkerError, RequestFailedError, TurnkeepError
from turnkeep_client.messages import (
    Called,
    CalledFunction,
    Chunk,
    Generate,
    Generated,
    Progress,
    Seconds,
    SessionInfo,
    Usage,
    decode_request,
    encode,
)
from turnkeep_client.session import Session
from worker.process.settings import Settings

TOKEN = "of-these-tests"
CONSOLE = ("console", "--listen", "127.0.0.1:0")


class OnShelf:
    """Fake `LocalModels`: three on this machine, a recommended one, and a download that is half done."""

    def __init__(self) -> None:
        self.pulled = list[str]()

    def listed(self) -> dict[str, Any]:
        size = {"size_bytes": 2**30, "needed_bytes": 2**31}
        here = {
            "dtype": "4 bits",
            "context_tokens": 8192,
            "in_use": True,
            "serve": "turnkeep serve --model a",
        }
        known = {"memory_gb": 8, "use": "chat", "sources": ["its card"], "fits": True}
        return {
            "memory_bytes": 2**33,
            "here": [
                {"name": "a", "fits": True, **size, **here},
                {"name": "b", "fits": False, **size, **here, "in_use": False, "context_tokens": None},
                {"name": "c", "fits": True, **size, **here, "in_use": False},
            ],
            "can_serve": True,
            "served": [{"name": "a", "is_loaded": True}],
            "good": [
                {"name": "org/good", **size, **known},
                {"name": "org/huge", **size, **known, "fits": False},
            ],
            "pulls": {name: {"done": 2**29, "total": 2**30} for name in self.pulled},
        }

    def pull(self, name: str) -> str:
        if "/" not in name:
            raise TurnkeepError(f"{name} is no id of the hub")
        self.pulled.append(name)
        return f"downloading {name}"


PLACE = Addresses(
    "nats://127.0.0.1:4222", "http://127.0.0.1:8080", True, "turnkeep launch", "turnkeep info --url"
)
SHELF = OnShelf()
EVIL = "<script>document.title='pwned'</script><img src=x onerror=alert(1)>"


async def plainly(_: Client, given: Any) -> dict[str, Any]:
    return {"max_tokens": 4, **given}


@asynccontextmanager
async def serving(
    client: Client, live: Any = None, *, read_only: bool = False, others: Sequence[Client] = ()
) -> AsyncIterator[str]:
    """Serve a console in this process for `client`, and one for each of `others`; yield the address."""
    clients = [client, *others]
    served = [
        ServedPrefix(f"p{number}" if number else "turnkeep", f"m:{number}") for number in range(len(clients))
    ]
    consoles = [
        Console(
            *(one, live or LiveFigures(one, 60), plainly, lambda: PLACE, SHELF),
            clients=dict(zip(served, clients, strict=True)),
            prefix=of.prefix,
            read_only=read_only,
        )
        for of, one in zip(served, clients, strict=True)
    ]
    consoles[0].log.add(b'{"event": "ready"}\n')
    with listening("127.0.0.1", 0) as listener:
        running = server(behind_token(consoles, TOKEN), 3)
        for console in consoles:
            console.end_streams_when(lambda: running.should_exit)
        task = asyncio.create_task(running.serve(sockets=[listener]))
        try:
            yield url_of(listener)
        finally:
            running.should_exit = True
            await task


class Page:
    """A client of the console's API, which sends requests as the console's page does."""

    def __init__(self, url: str) -> None:
        self.http = httpx2.AsyncClient(base_url=url, timeout=60, headers={"Origin": url})

    async def get(self, path: str, **query: Any) -> Any:
        answer = await self.http.get(f"/api/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        answer = await self.http.post(f"/api/sessions/{path}", json=body or {})
        assert answer.status_code == status, answer.text
        return answer.json()

    async def events(self, path: str) -> list[tuple[str, Any]]:
        async with self.http.stream("GET", f"/api/sessions/{path}") as answer:
            assert answer.status_code == 200, await answer.aread()
            text = (await answer.aread()).decode()
        found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
        return [(kind, json.loads(data)) for kind, data in found]


@asynccontextmanager
async def opened(client: Client, **options: Any) -> AsyncIterator[Page]:
    async with serving(client, **options) as url:
        page = Page(url)
        async with page.http:
            answer = await page.http.get("/", params={"token": TOKEN})
            assert answer.status_code == 303
            yield page


async def test_the_web_console_refuses_requests_without_its_access_token(worker: LocalWorker) -> None:
    async with serving(worker.client) as url, httpx2.AsyncClient(base_url=url) as http:
        for path in ("/main.js", "/api/workers", "/api/sessions", "/api/sessions/a", "/nothing"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.post("/api/sessions/a/close", json={})).status_code == 401
        locked = await http.get("/")
        assert (locked.status_code, "needs its token" in locked.text) == (401, True)
        assert (await http.get("/style.css")).status_code == 200
        wrong = await http.get("/", params={"token": TOKEN + "x"})
        assert (wrong.status_code, "not the one of this console" in wrong.text) == (401, True)
        assert "set-cookie" not in wrong.headers
        right = await http.get("/", params={"token": TOKEN})
        assert (right.status_code, right.headers["location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=strict"} <= set(right.headers["set-cookie"].split("; "))
        page = await http.get("/")
        assert (page.status_code, page.text) == (200, (PAGE / "index.html").read_text())
        assert (await http.get("/../app.py")).status_code == 404
        for answer in (locked, page):
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "access-control-allow-origin" not in answer.headers


async def test_the_web_console_refuses_foreign_host_names_and_requests_from_other_origins(
    worker: LocalWorker, page: Page
) -> None:
    for host in ("rebound.example", "[", "[::1", ""):
        answer = await page.http.get("/api/workers", headers={"Host": host})
        assert (answer.status_code, "ask for localhost" in answer.text) == (421, True)
    assert (await page.http.get("/api/workers", headers={"Host": "localhost:1"})).status_code == 200
    for origin in ("http://127.0.0.1:1", "https://evil.example", "null", ""):
        answer = await page.http.post(
            "/api/sessions/a/ask", json={"id": "x", "text": "x"}, headers={"Origin": origin}
        )
        assert answer.status_code == 403
    for site, status in (("same-site", 403), ("cross-site", 403), ("none", 403), ("same-origin", 400)):
        headers = {"Sec-Fetch-Site": site}
        answer = await page.http.post("/api/sessions/a/ask", json={}, headers=headers)
        assert answer.status_code == status, site
    assert await worker.client.log() == []


async def test_the_web_console_shows_the_sessions_of_each_of_several_models_separately(
    worker: LocalWorker,
) -> None:
    await worker.client.session("a").append(tokens=[5])
    async with connect(worker.settings.nats, prefix="nobody") as other:
        async with opened(worker.client, others=[other]) as page:
            places = [{"name": "m:0", "at": "/", "is_this": True}, {"name": "m:1", "at": "/of/p1/"}]
            assert (await page.get("workers"))["models"] == [places[0], places[1] | {"is_this": False}]
            assert [row["session"] for row in (await page.get("sessions"))["rows"]] == ["a"]
            assert (await page.http.get("/of/p1/main.js")).status_code == 200
            found = (await page.http.get("/of/p1/api/workers")).json()
            assert (found["prefix"], [one["is_this"] for one in found["models"]]) == ("p1", [False, True])
            assert (await page.http.get("/of/p1/api/sessions")).json()["rows"] == []
            assert (await page.http.get("/of/p2/api/workers")).status_code == 404
        async with serving(worker.client, others=[other]) as url, httpx2.AsyncClient(base_url=url) as http:
            assert "needs its token" in (await http.get("/of/p1/")).text
            assert (await http.get("/of/p1/api/sessions")).status_code == 401


async def test_a_read_only_console_refuses_every_action_except_the_export_of_sessions(
    worker: LocalWorker,
) -> None:
    await worker.client.session("a").append(tokens=[5] * 10)
    before = await worker.client.log()
    async with opened(worker.client, read_only=True) as page:
        assert (await page.get("workers"))["read_only"] is True
        assert (await page.get("sessions/a"))["row"]["position"] == 10
        for action in ("ask", "close", "forget", "fork", "open", "cancel", "tree", "export"):
            answer = await page.http.post(
                f"/api/sessions/a/{action}", json={"id": "x", "text": "x", "name": "b"}
            )
            assert answer.status_code in {404, 405}, action
        assert (await page.http.get("/api/sessions/a/export")).status_code == 200
    assert await worker.client.log() == before


async def test_the_consoles_session_list_shows_first_words_states_and_costs_and_can_be_paged_and_filtered(
    worker: LocalWorker, page: Page
) -> None:
    for number in range(52):
        await worker.client.session(f"s{number}").append(tokens=[5, 6])
    talk = worker.client.session("talk")
    results = [
        await talk.generate(messages=[{"role": "user", "content": EVIL}], max_tokens=3) for _ in range(2)
    ]
    await worker.client.session("s7").close()
    first, second = [await page.get("sessions", skip=skip) for skip in (0, 50)]
    assert (first["total"], len(first["rows"]), len(second["rows"])) == (53, 50, 3)
    assert [row["session"] for row in first["rows"][:2]] == ["s7", "talk"]
    row, cost = first["rows"][1], first["costs"][1]
    assert (row["state"], row["position"]) == ("idle", results[-1].position)
    assert row["begins"].startswith(EVIL[:30])
    spent = [one.usage for one in results]
    assert cost["generated"] == sum(one.completion_tokens for one in spent)
    assert cost["prefilled"] == sum(one.prefilled_tokens for one in spent)
    assert cost["found"] == sum(one.cached_tokens for one in spent)
    assert cost["seconds"] == pytest.approx(sum(one.seconds.total for one in results))
    again = await talk.generate(text="more", max_tokens=2)  # new results are added to the sums
    searched = await page.get("sessions", words="SCRIPT")
    (row,), (cost,) = searched["rows"], searched["costs"]
    assert (row["session"], cost["generated"]) == (
        "talk",
        sum(one.completion_tokens for one in spent) + again.usage.completion_tokens,
    )
    closed = await page.get("sessions", state="closed")
    assert [row["session"] for row in closed["rows"]] == ["s7"]
    assert [row["session"] for row in (await page.get("sessions", sort="name", words="s1"))["rows"]][:2] == [
        "s1",
        "s10",
    ]
    assert (await page.http.get("/api/sessions", params={"skip": "-1"})).status_code == 400


async def test_the_console_loads_the_last_30_turns_of_a_conversation_first_and_earlier_turns_on_request(
    worker: LocalWorker, page: Page
) -> None:
    session = worker.client.session("long")
    for number in range(65):
        await session.append(text=f"{number},")
    found, query = list[dict[str, Any]](), dict[str, Any]()
    sizes = []
    while True:
        answer = await page.get("sessions/long", **query)
        found = answer["turns"] + found
        sizes.append(len(answer["turns"]))
        if not answer["more"]:
            break
        query = dict(zip(("before", "end"), answer["more"], strict=True))
    assert sizes == [30, 30, 5]
    assert [turn["said"][0]["text"] for turn in found] == [f"{number}," for number in range(65)]
    assert {turn["state"] for turn in found} == {"done"}
    assert found[-1]["spent"]["prefilled"] == 3
    assert await page.get("sessions/none") == {"row": None, "cost": None, "turns": [], "more": None}
    assert (await part(worker.client, "none", 3)) == ([], None)


async def test_the_console_api_returns_for_each_turn_the_position_at_which_to_fork_to_regenerate_the_turn(
    worker: LocalWorker, page: Page
) -> None:
    """Also the first turn of a page, and none after which the template has changed what was before it."""
    session = worker.client.session("s")
    ends = [(await session.append(text=f"{number},")).position for number in range(35)]
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    said = [{"role": "user", "content": "So?"}]
    await session.generate(messages=said, max_tokens=2)
    last = await session.generate(messages=said, max_tokens=2, tools=tools)
    assert last.rewritten_from is not None
    with pytest.raises(RequestFailedError):
        await session.rewind(9999)
    turns = (await page.get("sessions/s"))["turns"]
    assert [one.get("start") for one in turns] == [*ends[7:35], None, last.position]
    assert [one.get("kept") for one in turns][-3:] == [ends[34], last.rewritten_from, None]
    await page.post("s/fork", {"name": "v2", "position": turns[0]["start"]})
    assert len((await worker.client.session("v2").history()).turns) == 8


def test_the_console_shows_text_reasoning_tool_calls_and_costs_of_a_turn_separately() -> None:
    call = Called(id="c", function=CalledFunction(name="f", arguments='{"a": 1}'))
    result = Generated(
        id="r",
        seq=3,
        position=50,
        text="So.",
        reasoning="Let me see.",
        tool_calls=(call,),
        tokens=(1, 2, 3, 4, 5),
        finish_reason="tool_calls",
        usage=Usage(prompt_tokens=45, cached_tokens=40, prefilled_tokens=5, completion_tokens=5),
        seconds=Seconds(queued=0.0, prefill=0.5, first_token=1.0, total=3.0),
        kv_live_bytes=1,
    )
    told = [{"role": "tool", "content": "21", "tool_call_id": "b"}]
    request = decode_request(encode({"type": "generate", "id": "r", "messages": told}))
    turn = LoggedTurn(
        number=1, seq=3, stored=datetime.now(UTC), request=request, result=result, model=None, build={}
    )
    found = json.loads(encode(shown(turn)))
    none = Usage(prompt_tokens=0, cached_tokens=0, prefilled_tokens=0, completion_tokens=0)
    cancelled = replace(result, finish_reason="cancelled", tokens=(), usage=none)
    nothing = json.loads(encode(shown(replace(turn, result=cancelled))))
    assert ("spent" in nothing, nothing["note"]) == (False, "stopped"), "nothing was done for it"
    assert found["said"] == [
        {"role": "tool", "text": "21"},
        {
            "role": "assistant",
            "text": "So.",
            "blocks": [["p", {}, "So."]],
            "reasoning": "Let me see.",
            "calls": [["f", '{"a": 1}']],
        },
    ]
    assert found["spent"] == {
        "found": 40,
        "prefilled": 5,
        "generated": 5,
        "first_token_s": 1.0,
        "tokens_per_s": 2.0,
        "total_s": 3.0,
    }


async def test_the_console_forks_exports_closes_reopens_and_forgets_a_session(
    worker: LocalWorker, tmp_path: Path
) -> None:
    client = worker.client
    await client.session("a").append(tokens=[5] * 40)
    async with opened(client) as page:
        assert (await page.post("a/fork", {"name": "b", "position": 32}))["said"] == "forked as b"
        assert (await client.session("b").info()).position == 32
        tree = await page.get("sessions/b/tree")
        assert (tree["session"], [one["session"] for one in tree["forks"]]) == ("a", ["b"])
        turn = (await page.get("sessions/b"))["turns"][-1]
        assert (turn["note"], turn["parent"]) == ("begins with 32 tokens of another session", "a")
        file = tmp_path / "a.turnkeep"
        answer = await page.http.get("/api/sessions/a/export")
        assert 'filename="a.turnkeep"' in answer.headers["content-disposition"]
        file.write_bytes(answer.content)
        manifest, lines = session_file.read(file)
        assert (manifest.session, len(lines)) == ("a", 1)
        assert (await page.post("a/close"))["said"] == "closed at position 40"
        assert (await page.get("sessions/a"))["row"]["state"] == "closed"
        await page.post("a/open")
        assert (await client.session("a").info()).position == 0
        await page.post("a/forget")
        assert (await page.get("sessions", words="a", state="forgotten"))["rows"][0]["session"] == "a"
        with pytest.raises(RequestFailedError, match="unknown_session"):
            await client.session("a").info()
        assert [row["session"] for row in (await page.get("sessions"))["rows"]] == ["b"]


@pytest.mark.serves("endless_model")
async def test_closing_a_session_in_the_console_during_an_answer_says_that_the_close_follows_the_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question_api, "PATIENCE_S", 0.5)
    async with client.session("a").generate(text="x", max_tokens=50_000) as answer, opened(client) as page:
        async for _ in answer:
            break
        said = (await page.post("a/close"))["said"]
        assert said == "it closes as soon as the requests before are answered"
        await answer.cancel()
        async with asyncio.timeout(20):
            while (await page.get("sessions/a"))["row"]["state"] != "closed":  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_the_console_leaves_no_temporary_export_file_whatever_http_range_header_a_request_has(
    worker: LocalWorker, page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.client.session("a").append(tokens=[5] * 40)
    made = tmp_path / "temporary"
    made.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(made))
    whole = await page.http.get("/api/sessions/a/export")
    for asked in ("bytes=0-9", "bytes=x-", "bytes=99999999-"):
        answer = await page.http.get("/api/sessions/a/export", headers={"Range": asked})
        assert (answer.status_code, answer.content) == (200, whole.content)
    assert [*made.iterdir()] == []


async def test_the_consoles_full_search_finds_words_anywhere_in_questions_and_answers(
    worker: LocalWorker,
) -> None:
    client = worker.client
    garden = client.session("garden")
    await garden.generate(messages=[{"role": "user", "content": "What grows?"}], max_tokens=2)
    parts = [{"type": "text", "text": f"{'far ' * 30}Where is the Rhubarb"}]
    raw = await nats.connect(worker.settings.nats)
    append = encode({"type": "append", "id": "p", "messages": [{"role": "user", "content": parts}]})
    await raw.jetstream().publish(f"{worker.settings.prefix}.default.garden.in", append)
    await raw.close()
    answer = await client.session("other").generate(
        text="zz", max_tokens=20, response_format={"type": "choice", "choices": ["Übermut"]}
    )
    await client.session("sharp").append(text=f"{'ß' * 40} Stachys")
    async with opened(client) as page:

        async def found(words: str, **more: Any) -> tuple[list[str], dict[str, str]]:
            told = await page.get("sessions", words=words, brief=1, **more)
            assert told["is_whole"]
            assert told["costs"] == []
            return [row["session"] for row in told["rows"]], told["found"]

        assert await found("rhubarb") == ([], {})
        assert await found("rhubarb", whole=1) == (
            ["garden"],
            {"garden": "...ar far Where is the Rhubarb"},
        )
        assert await found("rhubarb", whole=1, skip=1) == ([], {}), "behind the first page"
        assert await found("üb", whole=1) == (["other"], {"other": answer.text})
        assert await found("stach", whole=1) == (["sharp"], {"sharp": f"...{'s' * 19} stachys"})
        assert await found('"text"', whole=1) == ([], {})


async def test_a_console_search_that_runs_out_of_time_reports_an_incomplete_result(client: Client) -> None:
    await client.session("a").append(text="abc")
    assert await searching.said(client, "abc", 0) == ({}, False)


async def test_the_console_exports_a_conversation_as_markdown_and_as_json(client: Client, page: Page) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "**A**", "tool_calls": [call]},
        {"role": "tool", "content": "21", "tool_call_id": "c"},
    ]
    await client.session("a").append(messages=told)
    answer = await page.http.get("/api/sessions/a/export", params={"form": "md"})
    assert answer.headers["content-disposition"] == 'attachment; filename="a.md"'
    assert answer.text == (
        "# a\n\n## System\n\nS\n\n## You\n\nQ\n\n## Model\n\n**A**\n\n```json\n"
        '{"name":"f","arguments":"{}"}\n```\n\n## Result of a tool\n\n21\n'
    )
    assert (await page.http.get("/api/sessions/a/export", params={"form": "json"})).json() == told
    for name, form in (("a", "pdf"), ("none", "md")):
        answer = await page.http.get(f"/api/sessions/{name}/export", params={"form": form})
        assert answer.status_code == 404


async def test_the_console_sends_the_chosen_sampling_options_and_regenerates_at_temperature_0_7_by_default(
    client: Client, page: Page
) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    options = {"seed": 7, "top_p": 0.5, "temperature": 0.9, "max_tokens": 30}
    await page.post("s/ask", {"id": "q", "text": "x", "schema": schema, **options})
    for name, chosen in (("r", None), ("r0", 0.0)):
        await page.post("s/ask", {"id": name, "text": "x", "vary": True, "temperature": chosen})
    log = [decode_request(entry.body) for entry in await client.log("s") if entry.kind == "in"]
    asked, *again = [one for one in log if isinstance(one, Generate)]
    assert (asked.seed, asked.top_p, asked.temperature, asked.max_tokens) == (7, 0.5, 0.9, 30)
    assert asked.response_format is not None
    assert [one.temperature for one in again] == [0.7, 0.0]


async def test_requests_to_the_console_fail_at_once_while_nats_is_unreachable(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    worker = worker_process()
    worker.start()
    async with await worker.client() as client, opened(client) as page:
        await client.session("a").append(tokens=[5])
        assert await page.get("sessions/a")
        worker.stop()  # and its server
        await until(lambda: not client.connected)
        for path in ("sessions", "sessions/a", "sessions/a/tree"):
            answer = await page.http.get(f"/api/{path}", timeout=2)
            assert (answer.status_code, "NATS does not answer" in answer.json()["error"]) == (503, True)
        assert (await page.get("workers"))["connected"] is False


async def test_the_console_shows_at_once_that_the_worker_has_stopped(worker: LocalWorker) -> None:
    async with opened(worker.client, live=Watched(5, "w1")) as page:
        told = await page.get("workers")
        assert (told["is_served"], told["workers"]["w1"]["up"]) == (True, True)
        await worker.stop()
        client = await connect(worker.settings.nats, prefix=worker.settings.prefix)
    async with client, opened(client, live=Watched(5, "w1")) as page:
        told = await page.get("workers")
        assert (told["is_served"], told["workers"]["w1"]["up"]) == (False, False)


async def test_a_read_only_console_refuses_to_download_load_or_unload_a_model(client: Client) -> None:
    async with opened(client) as page:
        assert [one["name"] for one in (await page.get("models"))["here"]] == ["a", "b", "c"]
        for name, status, says in (("x", 409, "no id of the hub"), ("org/good", 200, "downloading org/good")):
            answer = await page.http.post("/api/models", json={"name": name})
            assert (answer.status_code, says in answer.text) == (status, True)
        assert (await page.get("models"))["pulls"]["org/good"]["total"] == 2**30
        foreign = await page.http.post("/api/models", json={"name": "a/b"}, headers={"Origin": "null"})
        assert foreign.status_code == 403
    async with opened(client, read_only=True) as page:
        assert (await page.http.post("/api/models", json={"name": "a/b"})).status_code == 405
        for act in ("serve", "unload"):
            assert (await page.http.post(f"/api/models/{act}", json={"name": "c"})).status_code == 405
    assert SHELF.pulled == ["org/good"]
    SHELF.pulled.clear()


async def test_the_console_refuses_oversized_or_malformed_requests_and_adds_nothing_to_the_log(
    worker: LocalWorker, page: Page
) -> None:
    await worker.client.session("a").append(tokens=[5])
    raw = await nats.connect(worker.settings.nats)
    await raw.jetstream().publish(f"{worker.settings.prefix}.default.<script>alert(1)</script>.in", b"{}")
    await raw.close()
    before = await worker.client.log()
    assert [row["session"] for row in (await page.get("sessions"))["rows"]] == ["a"]
    for path, body, status, says in (
        ("a/count", {"text": "x" * 2**21}, 413, "larger than"),
        ("a/ask", {"id": "x", "text": "x" * 2**21}, 400, "at most"),
        ("a/ask", {"id": "x", "text": "x", "more": 1}, 400, "`more`"),
        ("a/ask", {"id": "<b>", "text": "x"}, 400, "id"),
        ("a/ask", {"id": "x", "text": ""}, 400, "it needs a text or an image"),
        ("a/ask", {"id": "x", "text": "x", "max_tokens": -1}, 400, "max_tokens"),
        ("%3Cscript%3E/ask", {"id": "x", "text": "x"}, 400, "is not valid"),
        ("a/explode", {}, 404, "there is no action 'explode'"),
        ("a/fork", {"name": "a b"}, 400, "is not valid"),
        ("none/close", {}, 409, "unknown_session"),
        ("none/forget", {}, 409, "unknown_session"),
        ("a/cancel", {"id": "none"}, 409, "none"),
    ):
        assert says in (await page.post(path, body, status))["error"], (path, body)
    answer = await page.http.post("/api/sessions/a/ask", content=b"[" * 100_000)
    assert answer.status_code == 400
    answer = await page.http.get("/api/sessions/none/export")
    assert (answer.status_code, "no session" in answer.text) == (409, True)
    assert (await page.http.get("/api/sessions/a/answers/1")).status_code == 404
    assert (await page.http.get("/api/sessions/*")).status_code == 400
    assert await worker.client.log() == before


async def test_the_console_streams_the_chunks_of_the_logged_answer_and_runs_a_repeated_request_id_only_once(
    worker: LocalWorker, page: Page
) -> None:
    asked = await page.post("new/ask", {"id": "q1", "text": EVIL, "system": "S", "max_tokens": 20})
    events = await page.events(f"new/answers/{asked['seq']}")
    turn = (await page.get("sessions/new"))["turns"][0]
    assert [kind for kind, _ in (events[0], events[-1])] == ["begin", "end"]
    joined = "".join(told["text"] for kind, told in events if kind == "chunk")
    assert [one["role"] for one in turn["said"]] == ["system", "user", "assistant"]
    assert turn["said"][1]["text"] == EVIL
    assert (turn["id"], turn["said"][2].get("text", "")) == ("q1", joined)
    assert await page.events(f"new/answers/{asked['seq']}") == [
        events[0],
        *([("chunk", {"text": joined, "reasoning": "", "calls": []})] if joined else []),
        *([("blocks", {"first": 0, "blocks": turn["said"][2]["blocks"]})] if joined else []),
        ("end", {}),
    ]
    # Asked again under the same id, it is not asked twice.
    await page.post("new/ask", {"id": "q1", "text": EVIL, "system": "S", "max_tokens": 20})
    assert (await worker.client.session("new").info()).position == turn["position"]


class Slow:
    """A session whose answer does not come, and what its worker says of it."""

    def __init__(self, told: SessionInfo | None) -> None:
        self.told = told

    async def follow(self, asked: Generate, seq: int) -> AsyncIterator[Chunk]:
        await asyncio.Event().wait()
        yield Chunk(i=0, tokens=(), text="")

    async def info(self, *, limit: int) -> SessionInfo:
        if self.told is None:
            raise NoWorkerError("no worker")
        return self.told


def told(active: str | None, progress: Progress | None, *, running: int = 1, waiting: int = 0) -> SessionInfo:
    return SessionInfo(
        tenant="default",
        session="s",
        position=0,
        state="running" if progress else "waiting",
        active=active,
        waiting=(),
        requests=1,
        progress=progress,
        resident=False,
        kv_live_bytes=0,
        policy="full",
        model="m",
        worker=replace(metrics("w"), running=running, waiting=waiting),
    )


async def test_the_console_stream_of_an_answer_without_tokens_so_far_says_what_the_answer_waits_for() -> None:
    asked = decode_request(encode({"type": "generate", "id": "q", "text": "x"}))
    progress = Progress(cached_tokens=512, context_tokens=9000, generated_tokens=0)

    async def shown(heard: SessionInfo | None) -> Any:
        stream = streams.events(cast("Session", Slow(heard)), cast("Generate", asked), 1, lambda: False)
        assert await anext(stream) == b"event: begin\ndata: {}\n\n"
        kind, data = (await anext(stream)).decode().split("\n")[:2]
        assert kind == "event: waits"
        await stream.aclose()
        return json.loads(data.removeprefix("data: "))

    waits_for = (
        None,
        told("q", progress),
        told(None, None, running=2, waiting=3),
        told(None, None, running=0),
    )
    assert await asyncio.gather(*map(shown, waits_for)) == [
        {"is_heard": False},
        {"is_heard": True, "read": 512, "of": 9000, "written": 0},
        {"is_heard": True, "others": 4},
        {"is_heard": True, "others": 0},
    ]


async def test_the_console_counts_the_tokens_of_a_typed_message_and_explains_an_exceeded_context(
    page: Page,
) -> None:
    alone = await page.post("s/count", {"text": "word " * 1000})
    assert alone["tokens"] == alone["position"] > alone["context"] > 0
    await page.post("s/ask", {"id": "q", "text": "x" * 4000})
    found = {"turns": [{"state": "waiting"}]}
    async with asyncio.timeout(30):
        while found["turns"][0]["state"] == "waiting":
            await asyncio.sleep(0.05)
            found = await page.get("sessions/s")
    note = found["turns"][0]["note"]
    assert re.fullmatch(r"the session would hold \d+ tokens and \d+ new ones, the context is \d+", note)


async def test_the_consoles_brief_session_list_has_one_row_for_a_conversation_and_its_variants(
    client: Client, page: Page
) -> None:
    talk = client.session("talk")
    for text in ("First?", "Second?"):
        position = 0 if text == "First?" else (await talk.info()).position
        await talk.generate(messages=[{"role": "user", "content": text}], max_tokens=2)
    await page.post("talk/fork", {"name": "talk--v2", "position": position, "is_variant": True})
    await page.post("talk/fork", {"name": "apart", "position": position})
    other = [{"role": "user", "content": "Third?"}]
    for name in ("apart", "talk--v2"):
        await client.session(name).generate(messages=other, max_tokens=2)
    found = await page.get("sessions/talk--v2/variants")
    assert (found["root"], found["begins"], found["members"]) == ("talk", "First?", ["talk", "talk--v2"])
    assert found["at"] == {f"{position}": ["talk", "talk--v2"]}
    rows = (await page.get("sessions", brief=1))["rows"]
    assert [(row["session"], row["begins"]) for row in rows] == [
        ("talk--v2", "First?"),
        ("apart", "Third?"),
    ]
    assert (await page.get("sessions", brief=1, words="second", whole=1))["total"] == 1
    assert (await page.get("sessions"))["total"] == 3
    first, second = (await page.get("sessions/talk--v2"))["turns"]
    assert first["said"] == (await page.get("sessions/talk"))["turns"][0]["said"]
    assert (second["start"], second["said"][0]["text"]) == (position, "Third?")
    assert [one["said"][0]["text"] for one in (first, second)] == ["First?", "Third?"]


@pytest.mark.serves("endless_model")
async def test_the_console_limits_concurrent_answer_streams_and_frees_a_slot_when_a_reader_disconnects(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question_api, "MAX_STREAMS", 1)
    asked = await page.post("s/ask", {"id": "q", "text": "x", "max_tokens": 50_000})
    path = f"/api/sessions/s/answers/{asked['seq']}"
    async with page.http.stream("GET", path) as first:
        parts = first.aiter_text()
        assert "event: begin" in await anext(parts)
        second = await page.http.get(path)
        assert (second.status_code, "1 answers are being streamed" in second.text) == (503, True)
        waiting = (await page.get("sessions/s"))["turns"][0]
        assert (waiting["state"], waiting["id"]) == ("waiting", "q")
        await parts.aclose()
    async with asyncio.timeout(30):
        while True:  # the server notices the end of the first one
            async with page.http.stream("GET", path) as third:
                if third.status_code == 200:
                    break
            await asyncio.sleep(0.05)
    assert (await page.post("s/cancel", {"id": "q"}))["said"] == "cancelled an answer that was running"
    assert (await page.events(f"s/answers/{asked['seq']}"))[-1] == ("end", {})
    assert (await page.get("sessions/s"))["turns"][0]["note"] == "stopped"


async def test_the_console_ends_an_answer_stream_whose_client_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(question_api, "_SLOW_S", 0.05)
    left = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"event: chunk\n\n"

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await question_api._Events(endless(), left.set)({"type": "http"}, never, never)
    assert left.is_set()


def test_the_console_page_contains_no_url_of_another_host_and_inserts_no_html() -> None:
    text = "".join(file.read_text() for file in PAGE.iterdir())
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
    }
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(| style=", text)


@pytest.mark.parametrize("wrong", ["localhost", ":8080", "localhost:", "localhost:65536", "-1", "::1"])
async def test_the_option_listen_refuses_an_incomplete_address_and_shows_the_right_form(wrong: str) -> None:
    done = await command("console", "--listen", wrong)
    assert done.returncode == 2
    assert (
        f"Error: Invalid value for '--listen': {wrong!r} is no address; it must be like 0.0.0.0:8080 or"
        " [::1]:8080, or a port of 127.0.0.1\n" in done.stderr
    )


@pytest.mark.parametrize("name", ["console", "exporter", "gateway"])
async def test_the_option_listen_with_a_bare_port_listens_on_the_loopback_address(
    name: str, nats_url: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = await command(name, "--listen", port, "--nats", nats_url)
    why = "Address already in use"
    assert done.stderr == f"turnkeep: cannot listen on 127.0.0.1:{port} ({why}); choose another --listen\n"


@pytest.mark.packaging
async def test_the_command_console_shows_the_workers_of_its_subject_prefix_and_their_gateways_address(
    worker_process: Callable[..., WorkerProcess],
) -> None:
    port = free_port()
    worker = worker_process("--gateway", str(port))
    worker.start()
    async with await worker.client():
        pass
    arguments = ("--data-dir", worker.data_dir, "--nats-port", worker.url.rpartition(":")[2])
    with serving_process(*CONSOLE, *arguments) as url:
        async with httpx2.AsyncClient() as http, asyncio.timeout(60):
            await http.get(url)
            api = f"{url.partition('?')[0]}api"
            place = (await http.get(f"{api}/place")).json()
            while not (found := (await http.get(f"{api}/workers")).json())["workers"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert (found["prefix"], found["connected"], len(found["workers"])) == ("turnkeep", True, 1)
    assert re.fullmatch(r"[\w-]{43}", url.partition("token=")[2])
    assert (place["gateway"], place["has_gateway"]) == (f"http://127.0.0.1:{port}", True)
    assert place["nats"].rpartition(":")[2] == arguments[-1]
    assert re.search(r"turnkeep launch --data-dir \S+$", place["launch"])


def test_the_consoles_access_token_depends_on_the_tenant_and_on_the_token_of_the_workers_nats_server(
    tmp_path: Path,
) -> None:
    own, other = Settings(data_dir=tmp_path), Settings(data_dir=tmp_path, nats="nats://127.0.0.1:4222")
    assert token_of(own, "a") != token_of(own, "a"), "there is no server yet: it is random"
    (tmp_path / "nats-token").write_text("secret")
    assert token_of(own, "a") == token_of(own, "a")
    assert token_of(own, "a") != token_of(own, "b")
    first = token_of(own, "a")
    (tmp_path / "nats-token").write_text("another")
    assert token_of(own, "a") != first
    assert token_of(other, "a") != token_of(other, "a")


async def test_the_command_console_with_open_passes_the_browser_a_private_file_and_no_access_token(
    nats_url: str, tmp_path: Path
) -> None:
    browser, opened_, end = (tmp_path / name for name in ("browser", "opened", "end"))
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > "{opened_}"\nuntil [ -e "{end}" ]; do sleep 0.1; done\n')
    browser.chmod(0o755)
    place = {"BROWSER": f"{browser} %s", "TMPDIR": str(tmp_path)}
    with serving_process(*CONSOLE, "--open", "--nats", nats_url, **place) as url:
        async with asyncio.timeout(30):
            await until(lambda: not (not opened_.exists() or not opened_.read_text().endswith(".html")))
            page = tmp_path / opened_.read_text().removeprefix(f"file://{tmp_path}/")
            assert page.stat().st_mode & 0o777 == 0o600
            assert f'content="0; url={url}"' in page.read_text()
            async with httpx2.AsyncClient() as http:  # while the browser runs
                assert (await http.get(url)).status_code == 303
    assert not page.exists()
    end.touch()


async def test_on_macos_the_option_open_of_the_console_runs_the_command_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = tmp_path / "opened"
    (tmp_path / "open").write_text(f'#!/bin/sh\n/bin/cat "$1" > "{opened}"\n')
    (tmp_path / "open").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    with console_command._opened("http://127.0.0.1/?token=t"):
        await until(lambda: not (not opened.exists() or "token=t" not in opened.read_text()))
