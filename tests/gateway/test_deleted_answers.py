"""What a client has deleted, or left, is over: no later request shows it, nothing of it stays or goes on."""

import asyncio
from base64 import b64encode
from typing import Any

import httpx2
import pytest
from crafted import LETTERS
from parts import png, until
from test_coming_back import PATHS, asked, events, text_of

from gateway.idempotency import id_of, state_of
from gateway.index import PREFIX, tags
from turnkeep_client.requests import ForkPoint

pytestmark = pytest.mark.serves("endless_model")


def written(answer: httpx2.Response) -> str:
    """Return an answer's text, streamed or not."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert '"error":{' not in answer.text, answer.text
        return text_of(events(answer.text))
    body = answer.json()
    if "choices" in body:
        (choice,) = body["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    content = body["content"] if "content" in body else body["output"][-1]["content"]
    return "".join(part["text"] for part in content)


@pytest.mark.parametrize(("path", "stream"), [*zip(PATHS, (True, False, True, False), strict=True)])
async def test_a_request_under_the_idempotency_key_of_a_deleted_answer_generates_a_new_answer(
    gateway: Any, path: str, stream: bool
) -> None:
    gateways = [await gateway(), await gateway()]
    clients = [httpx2.AsyncClient(base_url=one.url, timeout=60) for one in gateways]
    body, key = asked(path, 12, stream=stream), {"Idempotency-Key": "again"}
    seen = list[str]()
    for number in range(4):
        first, second = clients[number % 2], clients[1 - number % 2]
        answer = await first.post(path, json=body, headers=key)
        seen.append(written(answer))
        assert written(await second.post(path, json=body, headers=key)) == seen[-1]
        deleted = await second.delete(f"{path}/{answer.headers['x-request-id']}")
        assert deleted.json()["deleted"], deleted.text
    assert len({*seen}) == 4, "each answer was sampled"
    several = await asyncio.gather(*(one.post(path, json=body, headers=key) for one in 2 * clients))
    assert len({written(one) for one in several} - {*seen}) == 1
    for one in clients:
        await one.aclose()


async def test_a_fork_opened_for_an_idempotency_key_is_no_longer_found_after_its_session_is_closed(
    worker: Any,
) -> None:
    answer_id, client = id_of("again"), worker.client
    appended = await client.session("parent").append(text="x")
    session = client.session(PREFIX + answer_id[:32])
    await session.open(fork_of=ForkPoint("parent"), tags=tags(b"base"))
    state = await state_of(client, answer_id, "")
    assert (state.opened, state.closed_seq) == ((b"base", appended.position), 0)
    await session.close()
    state = await state_of(client, answer_id, "")
    assert (state.opened, state.closed_seq > 0) == (None, True)


_REFUSING = """{% for one in messages %}{% if one.content is string and 'boom' in one.content %}
{{ raise_exception('no boom') }}{% endif %}{{ one.content }}{% endfor %}"""


async def test_a_refused_request_to_count_tokens_leaves_no_image_in_the_log(
    local_worker: Any, door: Any, model_with_template: Any
) -> None:
    worker = await local_worker(model=str(model_with_template("refusing", _REFUSING)))
    served = await door(worker.settings.nats, worker.settings.prefix)
    client = worker.client
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(png(1)).decode()}
    image = {"role": "user", "content": [{"type": "image", "source": source}]}
    counting = {"messages": [image, {"role": "user", "content": "boom"}]}
    answer = await served.http.post("/v1/messages/count_tokens", json=counting)
    assert (answer.status_code, "no boom" in answer.text) == (400, True), answer.text

    async def has_images() -> bool:
        kinds = (await client.stored.subjects(client.tenant)).values()
        return any("image" in one for one in kinds)

    async with asyncio.timeout(20):
        while await has_images():  # noqa: ASYNC110  # the log signals nobody
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("prompts", [["a", "a"], ["a", "b", "a"]])
async def test_all_answers_of_a_request_with_equal_prompts_are_cancelled_when_the_client_disconnects(
    served: Any, http: httpx2.AsyncClient, prompts: list[str]
) -> None:
    def num_running() -> int:
        return sum(one.num_running for one in served.index.sessions.values())

    body = {"prompt": prompts, "max_tokens": 8000, "temperature": 0, "logit_bias": LETTERS, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for part in answer.aiter_text():
            if '"index":0' in part:
                break
        assert num_running()
    async with asyncio.timeout(3):
        await until(lambda: not num_running())
