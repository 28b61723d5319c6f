"""`echo`: the log probabilities of the prompt tokens that a request adds, also after crashes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interruptions import heard_over_a_kill

from tests.parts import make_tiny_model
from turnkeep_client.client import Client
from turnkeep_client.errors import RequestFailedError
from turnkeep_client.messages import PromptToken
from turnkeep_client.session import Session
from worker.batch.batch import Batch
from worker.batch.rows import PrefillPiece

#: In the tiny model's vocabulary, the token ids of a text are its bytes.
TEXT = "Once upon a time there was a session, and it had a prompt."


def reference(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """Return, for each position, the log probabilities of all next tokens, by a plain call of the model."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    logits = np.array(model(mx.array([list(tokens)]))[0].astype(mx.float32), np.float64)
    found: np.ndarray = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return found


def check(said: Sequence[PromptToken], before: Sequence[int], expected: np.ndarray, num_top: int) -> None:
    """Compare the echoed log probabilities of the tokens after `before` with those of `reference`."""
    for at, one in enumerate(said, len(before)):
        if at == 0:
            assert (one.logprob, one.top) == (None, ())
            continue
        row = expected[at - 1]
        assert one.logprob == pytest.approx(row[one.id], abs=1e-3)
        assert [other.logprob for other in one.top] == pytest.approx(np.sort(row)[::-1][:num_top], abs=1e-3)


async def has_begun(session: Session) -> bool:
    try:
        progress = (await session.info()).progress
    except RequestFailedError:
        return False
    return progress is not None and progress.cached_tokens > 0


async def test_an_echo_has_the_log_probability_of_each_token_that_the_request_adds(
    client: Client, endless_model: Path
) -> None:
    """Also if the KV of these tokens is cached, and in a next turn with messages and an answer's header."""
    await client.session("before").generate(text=TEXT, max_tokens=3)
    session = client.session("s")
    options: dict[str, Any] = {"max_tokens": 4, "logprobs": True, "top_logprobs": 3}
    first = await session.generate(text=TEXT, echo=True, **options)
    plain = await client.session("plain").generate(text=TEXT, **options)
    assert (plain.tokens, plain.prompt_logprobs) == (first.tokens, ())
    assert "".join(one.token for one in first.prompt_logprobs) == TEXT
    assert first.usage.cached_tokens == 0, "what has KV has no logits"
    assert first.usage.prompt_tokens == len(TEXT)
    tokens = [one.id for one in (*first.prompt_logprobs, *first.logprobs)]
    messages = [{"role": "user", "content": "Why?"}]
    counted = await session.count(messages=messages)
    second = await session.generate(messages=messages, echo=True, **options)
    assert len(second.prompt_logprobs) == counted.tokens
    assert second.usage.cached_tokens == len(tokens) - 1, "the token before the first new one is run"
    whole = [*tokens, *(one.id for one in second.prompt_logprobs)]
    expected = reference(endless_model, whole)
    check(first.prompt_logprobs, (), expected, 3)
    check(second.prompt_logprobs, tokens, expected, 3)


async def test_an_echo_with_max_tokens_0_scores_the_prompt_and_keeps_it_in_the_session(
    local_worker: Callable[..., Awaitable[Any]], endless_model: Path
) -> None:
    worker = await local_worker(model=str(endless_model))
    session = worker.client.session("s")
    scored = await session.generate(text=TEXT, max_tokens=0, echo=True)
    assert (scored.text, scored.tokens, scored.finish_reason) == ("", (), "length")
    assert (scored.position, scored.usage.completion_tokens) == (len(TEXT), 0)
    assert {one.top for one in scored.prompt_logprobs} == {()}
    tokens = [one.id for one in scored.prompt_logprobs]
    check(scored.prompt_logprobs, (), reference(endless_model, tokens), 0)
    nothing = await session.generate(max_tokens=0, echo=True)
    assert (nothing.prompt_logprobs, nothing.position) == ((), len(TEXT))
    said = await session.generate(messages=[{"role": "user", "content": "A"}], max_tokens=0, echo=True)
    await worker.stop()
    worker = await local_worker(model=str(endless_model))
    session = worker.client.session("s")
    after = await session.generate(max_tokens=5, expect_position=said.position)
    assert after.position == said.position + 5
    before = [*tokens, *(one.id for one in said.prompt_logprobs), *after.tokens]
    await worker.stop()
    worker = await local_worker(model=str(endless_model))
    more = await worker.client.session("s").generate(text=TEXT, max_tokens=0, echo=True)
    assert more.usage.cached_tokens == len(before) - 1, "from the disk"
    whole = [*before, *(one.id for one in more.prompt_logprobs)]
    check(more.prompt_logprobs, before, reference(endless_model, whole), 0)
    one = await worker.client.session("t").generate(tokens=tokens[:1], max_tokens=0, echo=True)
    assert [(each.id, each.logprob) for each in one.prompt_logprobs] == [(tokens[0], None)]


async def test_the_echo_of_an_answers_tokens_has_the_logprobs_that_the_answer_had(client: Client) -> None:
    """Also under `sink_window` with a window much shorter than the prompt."""
    for cache in ({"policy": "full"}, {"policy": "sink_window", "sink": 2, "window": 32}):
        name = str(cache["policy"])
        session = client.session(name, cache=cache)
        drawn = await session.generate(text=TEXT * 3, max_tokens=60, logprobs=True)
        again = client.session(f"{name}-2", cache=cache)
        await again.append(text=TEXT * 3)
        told = await again.generate(tokens=drawn.tokens, max_tokens=1, echo=True)
        assert [one.id for one in told.prompt_logprobs] == list(drawn.tokens)
        assert [one.logprob for one in told.prompt_logprobs] == pytest.approx(
            [one.logprob for one in drawn.logprobs], abs=2e-3
        )


async def test_a_cancelled_echo_adds_nothing_to_the_session(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = Batch.score

    def slow(self: Batch, piece: PrefillPiece, most: int) -> None:
        time.sleep(0.02)
        score(self, piece, most)

    monkeypatch.setattr(Batch, "score", slow)
    session = client.session("s")
    generation = session.generate(text=TEXT * 20, echo=True)
    waiting = asyncio.create_task(generation.wait())
    async with asyncio.timeout(20):
        while not await has_begun(session):  # noqa: ASYNC110  # the worker tells nobody
            await asyncio.sleep(0.02)
    await generation.cancel()
    result = await waiting
    assert (result.finish_reason, result.tokens, result.prompt_logprobs) == ("cancelled", (), ())
    again = await session.generate(text=TEXT, echo=True, max_tokens=1, expect_position=0)
    assert len(again.prompt_logprobs) == len(TEXT)


@pytest.mark.process
async def test_an_answer_resumed_after_a_kill_has_the_echo_of_its_whole_prompt(
    worker_process: Any, endless_model: Path
) -> None:
    process = worker_process(model=endless_model)
    options = {"text": TEXT, "max_tokens": 400, "echo": True, "logprobs": True, "top_logprobs": 1}
    _, result = await heard_over_a_kill(process, options, behind=25)
    assert "".join(one.token for one in result.prompt_logprobs) == TEXT
    tokens = [*(one.id for one in result.prompt_logprobs), *result.tokens]
    expected = reference(endless_model, tokens)
    check(result.prompt_logprobs, (), expected, 1)
    assert [one.logprob for one in result.logprobs] == pytest.approx(
        [expected[at - 1][token] for at, token in enumerate(tokens) if at >= len(TEXT)], abs=2e-3
    )


async def test_an_echo_that_is_too_large_or_in_a_paged_session_is_refused(
    local_worker: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "wide", hidden_size=128, max_position_embeddings=16384)
    client = (await local_worker(model=str(model))).client
    session = client.session("s")
    for text, more, says in [
        ("x" * 9000, {}, "an echo of 9000 tokens, with 0 likeliest tokens each, does not fit .* takes 1"),
        ("x" * 500, {"logprobs": True, "top_logprobs": 20}, "an echo of 500 tokens, with 20 likeliest"),
    ]:
        with pytest.raises(RequestFailedError, match=says):
            await session.generate(text=text, max_tokens=1, echo=True, **more)
    paged = client.session("p", cache={"policy": "paged", "resident": 516})
    with pytest.raises(RequestFailedError, match="paged cannot echo"):
        await paged.generate(text="x", max_tokens=1, echo=True)
    await session.append(text="x" * 9000)
    fits = await session.generate(text=TEXT, max_tokens=1, echo=True)
    assert len(fits.prompt_logprobs) == len(TEXT)
