"""Sessions with images: as durable, exact and separate as those of text; with a tiny model that sees."""

import asyncio
import hashlib
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from ops.log import session_file
from ops.log.importing import Import
from ops.log.verifying import verify
from tests.device import tiny_seeing
from tests.parts import LocalWorker
from turnkeep_client import image
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.images import files_of, images_of
from turnkeep_client.messages import Generated
from turnkeep_client.session import Session
from turnkeep_client.session_log import read

StartWorker = Callable[..., Awaitable[LocalWorker]]

TEMPLATE = (
    "{% for one in messages %}{{ one.role }}: {% if one.content is string %}{{ one.content }}{% else %}"
    "{% for part in one.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
RED, BLUE = tiny_seeing.picture(1), tiny_seeing.picture(2)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "seeing"
    tiny_seeing.write("smolvlm", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees an image as a whole; its template writes an image by another token."""
    folder = tmp_path_factory.mktemp("models") / "joint"
    tiny_seeing.write("gemma3", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", "<start_of_image>"))
    return folder


@pytest.fixture(scope="module")
def blind(seeing: Path) -> Path:
    """The same language model and tokenizer, without the files that images need."""
    folder = shutil.copytree(seeing, seeing.with_name("blind"))
    (folder / "preprocessor_config.json").unlink()
    return folder


async def ask(session: Session, *parts: str | bytes, **more: Any) -> Generated:
    said = [image(one) if isinstance(one, bytes) else {"type": "text", "text": one} for one in parts]
    return await session.generate(messages=[{"role": "user", "content": said}], **{"max_tokens": 6, **more})


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_the_same_question_about_an_image_gets_the_same_answer_after_questions_about_other_images(
    local_worker: StartWorker, seeing: Path
) -> None:
    """The same text with pictures A, B, A, one after the other; those of the same session's history too."""
    client = (await local_worker(model=str(seeing))).client
    first = [await ask(client.session(f"s{at}"), "what ", one) for at, one in enumerate((RED, BLUE, RED))]
    assert first[0].tokens == first[2].tokens != first[1].tokens
    second = [await ask(client.session(f"s{at}"), "and ", BLUE, RED) for at in range(3)]
    assert second[0].tokens == second[2].tokens
    assert second[0].rewritten_from is None
    assert second[0].usage.cached_tokens == first[0].position - 1
    assert len({one.change.images[0].fingerprint for one in (*first, *second)}) == 2


async def test_a_forked_session_keeps_the_images_of_its_parent_after_the_parent_is_closed_with_forget(
    local_worker: StartWorker, seeing: Path
) -> None:
    worker = await local_worker(model=str(seeing), snapshots="off")
    parent = worker.client.session("parent")
    await ask(parent, "what ", RED)
    fork = await parent.fork("fork")
    twin = await parent.fork("twin")
    wanted = await ask(twin, "so")
    await parent.close(forget=True)
    await twin.close(forget=True)
    await worker.stop()
    worker = await local_worker(model=str(seeing), snapshots="off")
    fork = worker.client.session("fork")
    assert (await ask(fork, "so")).tokens == wanted.tokens
    assert await fork.image(digest(RED)) == RED


async def test_close_with_forget_removes_the_sessions_images_from_the_log_and_the_images_can_be_sent_again(
    local_worker: StartWorker, seeing: Path
) -> None:
    client = (await local_worker(model=str(seeing))).client
    session = client.session("s")
    first = await ask(session, "what ", RED)
    for forget in (False, True):
        await session.close(forget=forget)
        await session.open()
        assert (await ask(session, "what ", RED)).tokens == first.tokens
        assert await session.image(digest(RED)) == RED
    entries = []
    for _ in range(50):
        entries = [one.seq async for _, one in client.stored.every(session.key, "image.*")]
        if len(entries) == 1:
            break
        await asyncio.sleep(0.1)
    assert len(entries) == 1, "only the one that was stored after the session was forgotten"
    assert await session.image(digest(RED)) == RED


async def test_a_session_with_images_can_be_exported_imported_and_verified(
    local_worker: StartWorker, seeing: Path, tmp_path: Path
) -> None:
    client = (await local_worker(model=str(seeing), snapshots="off")).client
    session = client.session("s")
    await ask(session, "what ", RED)
    await session.fork("fork")
    await ask(client.session("fork"), BLUE)
    for name in ("s", "fork"):
        log = await read(client.stored, client.session(name).key)
        session_file.export(tmp_path / name, log, await session_file.read_parts(client, log))
        _, lines = session_file.read(tmp_path / name)
        await Import(client, client.session(f"{name}-copy").key).run(lines, lambda *_: None)
        answers = [await ask(client.session(one), "so") for one in (name, f"{name}-copy")]
        assert answers[0].tokens == answers[1].tokens
    assert (await verify(client)).damaged == ()
    (entry,) = [one.seq async for _, one in client.stored.every(session.key, "image.*")]
    await client.stored.delete(entry)
    (damaged,) = (await verify(client)).damaged
    why = f"names the image {digest(RED)}, which is gone or changed"
    assert (damaged.session, [one.what for one in damaged.faults]) == ("s", [why])


async def test_an_image_token_that_the_model_samples_is_not_treated_as_an_image(
    local_worker: StartWorker, seeing: Path
) -> None:
    client = (await local_worker(model=str(seeing))).client
    token = Tokenizer.from_file(str(seeing / "tokenizer.json")).token_to_id("<image>")
    session = client.session("s")
    answer = await ask(session, "what ", RED, logit_bias={token: 100}, max_tokens=2)
    assert answer.tokens == (token, token)
    assert [one.digest for one in (await ask(session, "so ", BLUE)).change.images] == [digest(BLUE)]


async def test_a_session_rewound_into_an_image_and_its_fork_after_a_restart_get_the_same_answer(
    local_worker: StartWorker, seeing: Path
) -> None:
    worker = await local_worker(model=str(seeing), snapshots="off")
    session = worker.client.session("s")
    first = await ask(session, "what ", RED, " is this")
    (placed,) = first.change.images
    await session.rewind(placed.start + 2)
    twin = await session.fork("twin")
    wanted = await ask(session, "so ", BLUE)
    await worker.stop()
    worker = await local_worker(model=str(seeing), snapshots="off")
    twin = worker.client.session("twin")
    found = await ask(twin, "so ", BLUE)
    assert (found.tokens, found.position) == (wanted.tokens, wanted.position)


async def test_a_rewind_or_fork_inside_an_image_is_refused_if_the_model_encodes_images_only_as_a_whole(
    local_worker: StartWorker, joint: Path
) -> None:
    client = (await local_worker(model=str(joint))).client
    session = client.session("s")
    first = await ask(session, "what ", RED, " is this")
    (placed,) = first.change.images
    for position in (placed.start + 1, placed.end - 1):
        for cut in (session.rewind(position), session.fork("fork", position=position)):
            with pytest.raises(RequestFailedError, match=f"inside an image.*{placed.start} or {placed.end}"):
                await cut
    for position in (placed.end, placed.start):
        await session.rewind(position)
        other = await session.fork(f"other-{position}")
        assert (await ask(session, "so ", BLUE)).tokens == (await ask(other, "so ", BLUE)).tokens


async def test_a_request_with_an_unstored_or_truncated_image_fails_and_the_next_request_is_answered(
    local_worker: StartWorker, seeing: Path
) -> None:
    client = (await local_worker(model=str(seeing))).client
    session = client.session("s")
    text = {"type": "text", "text": "what is "}
    missing = {"type": "image", "digest": "0" * 64}
    for part, why in ((missing, "the log has no image 0000"), (image(RED[:99]), "is broken or truncated")):
        with pytest.raises(RequestFailedError, match=why) as caught:
            await session.generate(messages=[{"role": "user", "content": [text, part]}])
        assert (caught.value.code, caught.value.field) == ("invalid_request", "messages[0].content[1]")
    assert (await ask(session, "what is ", RED)).tokens


async def test_an_image_sent_inside_a_request_is_stored_separately_and_replaced_by_its_digest_in_the_log(
    local_worker: StartWorker, seeing: Path
) -> None:
    client = (await local_worker(model=str(seeing))).client
    content = [{"type": "text", "text": "what is "}, image(RED)]
    body = {
        "type": "generate",
        "id": "a",
        "max_tokens": 6,
        "messages": [{"role": "user", "content": content}],
    }
    subject = client.subjects.of(client.session("raw").key, "ask")
    reply = json.loads(await client._wire.ask(subject, json.dumps(body).encode(), 20))
    assert tuple(reply["tokens"]) == (await ask(client.session("s"), "what is ", RED)).tokens
    assert await client.session("raw").image(digest(RED)) == RED
    (turn,) = (await client.session("raw").history()).turns
    assert turn.messages[0].content == (content[0], {"type": "image", "digest": digest(RED)})
    queued = client.subjects.of(client.session("queued").key, "in")
    await client._wire.publish(queued, json.dumps({**body, "id": "b"}).encode())
    assert (await ask(client.session("queued"), "so")).change.images == ()
    (_, asked), *_ = (await read(client.stored, client.session("queued").key)).asked
    assert (images_of(asked), files_of(asked)) == ([digest(RED)], {})
    assert await client.session("queued").image(digest(RED)) == RED
    counted = await client.session("raw").count(messages=[{"role": "user", "content": content}])
    assert counted.position == (await ask(client.session("raw"), "what is ", RED, max_tokens=0)).position


async def test_a_text_model_gets_a_placeholder_for_an_image_and_a_vision_model_later_gets_the_image(
    local_worker: StartWorker, seeing: Path, blind: Path
) -> None:
    worker = await local_worker(model=str(blind))
    session = worker.client.session("s")
    told = await ask(session, "what is ", RED)
    assert told.warnings == ("messages[0].content[1]: image replaced by a placeholder",)
    assert told.change.images == ()
    assert not (await worker.client.worker_metrics()).vision
    await worker.stop()
    worker = await local_worker(model=str(seeing))
    assert (await worker.client.worker_metrics()).vision
    session = worker.client.session("s")
    seen = await ask(session, "so")
    assert [one.digest for one in seen.change.images] == [digest(RED)]
    assert seen.rewritten_from == 0
    await worker.stop()
    worker = await local_worker(model=str(blind))
    assert (await ask(worker.client.session("s"), "so")).change.images == ()
