"""Sampling options (logit biases, min_tokens, logprobs, prefixes, recommended values) apply."""

import json
import math
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from turnkeep_client.client import Client
from turnkeep_client.errors import InvalidMessageError, RequestFailedError
from turnkeep_client.messages import Chunk, Generated
from turnkeep_client.session import Session

EOS = 2


async def answered(session: Session, **options: Any) -> tuple[list[Chunk], Generated]:
    generation = session.generate(**options)
    chunks = [chunk async for chunk in generation]
    return chunks, generation.result


async def test_each_token_of_an_answer_has_its_logprob_in_chunks_and_result(client: Client) -> None:
    chunks, result = await answered(
        client.session("s"), text="Once upon", max_tokens=12, logprobs=True, top_logprobs=4
    )
    said = [one for chunk in chunks for one in chunk.logprobs]
    assert tuple(said) == result.logprobs
    assert [one.id for one in said] == list(result.tokens)
    for one in said:
        assert len(one.top) == 4
        assert one.top[0].id == one.id, "greedy: the likeliest"
        assert one.top[0].logprob == pytest.approx(one.logprob, abs=1e-5)
        assert [other.logprob for other in one.top] == sorted((t.logprob for t in one.top), reverse=True)
        assert 0 < sum(math.exp(other.logprob) for other in one.top) <= 1 + 1e-5
        assert one.bytes is None or bytes(one.bytes).decode("utf-8", "replace") == one.token
    _, plain = await answered(client.session("t"), text="Once upon", max_tokens=12)
    assert (plain.tokens, plain.logprobs) == (result.tokens, ())
    _, few = await answered(client.session("u"), text="Once upon", max_tokens=12, logprobs=True)
    assert [one.logprob for one in few.logprobs] == pytest.approx([one.logprob for one in said], abs=1e-4)
    assert {one.top for one in few.logprobs} == {()}


async def test_end_tokens_are_not_sampled_before_min_tokens_and_with_ignore_eos_not_at_all(
    local_worker: Callable[..., Awaitable[Any]],
) -> None:
    client, end = (await local_worker()).client, {EOS: 100}
    _, at_once = await answered(client.session("s"), text="x", max_tokens=9, logit_bias=end)
    assert (at_once.tokens, at_once.finish_reason) == ((EOS,), "stop")
    _, later = await answered(client.session("t"), text="x", max_tokens=9, logit_bias=end, min_tokens=4)
    assert (len(later.tokens), later.tokens[-1], later.finish_reason) == (5, EOS, "stop")
    _, never = await answered(client.session("u"), text="x", max_tokens=9, logit_bias=end, ignore_eos=True)
    assert (never.tokens, never.finish_reason) == ((EOS,) * 9, "length")
    more = await client.session("u").append(text="y")
    assert more.position == never.position + 1


CONTRADICTORY: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 3}, "takes top_logprobs with logprobs only"),
    ({"logprobs": True, "top_logprobs": 5000}, "top_logprobs"),
    ({"logit_bias": {5: 101.0}}, "logit_bias"),
    ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"min_tokens": 10, "max_tokens": 9}, "min_tokens of at most max_tokens"),
]


@pytest.mark.simulated
async def test_the_client_refuses_contradictory_sampling_options_and_numbers_out_of_range(
    client: Client,
) -> None:
    for options, says in CONTRADICTORY:
        with pytest.raises(InvalidMessageError, match=says):
            await client.session("s").generate(text="x", **options)


@pytest.mark.simulated
async def test_a_logit_bias_on_a_token_id_outside_the_vocabulary_is_refused(client: Client) -> None:
    """In a batch, the index after the last token would belong to the logits of another answer."""
    session = client.session("s")
    await session.append(text="before")
    with pytest.raises(
        RequestFailedError, match="logit_bias names the token 9999; the model's tokens are 0 to "
    ):
        await session.generate(text="x", logit_bias={258: 1.0, 9999: 1.0})
    assert (await session.info()).position == len("before")


@pytest.mark.simulated
async def test_a_count_request_returns_the_tokens_that_a_generate_would_add_and_changes_nothing(
    client: Client,
) -> None:
    session = client.session("s")
    asked = {"messages": [{"role": "user", "content": "How many?"}]}
    new = await session.count(**asked)
    assert new.position == new.tokens > 0
    with pytest.raises(RequestFailedError, match="there is no such session"):
        await session.info()
    first = await session.generate(**asked, max_tokens=3)
    assert first.usage.prompt_tokens == new.tokens
    more = await session.count(**asked)
    assert more.position == first.position + more.tokens
    assert (await session.info()).position == first.position
    second = await session.generate(**asked, max_tokens=3)
    assert second.usage.prompt_tokens == more.position
    assert (await session.count()).tokens == 0
    assert (await session.count(text="abc")).tokens == 3
    tools = [{"type": "function", "function": {"name": "weather"}}]
    called = client.session("with-tools")
    counted = await called.count(**asked, tools=tools)
    assert counted.tokens > new.tokens
    answer = await called.generate(**asked, tools=tools, max_tokens=3)
    assert answer.usage.prompt_tokens == counted.tokens
    with pytest.raises(InvalidMessageError, match="at most one of"):
        await session.count(text="a", tokens=[1])
    with pytest.raises(RequestFailedError, match="vocabulary"):
        await session.count(tokens=[1_000_000])


@pytest.mark.simulated
async def test_raw_text_and_an_answer_prefix_get_the_same_answer_as_both_sent_as_one_text(
    client: Client,
) -> None:
    _, given = await answered(client.session("s"), text="Once ", prefix="upon", max_tokens=6)
    _, plain = await answered(client.session("t"), text="Once upon", max_tokens=6)
    assert (given.tokens, given.position) == (plain.tokens, plain.position)


async def test_a_request_with_own_sampling_true_takes_missing_options_from_the_models_generation_config(
    local_worker: Callable[..., Awaitable[Any]], tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    shutil.copytree(tiny_model, folder)
    own = {"temperature": 5.0, "top_k": 3, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(own))
    client = (await local_worker(model=str(folder))).client
    asked: dict[str, Any] = {"text": "Once", "max_tokens": 12, "ignore_eos": True, "seed": 4}
    results = []
    for number, more in enumerate(
        (
            {},
            {"own_sampling": True},
            {"temperature": 5.0, "top_k": 3},
            {"own_sampling": True, "temperature": 0.0},
        )
    ):
        results.append((await answered(client.session(f"s{number}"), **asked, **more))[1].tokens)
    plain, by_model, by_hand, greedy = results
    assert by_model == by_hand != plain
    assert greedy == plain


async def test_the_client_method_samples_returns_different_answers_and_leaves_the_session_unchanged(
    client: Client,
) -> None:
    session = client.session("s")
    await session.append(text="Once upon a time" * 20)
    before = await session.info()
    first, *others = await session.samples(4, text=" there", max_tokens=8, temperature=2.0, seed=3)
    alone = await client.session("t").generate(
        text="Once upon a time" * 20 + " there", max_tokens=8, temperature=2.0, seed=3
    )
    assert first.tokens == alone.tokens
    assert len({one.tokens for one in (first, *others)}) == 4
    after = await session.info()
    assert (after.position, after.requests) == (before.position, before.requests)
    spent = after.worker.prefilled_tokens - before.worker.prefilled_tokens
    assert spent <= 4 * (1 + len(" there")), "the session's own tokens are not prefilled again"


async def test_a_generate_request_with_max_tokens_0_prefills_its_prompt_and_returns_an_empty_answer(
    local_worker: Callable[..., Awaitable[Any]],
) -> None:
    client = (await local_worker()).client
    said = {"messages": [{"role": "user", "content": "Hello. " * 50}]}
    empty = await client.session("a").generate(**said, max_tokens=0)
    assert (empty.text, empty.tokens, empty.finish_reason) == ("", (), "length")
    assert empty.usage.prefilled_tokens == empty.usage.prompt_tokens == empty.position > 5
    later = await client.session("b").generate(**said, max_tokens=3)
    assert later.usage.cached_tokens > empty.position // 2
