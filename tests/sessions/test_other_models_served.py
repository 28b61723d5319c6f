"""A worker with another model serves the sessions of one that was stopped, or killed in an answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from cache.names.tokens import from_compact
from tests.commands.command_runs import command, where
from tests.parts import CHAT_TEMPLATE, make_tiny_model
from turnkeep_client.client import Client, connect
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import Generated, Opened, decode_result
from turnkeep_client.session import Session

#: So that answers are text which another tokenizer has too.
LETTERS = {str(token): 100 for token in range(68, 90)}
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logit_bias": LETTERS}
ENDLESS = {"policy": "sink_window", "sink": 2, "window": 64}


@pytest.fixture(scope="module")
def tuned(endless_model: Path) -> Path:
    """The model `endless_model` with other weights."""
    folder = endless_model.with_name("tuned")
    if not folder.exists():
        shutil.copytree(endless_model, folder)
        weights = mx.load(str(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        mx.save_safetensors(
            str(folder / "model.safetensors"), {name: one * 1.5 for name, one in weights.items()}
        )
    return folder


@pytest.fixture(scope="module")
def retokenised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with another tokenizer, which makes fewer tokens of the same text."""
    merges = [("u", "s"), ("us", "e"), ("use", "r"), ("a", "s"), ("as", "s"), ("ass", "i"), ("assi", "s")]
    return make_tiny_model(tmp_path_factory.mktemp("models") / "retokenised", merges=merges)


@pytest.fixture
def other_model(endless_model: Path, tuned: Path, retokenised: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Return a model of which one thing differs from `endless_model`: template, weights or tokenizer."""

    def make(change: str) -> Path:
        if change == "template":
            folder = shutil.copytree(endless_model, tmp_path / "corrected")
            template = CHAT_TEMPLATE.replace("<|im_end|>", "|").replace("<|im_start|>", "<|im_start|>the ")
            (folder / "chat_template.jinja").write_text(template)
            return folder
        return {"weights": tuned, "tokenizer": retokenised}[change]

    return make


async def ask(session: Session, text: str, **more: Any) -> Generated:
    said = [{"role": "user", "content": text}]
    return await session.generate(messages=said, **(OPTIONS | more))


async def said(session: Session) -> list[tuple[str, object]]:
    return [(one.role, one.content) for one in (await session.history()).messages]


async def tokens_of(client: Client, name: str) -> tuple[int, ...]:
    """Return a session's tokens before its last answer, as its results and its parent's have them."""
    tokens: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    for entry in await client.log(name):
        match decode_result(entry.body) if entry.kind == "out" else None:
            case Opened(parent=parent, position=position) if parent is not None:
                of = await tokens_of(client, parent.session)
                last = decode_result((await client.log(parent.session))[-1].body)
                tokens = (*of, *last.tokens)[:position]
            case Generated(change=change) as result:
                tokens = (*(*tokens, *answer)[: change.kept], *from_compact(change.input))
                answer = result.tokens
    return tokens


@pytest.mark.parametrize("change", ["template", "weights", "tokenizer"])
async def test_forks_and_endless_sessions_continue_with_another_model_as_if_it_had_read_them_itself(
    local_worker: Callable[..., Any], endless_model: Path, other_model: Callable[[str], Path], change: str
) -> None:
    """A fork may be made before the change, after it, or after its parent went on with the other model."""
    worker = await local_worker(model=str(endless_model))
    parent = worker.client.session("parent")
    first, second = await ask(parent, "One"), await ask(parent, "user " * 20)
    await parent.fork("early", first.position)
    await worker.client.session("endless", cache=ENDLESS).open()
    long = [await ask(worker.client.session("endless"), str(number) * 20) for number in range(4)]
    assert long[-1].visible_from
    await worker.stop()

    worker = await local_worker(model=str(other_model(change)))
    client = worker.client
    await client.session("parent").fork("late", first.position)
    results = {
        name: await ask(client.session(name), "Three") for name in ("early", "late", "parent", "endless")
    }
    await client.session("parent").fork("child")
    results["child"] = await ask(client.session("child"), "Four")
    one = [("user", "One"), ("assistant", first.text)]
    both = [*one, ("user", "user " * 20), ("assistant", second.text)]
    before = {"early": one, "late": one, "parent": both, "endless": []}
    before["endless"] = [
        said for i, answer in enumerate(long) for said in (("user", str(i) * 20), ("assistant", answer.text))
    ]
    before["child"] = [*both, ("user", "Three"), ("assistant", results["parent"].text)]
    async with await connect(worker.settings.nats, prefix=worker.settings.prefix, tenant="alone") as alone:
        for name, result in results.items():
            is_first = name != "child"
            assert result.previous_model == (first.model if is_first and change != "template" else None), name
            assert result.rewritten_from == (0 if is_first and change == "tokenizer" else None), name
            asked = "Three" if is_first else "Four"
            assert await said(client.session(name)) == [
                *before[name],
                ("user", asked),
                ("assistant", result.text),
            ], name
            again = alone.session(name, cache=ENDLESS if name == "endless" else None)
            prompt = await tokens_of(client, name)
            fresh = await again.generate(tokens=prompt, **OPTIONS)
            assert fresh.tokens == result.tokens, name
    await worker.stop()

    worker = await local_worker(model=worker.settings.model)
    for name, result in results.items():
        again = await ask(worker.client.session(name), "Five")
        assert (again.model, again.previous_model, again.rewritten_from) == (result.model, None, None)
    verified = await command("sessions", "--verify", *where(worker))
    assert verified.returncode == 0, verified.stdout


async def test_a_session_of_two_models_can_be_copied_and_a_refused_one_read_and_continued_elsewhere(
    local_worker: Callable[..., Any], endless_model: Path, retokenised: Path, tmp_path: Path
) -> None:
    """The other model has another tokenizer, so it refuses a session some of which was given as token ids."""
    worker = await local_worker(model=str(endless_model))
    first = await ask(worker.client.session("spoken"), "One")
    await worker.client.session("ids").append(tokens=[40, 41, 42])
    told = await ask(worker.client.session("ids"), "One")
    await worker.stop()
    worker = await local_worker(model=str(retokenised))
    spoken, ids = (worker.client.session(name) for name in ("spoken", "ids"))
    await ask(spoken, "Two")
    with pytest.raises(RequestFailedError, match="whose tokenizer is another one"):
        await ask(ids, "Two")
    history = await ids.history()
    assert (await said(ids), history.position) == ([("user", "One"), ("assistant", told.text)], told.position)
    shown = (await command("show", "ids", *where(worker))).stdout
    for part in (
        "3 tokens by their ids",
        told.text,
        "history_diverged: the session was begun with endless, ",
    ):
        assert part in shown
    files = {name: tmp_path / f"{name}.turnkeep" for name in ("spoken", "ids")}
    for name, file in files.items():
        assert (await command("export", name, file, *where(worker))).returncode == 0
    for original, model in ((spoken, retokenised), (ids, endless_model)):
        name = original.key.session
        place = await local_worker(
            prefix=f"{name}{tmp_path.name}", data_dir=tmp_path / name, model=str(model)
        )
        done = await command("import", files[name], *where(place))
        assert done.returncode == 0, done.stderr
        copy = place.client.session(name)
        before = await copy.history()
        assert before.messages == (await original.history()).messages
        answer = await ask(copy, "Three")
        assert (answer.previous_model, answer.rewritten_from) == (None, None)
        models = [turn.answer.model for turn in before.turns if turn.answer]
        assert models == ([first.model, answer.model] if original is spoken else [answer.model])
        if original is spoken:
            assert (await ask(spoken, "Three")).tokens == answer.tokens
