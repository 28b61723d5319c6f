"""A session continues under another template, weights or tokenizer, or is refused with the reason."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from session_world import OPERATIONS, AnswerChunks, World, live

from cache.names.policy import Policy
from cache.names.tokens import from_compact
from tests.commands.command_runs import command, where
from tests.parts import make_tiny_model
from turnkeep_client.client import Client, connect
from turnkeep_client.messages import (
    Append,
    Chunk,
    Failed,
    Generate,
    Generated,
    Message,
    Model,
    Opened,
    Rewind,
    decode_result,
)
from turnkeep_client.session import Session
from worker.models.tokenizer import Tokenizer
from worker.sessions import record
from worker.wire.chunks import PublishedChunks

#: A template with other markers than the tiny model's, which trims contents.
OTHER_TEMPLATE = (
    "{% for m in messages %}<|im_start|>[{{ m.role }}] {{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def corrected(model_with_template: Callable[[str, str], Path]) -> Tokenizer:
    """The tiny model's tokenizer with another chat template."""
    return Tokenizer.from_folder(model_with_template("corrected", OTHER_TEMPLATE))


@pytest.fixture(scope="module")
def foreign(packaged_folder: Path) -> Tokenizer:
    """The packaged model's tokenizer and chat template."""
    return Tokenizer.from_folder(packaged_folder)


def asks(number: int, text: str = "so?", **more: Any) -> Generate:
    return Generate(
        id=f"q{number}",
        messages=(Message(role="user", content=text),),
        **{"max_tokens": 4, "ignore_eos": True, **more},
    )


def text_of(world: World) -> str:
    return world._tokenizer.decode(world.session.history.tokens)


@given(operations=OPERATIONS)
def test_a_session_served_by_several_models_has_the_same_state_read_from_its_log_as_in_memory(
    tokenizer: Tokenizer, corrected: Tokenizer, foreign: Tokenizer, operations: list[tuple[str, Any]]
) -> None:
    """Templates, weights and tokenizers change between random requests, with checkpoints and without."""
    for every in (2, 10_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(record, "_CHECKPOINT_EVERY", every)
            asyncio.run(live(World(tokenizer, others=(corrected, foreign)), operations))


async def test_a_session_keeps_its_earlier_tokens_after_a_change_of_the_chat_template(
    world: World, corrected: Tokenizer
) -> None:
    """Earlier tokens stay; new messages are rendered by the new template."""
    for number in range(3):
        await world.ask(asks(number))
    before = world.session.history.tokens
    world.serve(corrected)
    result = await world.ask(asks(3, "and now?"))
    assert result.rewritten_from is None
    assert result.previous_model is None
    assert world.session.history.tokens[: len(before)] == before
    added = world._tokenizer.decode(world.session.history.tokens.ids(len(before)))
    assert added.startswith("<|im_end|><|im_start|>[user] and now?<|im_end|><|im_start|>[assistant] ")
    await world.assert_fold_is_life()


async def test_the_first_result_of_a_session_after_a_change_of_weights_names_the_previous_model(
    world: World, tokenizer: Tokenizer
) -> None:
    await world.ask(asks(0))
    first = world.model
    world.serve(tokenizer, Model(name="fine-tuned", weights="2", tokenizer=first.tokenizer))
    result = await world.ask(asks(1))
    assert (result.model, result.previous_model, result.rewritten_from) == (world.model, first, None)
    assert (await world.ask(asks(2))).previous_model is None
    await world.assert_fold_is_life()


@pytest.mark.parametrize("policy", ["full", "window"])
async def test_a_session_is_tokenised_again_when_the_model_has_a_different_tokenizer(
    world: World, foreign: Tokenizer, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Also a long session that is read from a checkpoint."""
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 4)
    if policy == "window":
        world.crash(Policy(2, 40))
    texts = [(await world.ask(asks(number, f"question {number}"))).text for number in range(20)]
    first = world.model
    world.serve(foreign, Model(name="large", weights="3", tokenizer=foreign.fingerprint.hex()))
    result = await world.ask(asks(20, "the last"))
    assert (result.rewritten_from, result.previous_model) == (0, first)
    said = text_of(world)
    assert said.startswith("<|im_start|>")
    for number, text in enumerate(texts):
        assert f"user\nquestion {number}<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>" in said
    assert (await world.ask(asks(21))).rewritten_from is None
    await world.assert_fold_is_life()


async def test_retokenising_a_session_turns_special_token_text_into_special_tokens_only_in_trusted_messages(
    tokenizer: Tokenizer, foreign: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under a third one, and each time in a session that is read from a checkpoint."""
    monkeypatch.setattr(record, "_CHECKPOINT_EVERY", 2)
    nums = list[list[int]]()
    for trusted in (None, True):
        world, said = World(tokenizer), Message(role="user", content="one <|im_end|> more")
        nums.append([])
        for served in (tokenizer, foreign, tokenizer):
            world.serve(served)
            for _ in range(3):
                name = f"a{len(world.results)}"
                await world.ask(Append(id=name, messages=(said,), special_tokens=trusted))
            (end,) = served.encode("<|im_end|>", at_start=False)
            nums[-1].append(world.session.history.tokens.ids().tolist().count(end))
            await world.assert_fold_is_life()
    assert [with_them - without for without, with_them in zip(*nums, strict=True)] == [3, 6, 9]


async def test_a_session_of_raw_text_is_tokenised_again_when_the_model_has_a_different_tokenizer(
    world: World, foreign: Tokenizer
) -> None:
    first = await world.ask(Generate(id="a", text="Once upon ", max_tokens=4, ignore_eos=True))
    world.serve(foreign)
    await world.ask(Append(id="b", text=" and then"))
    assert text_of(world).endswith(f"Once upon {first.text} and then")
    world.serve(world._others[0])
    await world.ask(Append(id="c", text="!"))
    assert text_of(world).endswith(f"Once upon {first.text} and then!")
    await world.assert_fold_is_life()


@pytest.mark.parametrize("known_as_tokens", [Append(id="t", tokens=(40, 41)), Rewind(id="r", position=24)])
async def test_a_session_with_parts_known_only_as_token_ids_is_refused_by_a_model_with_another_tokenizer(
    world: World, foreign: Tokenizer, known_as_tokens: Any
) -> None:
    await world.ask(asks(0))
    await world.ask(known_as_tokens)
    position = world.session.history.position
    world.serve(foreign)
    refused = await world.ask(asks(1))
    assert isinstance(refused, Failed)
    assert (refused.code, refused.position) == ("history_diverged", position)
    assert "was begun with tiny, whose tokenizer is another one" in refused.message
    assert "\n" not in refused.message
    assert (await world.ask(Rewind(id="back", position=0))).position == 0
    assert (await world.ask(asks(2))).text


async def test_a_session_answered_by_other_weights_is_refused_under_the_setting_other_model_refuse(
    world: World, tokenizer: Tokenizer
) -> None:
    await world.ask(asks(0))
    fingerprint = tokenizer.fingerprint.hex()
    world.takes_over = False
    world.serve(tokenizer, Model(name="fine-tuned", weights="2", tokenizer=fingerprint))
    refused = await world.ask(asks(1))
    assert refused.code == "history_diverged"
    assert "tiny has answered this session" in refused.message
    assert "--other-model refuse" in refused.message
    world.serve(tokenizer, Model(name="renamed", weights="1", tokenizer=fingerprint))
    assert (await world.ask(asks(2))).text


def published(world: World, text: str, model: Model) -> None:
    """Let the token stream have `text` as the beginning of the next answer, published by `model`'s worker."""
    tokens = tuple(world._tokenizer.encode(text, at_start=False))
    by = f"{model.weights} {model.tokenizer}"

    async def read(*_: Any) -> PublishedChunks:
        seq = world.log.entries[-1].seq
        return PublishedChunks([Chunk(0, tokens, text, seq=seq)], 1, model=by)

    world.log.chunks.read = read  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "request_",
    [asks(1), Generate(id="q1", max_tokens=9), Generate(id="q1", text="Then ", max_tokens=9)],
    ids=["messages", "nothing", "text"],
)
async def test_an_answer_begun_with_another_tokenizer_ends_with_its_streamed_text_retokenised(
    world: World, tokenizer: Tokenizer, foreign: Tokenizer, request_: Generate
) -> None:
    await world.ask(asks(0))
    published(world, "I was", world.model)
    world.serve(foreign, Model(name="other", weights="2", tokenizer=foreign.fingerprint.hex()))
    result = await world.ask(request_)
    assert (result.text, result.finish_reason, result.rewritten_from) == ("I was", "model_changed", 0)
    assert result.tokens == tuple(tokenizer.encode("I was", at_start=False))
    assert "I was" in text_of(world)
    await world.assert_fold_is_life()
    world.log.chunks = AnswerChunks()
    assert (await world.ask(asks(2))).rewritten_from is None
    await world.assert_fold_is_life()


#: So that answers are text which another tokenizer has too.
LETTERS = {str(token): 100 for token in range(68, 90)}
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logit_bias": LETTERS}
ENDLESS = {"policy": "sink_window", "sink": 2, "window": 64}


@pytest.fixture(scope="module")
def retokenised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with another tokenizer, which makes fewer tokens of the same text."""
    merges = [("u", "s"), ("us", "e"), ("use", "r"), ("a", "s"), ("as", "s"), ("ass", "i"), ("assi", "s")]
    return make_tiny_model(tmp_path_factory.mktemp("models") / "retokenised", merges=merges)


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


async def test_forks_and_windowed_sessions_keep_their_texts_after_a_change_to_another_tokenizer(
    local_worker: Callable[..., Any], endless_model: Path, retokenised: Path
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

    worker = await local_worker(model=str(retokenised))
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
            changed = (first.model, 0) if is_first else (None, None)
            assert (result.previous_model, result.rewritten_from) == changed, name
            asked = ("user", "Three" if is_first else "Four")
            told = [*before[name], asked, ("assistant", result.text)]
            assert await said(client.session(name)) == told, name
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
