"""Log probabilities, penalties and grammars of rows in a batch are those of a plain loop over the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from mlx_lm.models.cache import make_prompt_cache
from tiny_models import VOCABULARY, batched, begin, drafting, prefill, prompt

from worker.batch.row_sampler import RowSampler, RowSampling
from worker.batch.rows import Row
from worker.text.grammar import Grammar

PLAIN = RowSampling()
TOLD = RowSampling(top_logprobs=3)
PENALISED = RowSampling(
    0.9, presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.2, top_logprobs=1, seed=4
)
BIASED = RowSampling(logit_bias=((7, 3.0), (9, -50.0)), min_tokens=30, top_logprobs=0)
MIXED = [PLAIN, TOLD, PENALISED, BIASED]


def run(model: Any, samplings: list[RowSampling], num: int, **options: Any) -> list[list[Any]]:
    """Answer prompts of several lengths in one batch; return the `num` first drawn tokens of each."""
    batch = drafting(model, **options) if options else batched(model)
    pieces = [begin(model, prompt(9 + 2 * n, salt=n), sampling) for n, sampling in enumerate(samplings)]
    drawn: dict[Row, list[Any]] = {piece.row: [] for piece in pieces}
    batch.step(pieces)
    while min(map(len, drawn.values())) < num:
        for row, found in drawn.items():
            found.extend(row.drawn)
        batch.step([], run_ahead=True)
    return [found[:num] for found in drawn.values()]


def reference(model: Any, context: list[int], tokens: list[int]) -> np.ndarray:
    """Return the log probabilities of the whole vocabulary at the position of each of `tokens`."""
    caches = make_prompt_cache(model)
    prefill(model, caches, context[:-1])
    rows = [model(mx.array([[token]]), cache=caches)[0, -1] for token in [context[-1], *tokens[:-1]]]
    logits = np.array(mx.stack(rows), np.float64)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "llama4"])
def test_batched_answers_have_the_same_tokens_as_alone_and_the_logprobs_of_the_models_logits(
    make_model, grammar, kind
) -> None:
    """Also beside rows that follow grammars."""
    model = make_model(kind)
    biased = RowSampling(
        repetition_penalty=1.3, logit_bias=((2, 50.0),), grammar=grammar("b*"), top_logprobs=1
    )
    free = RowSampling(0.9, top_k=5, min_p=0.01, grammar=grammar("(a|b){200}"), seed=3)
    samplings = [*MIXED, RowSampling(grammar=grammar("(a{2}b{2})*")), biased, free]
    together = run(model, samplings, 24)
    assert together[-2][0].token == 2, "the bias ends it at once"
    assert ENDS.isdisjoint(one.token for one in together[-1])
    for n, (sampling, found) in enumerate(zip(samplings, together, strict=True)):
        tokens = [one.token for one in found]
        alone = batched(model)
        piece = begin(model, prompt(9 + 2 * n, salt=n), sampling)
        alone.step([piece])
        for _ in range(23):
            alone.step([])
        assert tokens == list(piece.row.known[9 + 2 * n :])
        if sampling.top_logprobs is None:
            assert {one.logprob for one in found} == {None}
            continue
        expected = reference(model, prompt(9 + 2 * n, salt=n), tokens)
        for one, row in zip(found, expected, strict=True):
            assert one.logprob == pytest.approx(row[one.token], abs=2e-3)
            assert [value for _, value in one.top] == pytest.approx(
                np.sort(row)[::-1][: sampling.top_logprobs], abs=2e-3
            )


@pytest.mark.parametrize("sampling", [PENALISED, BIASED], ids=["penalised", "biased"])
def test_speculative_decoding_changes_neither_tokens_nor_logprobs(make_model, sampling) -> None:
    """The text repeats itself, so that prompt lookup finds drafts."""
    model = make_model("llama")
    (plain,), (drafted,) = (run(model, [sampling], 80, most=most) for most in (0, 6))
    assert [one.token for one in drafted] == [one.token for one in plain]
    assert [one.logprob for one in drafted] == pytest.approx([one.logprob for one in plain], abs=1e-3)


ENDS = frozenset({2, 5})
TEXTS = [b"ab"[i % 2 : i % 2 + 1] * (1 + i // 30) + (b"x" if i % 7 == 0 else b"") for i in range(VOCABULARY)]


@pytest.fixture(scope="module")
def grammar() -> Callable[[str], Grammar]:
    class Vocabulary:
        eos_token_id, bos_token_id, tokens, special_token_ids = 2, None, TEXTS, sorted(ENDS)

        def __call__(self, text: Any) -> list[int]:
            return [
                {"a": 4, "b": 1}[letter] for letter in (text.decode() if isinstance(text, bytes) else text)
            ]

    wrapper: Any = TokenizerWrapper(Vocabulary())
    vocabulary = LLTokenizer(wrapper, eos_token=sorted(ENDS))

    def made(regex: str) -> Grammar:
        source = f'start: /{regex}/\n%llguidance {{"no_forcing": true}}'
        return Grammar(LLMatcher(vocabulary, source, log_level=0), ENDS)

    return made


def text(tokens: list[int]) -> str:
    return b"".join(TEXTS[token] for token in tokens).decode()


def test_speculative_decoding_under_a_grammar_changes_no_token_and_accepts_some_drafts(
    make_model, grammar
) -> None:
    model = make_model("llama")
    bias = ((1, 30.0), (4, 30.0), (6, 29.0))
    sampling = RowSampling(0.7, grammar=grammar("(a{3}b{2}){90}"), logit_bias=bias, seed=7)
    (plain,), (drafted,) = (run(model, [sampling], 100, most=most) for most in (0, 6))
    assert [one.token for one in drafted] == [one.token for one in plain]
    batch = drafting(model, 6)
    batch.step([begin(model, prompt(9, salt=0), sampling)])
    for _ in range(60):
        batch.step([])
    assert batch.speculation.num_accepted > 0


def test_once_a_grammar_allows_no_more_text_only_end_tokens_are_sampled(make_model, grammar) -> None:
    """One grammar is complete before `min_tokens`; the other needs a letter that no token has."""
    model = make_model("llama")
    samplings = [
        RowSampling(min_tokens=50, grammar=grammar("aa")),
        RowSampling(grammar=grammar("aaz")),
        RowSampling(),
    ]
    whole, stuck, free = run(model, samplings, 8)
    assert text([one.token for one in whole]).startswith("aa")
    assert {one.token for one in whole[2:]} <= ENDS
    assert {one.token for one in stuck[2:]} <= ENDS
    beside_free_rows = run(model, [RowSampling()] * 3, 8)[2]
    assert [one.token for one in free] == [one.token for one in beside_free_rows]


def test_an_answer_resumed_under_a_grammar_has_the_same_remaining_tokens_as_an_uninterrupted_one(
    make_model, grammar
) -> None:
    sampling = RowSampling(grammar=grammar("(a{2}b{2})*"))
    whole = RowSampler(sampling, end_tokens=ENDS)
    whole.push([4, 4, 1])
    resumed = RowSampler(sampling, answered=[4, 4, 1], end_tokens=ENDS)
    assert whole.needs_last
    (one,), (other,) = whole.draws(), resumed.draws()
    assert one.mask is not None
    assert other.mask is not None
    assert one.mask.tolist() == other.mask.tolist()


def test_end_tokens_are_banned_before_min_tokens_unless_the_grammar_is_complete(grammar) -> None:
    sampler = RowSampler(RowSampling(grammar=grammar("a{1,4}"), min_tokens=9), end_tokens=ENDS)
    sampler.push([4])
    assert sampler.draws()[0].banned == sorted(ENDS)
    assert [bool(draw.banned) for draw in sampler.draws([4, 4, 4])] == [True, True, True, False]
