"""Clients disconnect and get the rest of an answer later: by its id, an event's id, or an idempotency key."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from crafted import LETTERS
from parts import until

from gateway import idempotency, logged_answers
from gateway.http import answer_response, handlers
from gateway.keys import Keys
from turnkeep_client.errors import NoAnswerError, NoServerError
from turnkeep_client.log import why_refused

pytestmark = pytest.mark.serves("endless_model")

CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"]


def asked(path: str, max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    """Return the body of a request to one of the four APIs in `PATHS`."""
    said = [{"role": "user", "content": "Begin."}]
    length = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    given = {"/v1/completions": {"prompt": "Begin."}, "/v1/responses": {"input": "Begin."}}
    fields = given.get(path, {"messages": said})
    return {"model": "m", length: max_tokens, "temperature": 0.9, "logit_bias": LETTERS, **fields, **more}


class Event(dict[str, Any]):
    """A server-sent event: its id, its data, and the text that it adds to the answer."""

    def __init__(self, written: str) -> None:
        lines = dict(line.split(": ", 1) for line in written.split("\n"))
        super().__init__(data=lines["data"])
        self.id = lines.get("id", "")

    @property
    def text(self) -> str:
        if not self["data"].startswith("{"):
            return ""
        body = json.loads(self["data"])
        if "choices" in body:
            return "".join(
                one.get("text", one.get("delta", {}).get("content")) or "" for one in body["choices"]
            )
        delta = body.get("delta", "")
        return delta if isinstance(delta, str) else delta.get("text", "")


def events(written: str) -> list[Event]:
    return [Event(one) for one in written.split("\n\n") if one and not one.startswith(":")]


def text_of(found: list[Event]) -> str:
    return "".join(one.text for one in found)


async def read(answer: httpx2.Response, num: int = 100_000) -> list[Event]:
    """Read the first `num` events of a stream."""
    assert answer.status_code == 200, await answer.aread()
    found: list[Event] = []
    written = ""
    async for part in answer.aiter_text():
        written += part
        *whole, written = written.split("\n\n")
        found += [Event(one) for one in whole if not one.startswith(":")]
        if len(found) >= num:
            break
    return found[:num]


async def post(
    http: httpx2.AsyncClient, path: str, headers: Mapping[str, str], **more: Any
) -> httpx2.Response:
    return await http.post(path, json=asked(path, **more), headers=dict(headers))


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_can_resume_an_answer_stream_after_any_event_id_and_gets_the_remaining_events(
    http: httpx2.AsyncClient, path: str
) -> None:
    """With `Last-Event-ID`, by sending the request again, and by a GET of the answer's URL."""
    body = asked(path, 20, stream=True, stream_options={"include_usage": True})
    whole = events((await http.post(path, json=body)).text)
    assert len(text_of(whole)) == 20
    assert len({one.id for one in whole}) == len(whole), "each event has an id of its own"
    answer_id = whole[0].id.partition(".")[0]
    replayed = events((await http.get(f"{path}/{answer_id}?stream=true")).text)
    assert text_of(replayed) == text_of(whole)
    assert [one.id for one in replayed][-2:] == [one.id for one in whole][-2:]
    assert replayed[-1] == whole[-1]
    for number in range(len(whole)):
        after = {"last-event-id": whole[number].id}
        rest = await http.post(path, json=body, headers=after)
        assert rest.headers["x-turnkeep-session"].endswith(" repeated")
        divided = events(rest.text)
        if path.endswith("responses"):
            assert divided == whole[number + 1 :]
        # Elsewhere the text that is left may come in one event.
        assert text_of(whole[: number + 1]) + text_of(divided) == text_of(whole)
        assert divided[-1:] == whole[number + 1 :][-1:]
        assert not {one.id for one in divided} & {one.id for one in whole[: number + 1]}
        if number % 10 == 0:
            assert events((await http.get(f"{path}/{answer_id}", headers=after)).text) == divided
    some = next(one for one in whole if one.text)  # an event has one token or, of a busy worker, several
    other = await http.post(path, json={**body, "temperature": 0.5}, headers={"last-event-id": some.id})
    assert other.status_code == 422
    gone = some.id.replace(answer_id, "0" * 48)
    assert (await http.post(path, json=body, headers={"last-event-id": gone})).status_code == 404
    assert (await http.delete(f"{path}/{answer_id}")).json()["deleted"]
    assert (await http.get(f"{path}/{answer_id}")).status_code == 404


async def test_an_answer_can_be_fetched_by_its_id_only_from_the_api_path_that_generated_the_answer(
    http: httpx2.AsyncClient,
) -> None:
    for path in PATHS:
        answer = (await post(http, path, {}, top_p=1, max_tokens=9)).json()
        assert (await http.get(f"{path}/{answer['id']}")).json() == answer
        for other in PATHS:
            found = await http.get(f"{other}/{answer['id']}")
            assert found.status_code == (200 if other == path else 404)
        assert not (await http.post(f"{path}/{answer['id']}/cancel")).json().get("is_running")


async def test_fetching_a_running_answer_by_its_id_waits_until_the_answer_has_ended(
    http: httpx2.AsyncClient, served: Any
) -> None:
    """Several clients may read the answer; one that disconnects does not end it."""
    body = asked(CHAT, 300, stream=True)
    key = {"idempotency-key": "watched"}
    async with http.stream("POST", CHAT, json=body, headers=key) as answer:
        begun = await read(answer, 5)
    answer_id = begun[0].id.partition(".")[0]
    async with http.stream("GET", f"{CHAT}/{answer_id}?stream=true") as watching:
        assert text_of(await read(watching, 5)).startswith(text_of(begun)[:3])
    waiting = asyncio.create_task(http.get(f"{CHAT}/{answer_id}"))
    async with http.stream("GET", f"{CHAT}/{answer_id}", headers={"last-event-id": begun[-1].id}) as more:
        rest = await read(more)
    assert (await waiting).status_code == 200, (await waiting).text
    text = (await waiting).json()["choices"][0]["message"]["content"]
    assert len(text) == 300
    assert text_of(begun) + text_of(rest) == text


async def test_an_answer_with_store_false_can_be_resumed_but_not_retrieved_or_continued_by_id(
    http: httpx2.AsyncClient,
) -> None:
    """The client resumes it by sending the same request again, with the id of its last event."""
    path = "/v1/responses"
    body = asked(path, stream=True, store=False)
    whole = events((await http.post(path, json=body)).text)
    rest = await http.post(path, json=body, headers={"last-event-id": whole[9].id})
    assert events(rest.text) == whole[10:]
    answer_id = whole[0].id.partition(".")[0]
    for more in ("", "?stream=true", "/stream", "/input_items"):
        assert (await http.get(f"{path}/resp_{answer_id}{more}")).status_code == 404
    previous = asked(path, previous_response_id=f"resp_{answer_id}")
    assert (await http.post(path, json=previous)).status_code == 400


async def test_a_stream_of_a_request_with_n_2_has_no_event_ids_and_cannot_be_fetched_later(
    http: httpx2.AsyncClient,
) -> None:
    several = events((await post(http, CHAT, {}, stream=True, n=2)).text)
    assert {one.id for one in several} == {""}
    answer_id = json.loads(several[0]["data"])["id"]
    assert (await http.get(f"{CHAT}/{answer_id}")).status_code == 404


async def ended(served: Any, answer_id: str, status: str = "incomplete") -> Any:
    async with asyncio.timeout(30):
        while (found := await served.openai.responses.retrieve(answer_id)).status == "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert found.status == status
    return found


def options(max_tokens: int, **more: Any) -> dict[str, Any]:
    extra = {"logit_bias": LETTERS}
    return {"model": "m", "max_output_tokens": max_tokens, "temperature": 0.9, "extra_body": extra, **more}


async def test_a_background_response_runs_without_a_client_connection_and_can_be_replayed_from_any_event(
    worker: Any, served: Any, door: Any
) -> None:
    create = served.openai.responses.create
    begun = await create(input="Begin.", background=True, instructions="Hm.", **options(200))
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    running = await served.openai.responses.retrieve(begun.id)
    assert running == begun
    replay = await served.openai.responses.retrieve(begun.id, stream=True)
    seen = [event async for event in replay]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    whole = await ended(served, begun.id)
    assert seen[-1].response == whole
    assert len(whole.output_text) == 200
    assert "".join(event.delta for event in seen if event.type.endswith("delta")) == whole.output_text
    other = await door(worker.settings.nats, worker.settings.prefix)
    for gateway in (served, other):
        for number in (-1, 3, 77, len(seen) - 2, len(seen) - 1):
            more = {} if number < 0 else {"starting_after": number}
            rest = await gateway.openai.responses.retrieve(begun.id, stream=True, **more)
            assert [event async for event in rest] == seen[number + 1 :]
    items = await served.openai.responses.input_items.list(begun.id)
    assert [(one.role, one.content[0].text) for one in items.data] == [("user", "Begin.")]


async def test_a_cancelled_background_response_stops_generating_and_has_the_status_cancelled(
    served: Any,
) -> None:
    endless = await served.openai.responses.create(input="Begin.", background=True, **options(30_000))
    with pytest.raises(openai.BadRequestError, match=f"{endless.id}' is in progress") as refused:
        await served.openai.responses.create(input="On.", previous_response_id=endless.id, **options(4))
    assert (refused.value.code, refused.value.param) == (None, "previous_response_id")
    cancelled = await served.openai.responses.cancel(endless.id)
    assert (await ended(served, endless.id, "cancelled")) == cancelled
    assert await served.openai.responses.cancel(endless.id) == cancelled
    for wrong in ("starting_after=x", f"starting_after={'9' * 5000}"):
        with pytest.raises(openai.BadRequestError, match="whole number"):
            await served.openai.get(f"/responses/{endless.id}?stream=true&{wrong}", cast_to=object)


async def test_a_failed_background_response_reports_its_error_when_fetched_and_when_streamed(
    served: Any,
) -> None:
    failed = await served.openai.responses.create(input="word " * 30_000, background=True, **options(8))
    found = await ended(served, failed.id, "failed")
    with pytest.raises(openai.BadRequestError, match=f"{failed.id}' has failed"):
        await served.openai.responses.create(input="On.", previous_response_id=failed.id, **options(4))
    assert "maximum context length" in found.error.message
    for more in ({}, {"starting_after": 1}, {"starting_after": 40}):
        stream = await served.openai.get(
            f"/responses/{failed.id}", options={"params": {"stream": "true", **more}}, cast_to=httpx2.Response
        )
        told = [json.loads(one["data"]) for one in events(stream.text)]
        first = more.get("starting_after", -1) + 1
        kinds = [one["type"] for one in told]
        assert kinds == [*["response.created", "response.in_progress"][first:], "response.failed", "error"]
        assert [one["sequence_number"] for one in told] == [*range(first, first + len(told))]


async def test_the_error_of_a_failed_answer_names_the_field_at_fault_as_the_api_of_the_request_spells_it(
    served: Any, http: httpx2.AsyncClient
) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "wat"}, "strict": True}
    begun = await served.openai.responses.create(
        input="Begin.", background=True, text={"format": form}, **options(4)
    )
    found = await ended(served, begun.id, "failed")
    assert found.error.message.startswith("text.format cannot be followed")
    durable = (await http.get(f"/v1/responses/{begun.id}/stream")).json()
    assert durable[-1]["error"]["param"] == "text.format"


@pytest.mark.parametrize(
    "is_late", [False, True], ids=["before the stream begins", "after the stream has begun"]
)
async def test_a_streaming_request_refused_by_a_log_without_space_returns_an_error_without_an_answer_id(
    worker: Any, served: Any, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """With an id, clients would look for an answer that is not in the log."""
    js = worker.app._nc.jetstream()
    log = (await js.stream_info(worker.client.subjects.log_stream)).config
    await js.update_stream(log.evolve(max_bytes=1))
    if is_late:  # the client has been told that there will be a stream
        monkeypatch.setattr(answer_response, "_PATIENCE_S", 0.0)
    answer = await post(http, "/v1/responses", {}, stream=True, background=True)
    says = why_refused(10077, "maximum bytes exceeded")
    assert "--log-max-bytes" in says
    if not is_late:
        assert (answer.status_code, answer.json()["error"]["message"]) == (429, says)
        return
    (told,) = [json.loads(one["data"]) for one in events(answer.text)]
    assert (told["type"], told["message"], told["sequence_number"]) == ("error", says, 0)


async def test_the_responses_api_counts_input_tokens_and_lists_input_items_in_pages(served: Any) -> None:
    first = await served.openai.responses.create(input="Begin.", **options(8))
    counted = await served.openai.responses.input_tokens.count(model="m", input="Begin.")
    assert counted.input_tokens == first.usage.input_tokens
    second = await served.openai.responses.create(input="Go on.", previous_response_id=first.id, **options(8))
    counted = await served.openai.responses.input_tokens.count(
        model="m", input="Go on.", previous_response_id=first.id
    )
    assert counted.input_tokens == second.usage.input_tokens
    page = await served.openai.responses.input_items.list(second.id, order="asc", limit=2)
    assert [one.content[0].text for one in page.data] == ["Begin.", first.output_text]
    assert page.has_more
    page = await served.openai.responses.input_items.list(second.id, order="asc", after=page.data[-1].id)
    assert [one.content[0].text for one in page.data] == ["Go on."]
    assert not page.has_more


@pytest.mark.parametrize("path", PATHS)
async def test_requests_with_the_same_idempotency_key_get_the_same_answer_from_any_gateway(
    worker: Any, door: Any, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Concurrently and later, even if the gateways' clocks differ. A changed body with the key is refused."""
    clock = SimpleNamespace(time=itertools.count(1_800_000_000, 10).__next__)
    monkeypatch.setattr(handlers, "time", clock)
    other = await door(worker.settings.nats, worker.settings.prefix)
    async with httpx2.AsyncClient(base_url=other.url, timeout=60) as there:
        key = {"idempotency-key": f"turn 1 {path}"}
        asking = [post(one, path, key) for one in (http, there, http, there)]
        bodies = [(await one).json() for one in asyncio.as_completed(asking)]
        bodies.append((await post(http, path, key)).json())
        assert all(one == bodies[0] for one in bodies)
        await asyncio.sleep(1.1)
        later = (await post(http, path, key)).json()
        assert later == (await there.get(f"{path}/{later['id']}")).json(), "all of it is recorded"
        assert (await post(http, path, key, max_tokens=39)).status_code == 422
        refused = await post(there, path, key, max_tokens=39)
        assert refused.status_code == 422
        assert "Idempotency-Key" in refused.json()["error"]["message"]
        assert (await post(http, path, {"idempotency-key": "turn 2"})).json()["id"] != bodies[0]["id"]
        assert (await post(http, path, {"idempotency-key": ""})).status_code == 400
    assert (await post(http, CHAT, {"idempotency-key": "n"}, n=2)).status_code == 400


async def test_of_two_simultaneous_requests_with_one_idempotency_key_only_one_starts_an_answer(
    served: Any, http: httpx2.AsyncClient
) -> None:
    key = {"idempotency-key": "at once"}
    answers = await asyncio.gather(*(post(http, CHAT, key) for _ in range(2)))
    assert sorted(one.headers["x-turnkeep-session"].split()[-1] for one in answers) == ["begun", "repeated"]


@pytest.mark.parametrize("knows", [False, True], ids=["one gateway knows the conversation", "both know it"])
async def test_two_gateways_give_one_answer_per_idempotency_key_even_if_only_one_knows_the_conversation(
    worker: Any, door: Any, served: Any, http: httpx2.AsyncClient, *, knows: bool
) -> None:
    """One gateway would begin a session, the other fork one; whichever is first, there is one answer."""
    other = await door(worker.settings.nats, worker.settings.prefix)
    async with httpx2.AsyncClient(base_url=other.url, timeout=60) as there:
        await post(there, CHAT, {}, max_tokens=2)  # it has read the log
        for number in range(3):
            said = [{"role": "user", "content": f"Begin {number}."}]
            first = (await http.post(CHAT, json=asked(CHAT, 8, messages=said))).json()["choices"][0][
                "message"
            ]
            said += [first, {"role": "user", "content": "Go on."}]
            if knows:  # by a turn of its own, from another place
                await there.post(CHAT, json=asked(CHAT, 8, messages=[*said[:1], first, said[0]]))
            body, key = asked(CHAT, 8, messages=said), {"idempotency-key": f"turn {number}"}
            asking = [one.post(CHAT, json=body, headers=key) for one in (there, http, there, http)]
            answers = [(await one).json() for one in asyncio.as_completed(asking)]
            assert len({one["id"] for one in answers}) == 1
            assert len({one["choices"][0]["message"]["content"] for one in answers}) == 1, answers
            said += [answers[0]["choices"][0]["message"], {"role": "user", "content": "More."}]
            more = await http.post(CHAT, json=asked(CHAT, 2, messages=said))
            assert not more.headers["x-turnkeep-session"].endswith("begun"), "its session is still known"


async def test_a_background_response_counts_towards_the_concurrent_request_limit_of_its_api_key(
    served: Any, tmp_path: Path
) -> None:
    """A request that has failed does not count."""
    (tmp_path / "keys").write_text("none default at_once=1\n")
    served.gateway.access.keys = Keys.read(tmp_path / "keys")
    create = served.openai.responses.create
    more = options(8, extra_headers={"Idempotency-Key": "long"})
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await create(input="word " * 30_000, **more)
    running = await create(input="Begin.", background=True, **options(30_000))
    with pytest.raises(openai.RateLimitError, match="1 requests at once"):
        await create(input="Hello.", **options(8))
    await served.openai.responses.cancel(running.id)
    async with asyncio.timeout(20):
        while True:
            with contextlib.suppress(openai.RateLimitError):
                await create(input="Hello.", **options(8))
                break
            await asyncio.sleep(0.1)


async def test_a_response_can_be_read_as_a_durable_stream_from_any_offset(
    served: Any, http: httpx2.AsyncClient
) -> None:
    """By single reads, by long polls, and as server-sent events."""
    begun = await served.openai.responses.create(input="Begin.", background=True, **options(200))
    path = f"/v1/responses/{begun.id}/stream"
    found, offset, closed = [], "-1", None
    while closed is None:
        page = await http.get(path, params={"offset": offset, "live": "long-poll"})
        assert page.status_code == 200
        found += page.json()
        offset, closed = page.headers["stream-next-offset"], page.headers.get("stream-closed")
    events_of = await served.openai.responses.retrieve(begun.id, stream=True)
    numbers = [event.sequence_number async for event in events_of]
    assert [one["sequence_number"] for one in found] == numbers
    assert (await http.get(path)).json() == found
    rest = await http.get(path, params={"offset": "0000000040"})
    assert (rest.json(), rest.headers["stream-closed"]) == (found[40:], "true")
    page = await http.get(path, headers={"origin": "http://localhost:3000"})
    assert "stream-next-offset" in page.headers["access-control-expose-headers"]
    end = await http.get(path, params={"offset": offset})
    assert (end.json(), end.headers["stream-next-offset"]) == ([], offset)
    end = await http.get(path, params={"offset": "now"})
    assert (end.json(), end.headers["stream-closed"]) == ([], "true")
    written = (await http.get(path, params={"offset": "0000000003", "live": "sse"})).text
    parts = [one.partition("\ndata: ") for one in written.strip().split("\n\n")]
    data = [json.loads(body) for name, _, body in parts if name == "event: data"]
    assert [event for batch in data for event in batch] == found[3:]
    assert json.loads(parts[-1][2]) == {"streamNextOffset": offset, "upToDate": True, "streamClosed": True}
    for wrong in ({"offset": "x"}, {"live": "yes"}):
        assert (await http.get(path, params=wrong)).status_code == 400


async def test_reading_the_durable_stream_of_a_running_response_returns_the_events_so_far_without_closing(
    served: Any, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.durable._POLL_S", 0.3)
    create = served.openai.responses.create
    running = await create(input="Begin.", background=True, **options(30_000))
    async with asyncio.timeout(10):
        page = await http.get(f"/v1/responses/{running.id}/stream")
    assert "stream-closed" not in page.headers
    assert page.headers["stream-up-to-date"] == "true"
    from_now = await http.get(f"/v1/responses/{running.id}/stream", params={"offset": "now"})
    assert (from_now.status_code, from_now.json()) == (200, [])
    at = from_now.headers["stream-next-offset"]
    assert int(at) >= int(page.headers["stream-next-offset"]) > 0
    later = await http.get(
        f"/v1/responses/{running.id}/stream", params={"offset": "now", "live": "long-poll"}
    )
    assert later.json()[0]["sequence_number"] >= int(at)
    far = {"offset": "0000999999", "live": "long-poll"}
    waited = await http.get(f"/v1/responses/{running.id}/stream", params=far)
    assert waited.status_code == 204
    await served.openai.responses.cancel(running.id)


async def test_the_durable_stream_of_a_response_stays_open_while_the_log_cannot_be_read(
    served: Any, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = await served.openai.responses.create(input="Begin.", background=True, **options(20))
    await ended(served, begun.id)
    path = f"/v1/responses/{begun.id}/stream"

    async def failing(*_: Any) -> Any:
        raise NoServerError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr("gateway.conversations.follow", failing)
        cut = await http.get(path, params={"live": "long-poll"})
        events_of = (await http.get(path, params={"live": "sse"})).text
    assert "stream-closed" not in cut.headers
    assert "streamClosed" not in events_of
    assert {one["type"] for one in cut.json()} == {"response.created", "response.in_progress"}
    offset = cut.headers["stream-next-offset"]
    rest = await http.get(path, params={"offset": offset})
    assert (rest.json()[-1]["type"], rest.headers["stream-closed"]) == ("response.incomplete", "true")


async def test_looking_up_an_idempotency_key_in_the_log_is_retried_after_a_lost_nats_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log has the request already, so an error would tell its client of a failure that is none."""
    errors: list[Exception] = [NoAnswerError("no leader"), NoServerError("the connection is lost")]

    async def note_of(*_: Any) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(logged_answers, "note_of", note_of)
    monkeypatch.setattr(idempotency, "FIRST_PAUSE_S", 0.0)
    client: Any = None
    note: Any = object()
    assert await idempotency.first_note(client, "s", "a", note) is note
    assert not errors


async def test_a_gateway_whose_nats_connection_was_closed_for_good_opens_a_new_one_for_the_next_request(
    served: Any, http: httpx2.AsyncClient
) -> None:
    """As if its credentials had expired, or a client's message had exceeded a limit of its account."""
    said = [{"role": "user", "content": "Begin."}]
    first = (await http.post(CHAT, json=asked(CHAT, 4, messages=said))).json()["choices"][0]["message"]
    client = served.gateway.connections._conversations["default", ""].client
    client._wire._nats._transport.write(b"NONSENSE\r\n")
    await until(lambda: client._wire.closed)
    said += [first, {"role": "user", "content": "Go on."}]
    answer = await http.post(CHAT, json=asked(CHAT, 4, messages=said))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-turnkeep-session"].endswith(" continued")


async def test_repeating_a_request_under_the_idempotency_key_of_a_cancelled_answer_returns_an_error(
    http: httpx2.AsyncClient,
) -> None:
    """A part would look like the whole answer."""
    body, key = asked(CHAT, 30_000, stream=True), {"idempotency-key": "stopped"}
    async with http.stream("POST", CHAT, json=body, headers=key) as answer:
        begun = await read(answer, 5)
    path = f"{CHAT}/{begun[0].id.partition('.')[0]}"
    assert (await http.post(f"{path}/cancel")).json()["is_running"] is False
    found = await http.get(path)
    assert (found.status_code, found.json()["error"]["code"]) == (409, "cancelled")
    assert "by a request" in found.json()["error"]["message"], "it had a key"
    again = events((await http.post(CHAT, json=body, headers=key)).text)
    error = json.loads(again[-1]["data"])["error"]
    assert (error["code"], "Idempotency-Key of its own" in error["message"]) == ("cancelled", True)


async def test_an_answer_stream_ends_with_an_error_if_nats_closes_the_gateways_connection_for_good(
    served: Any, http: httpx2.AsyncClient
) -> None:
    async with http.stream("POST", CHAT, json=asked(CHAT, 30_000, stream=True)) as answer:
        transport = served.gateway.connections._conversations["default", ""].client._wire._nats._transport
        asyncio.get_running_loop().call_later(0.5, transport.write, b"NONSENSE\r\n")
        told = await read(answer)
    error = json.loads(told[-1]["data"])["error"]
    assert (error["code"], "was closed" in error["message"]) == ("no_worker", True), error
