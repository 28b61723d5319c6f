"""Conversations with images through the gateway, with a model that sees and with one that does not."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from apis import APIS
from test_image_requests import body, digest, said

from tests.device import tiny_seeing
from tests.model.test_image_files import BROKEN
from turnkeep_client.images import images_in

Start = Any
RED, BLUE = tiny_seeing.picture(1), tiny_seeing.picture(2)
TEMPLATE = (
    "{% for one in messages %}{{ one.role }}: {% if one.content is string %}{{ one.content }}{% else %}"
    "{% for part in one.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PLAIN = {"logit_bias": {str(token): 100 for token in range(97, 100)}}


class Served:
    """A gateway, an HTTP client for it, and its worker."""

    def __init__(self, door: Any, http: httpx2.AsyncClient, worker: Any) -> None:
        self.door = door
        self.http = http
        self.worker = worker

    async def images(self, session: str) -> list[str]:
        """Return the digests of all images in a session's conversation."""
        messages = (await self.worker.client.session(session).history()).messages
        return [one for message in messages for one in images_in(message.content)]

    async def num_stored(self, session: str) -> int:
        """Return how many entries of images a session has in the log."""
        found = await self.worker.client.stored.subjects("default", session)
        return sum(kinds.get("image", 0) for kinds in found.values())


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "seeing"
    tiny_seeing.write("smolvlm", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def served(
    request: pytest.FixtureRequest, local_worker: Start, door: Start, seeing: Path
) -> AsyncIterator[Served]:
    """A gateway for a worker whose model sees, or for one whose model does not."""
    model = {"model": str(seeing)} if getattr(request, "param", True) else {}
    worker = await local_worker(**model)
    started = await door(worker.settings.nats, worker.settings.prefix)
    async with httpx2.AsyncClient(base_url=started.url, timeout=60) as http:
        yield Served(started, http, worker)


TYPES = {"chat": "image_url", "messages": "image", "responses": "input_image", "ollama": "image"}
BOTH = pytest.mark.parametrize("served", [True, False], indirect=True, ids=["vision model", "text model"])


@pytest.mark.parametrize(
    ("dialect", "served"), [*((name, True) for name in APIS), ("chat", False)], indirect=["served"]
)
async def test_a_conversation_with_images_continues_in_its_session_and_the_log_stores_each_image_once(
    dialect: str, served: Served
) -> None:
    told = [said(dialect, "What is it? ", RED)]
    first = await served.http.post(APIS[dialect].path, json=body(dialect, told))
    assert first.status_code == 200, first.text
    told += [*APIS[dialect].said(first.json()), said(dialect, "And these? ", BLUE, RED)]
    second = await served.http.post(APIS[dialect].path, json=body(dialect, told))
    name = first.headers["x-turnkeep-session"].split()[0]
    assert second.headers["x-turnkeep-session"] == f"{name} continued"
    assert await served.images(name) == [digest(RED), digest(BLUE), digest(RED)]
    assert await served.num_stored(name) == 2
    assert await served.worker.client.session(name).image(digest(BLUE)) == BLUE
    where, places = "input" if dialect == "responses" else "messages", "content"
    first_place = 1
    if dialect == "ollama":
        places, first_place = "images", 0
    warning = f"{where}[0].{places}[{first_place}]: {TYPES[dialect]} replaced by a placeholder"
    if await sees(served):
        assert "x-turnkeep-warnings" not in {*first.headers, *second.headers}
    else:
        assert first.headers["x-turnkeep-warnings"] == warning
        assert second.headers["x-turnkeep-warnings"].count("placeholder") == 3

    told[0] = said(dialect, "What is it? ", BLUE)
    other = await served.http.post(APIS[dialect].path, json=body(dialect, told))
    assert other.headers["x-turnkeep-session"].endswith(" begun"), "the same words about another picture"


async def sees(served: Served) -> bool:
    return bool((await served.worker.client.worker_metrics()).vision)


@BOTH
async def test_the_model_list_of_each_api_shows_whether_a_model_accepts_images(served: Served) -> None:
    has = await sees(served)
    (listed,) = (await served.http.get("/v1/models")).json()["data"]
    shown = (await served.http.post("/api/show", json={"model": "m"})).json()
    (studio,) = (await served.http.get("/api/v0/models")).json()["data"]
    assert (listed["vision"], "vision" in shown["capabilities"]) == (has, has)
    assert studio["type"] == ("vlm" if has else "llm")


async def test_a_token_count_includes_the_tokens_of_images_and_leaves_nothing_in_the_log(
    served: Served,
) -> None:
    counts = []
    for images in ((), (RED,), (RED, BLUE)):
        asked = body("messages", [said("messages", "What? ", *images)])
        counts.append(
            (await served.http.post("/v1/messages/count_tokens", json=asked)).json()["input_tokens"]
        )
    assert counts[0] < counts[1] < counts[2]
    answer = await served.http.post(
        APIS["messages"].path, json=body("messages", [said("messages", "What? ", RED)])
    )
    used = answer.json()["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == counts[1]
    name = answer.headers["x-turnkeep-session"].split()[0]
    async with asyncio.timeout(10):
        while await served.num_stored("*") > 1:  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.05)
    assert await served.num_stored(name) == 1


async def test_continuing_a_previous_response_with_an_image_keeps_the_image_in_a_fork_and_in_a_new_session(
    served: Served,
) -> None:
    more: dict[str, Any] = {"store": True, **PLAIN}
    path = APIS["responses"].path
    first = await served.http.post(path, json=body("responses", [said("responses", "See. ", RED)], **more))
    own = first.json()["id"]
    items = (await served.http.get(f"{path}/{own}/input_items")).json()["data"]
    assert items[0]["content"][1] == {"type": "input_image", "detail": "auto", "file_id": digest(RED)}
    sessions = []
    for text in ("One.", "Two."):
        asked = body("responses", [said("responses", text)], previous_response_id=own, **more)
        answer = await served.http.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        sessions.append(answer.headers["x-turnkeep-session"].split())
    assert [how for _, how in sessions] == ["continued", "forked"]
    for session in list(served.door.index.sessions.values()):  # as if another gateway had begun it
        served.door.index.drop(session)
    asked = body("responses", [said("responses", "Three.")], previous_response_id=own, **more)
    answer = await served.http.post(path, json=asked)
    name, how = answer.headers["x-turnkeep-session"].split()
    assert how == "begun"
    assert await served.worker.client.session(name).image(digest(RED)) == RED


async def test_compacting_a_conversation_keeps_the_images_of_the_user_messages(served: Served) -> None:
    told = [said("responses", "See. ", RED)]
    compacted = await served.http.post("/v1/responses/compact", json={"input": told, "max_output_tokens": 4})
    assert compacted.status_code == 200, compacted.text
    (kept, *_) = compacted.json()["output"]
    url = f"data:image/png;base64,{b64encode(RED).decode()}"
    assert kept["content"][1] == {"type": "input_image", "detail": "auto", "image_url": url}
    again = await served.http.post(
        APIS["responses"].path,
        json=body("responses", [*compacted.json()["output"], said("responses", "And?")]),
    )
    assert again.status_code == 200, again.text
    assert await served.images(again.headers["x-turnkeep-session"].split()[0]) == [digest(RED)]


async def test_a_conversation_with_a_damaged_image_is_refused_and_the_next_request_answered(
    served: Served,
) -> None:
    """It is refused in a sentence, and the request behind it answered."""
    for name, make in [*BROKEN.items()][::5]:
        answer = await served.http.post(APIS["chat"].path, json=body("chat", [said("chat", "See: ", make())]))
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert error["param"].startswith("messages[0].content[1]"), name
        assert "image" in error["message"], (name, error)
        good = await served.http.post(APIS["chat"].path, json=body("chat", [said("chat", "See: ", RED)]))
        assert good.status_code == 200, name


async def test_the_error_for_a_broken_image_in_a_later_turn_has_the_number_of_its_message_in_the_conversation(
    served: Served,
) -> None:
    broken = RED[:40]  # only the worker finds that out
    for api, param in (("chat", "messages[2].content[1]"), ("responses", "input")):
        told = [said(api, "See: ", RED)]
        answer = await served.http.post(APIS[api].path, json=body(api, told))
        told += [*APIS[api].said(answer.json()), said(api, "And: ", broken)]
        refused = await served.http.post(APIS[api].path, json=body(api, told))
        assert refused.headers["x-turnkeep-session"].split()[1] == "continued"
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
