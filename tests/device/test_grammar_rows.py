"""Rows that follow grammars get the same tokens alone, beside other rows, and with drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from test_logprobs import run
from tiny_models import VOCABULARY, batched, begin, drafting, prompt

from worker.batch.row_sampler import RowSampler, RowSampling
from worker.text.grammar import Grammar

if TYPE_CHECKING:
    from collections.abc import Callable

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


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3_next"])
def test_rows_with_and_without_grammars_get_the_same_tokens_together_as_alone(
    make_model, grammar, kind
) -> None:
    model = make_model(kind)
    samplings = [
        RowSampling(),
        RowSampling(grammar=grammar("(a{2}b{2})*")),
        RowSampling(0.9, top_k=5, min_p=0.01, grammar=grammar("(a|b){200}"), seed=3),
        RowSampling(0.9, top_p=0.9, presence_penalty=0.5, seed=4),
        RowSampling(
            repetition_penalty=1.3,
            logit_bias=((2, 50.0),),
            grammar=grammar("b*"),
            top_logprobs=1,
        ),
    ]
    together = run(model, samplings, 24)
    for n, sampling in enumerate(samplings):
        alone = batched(model)
        piece = begin(model, prompt(9 + 2 * n, salt=n), sampling)
        alone.step([piece])
        for _ in range(23):
            alone.step([])
        tokens = list(piece.row.known[9 + 2 * n :])[:24]
        assert [one.token for one in together[n]] == tokens
    answers = [[one.token for one in drawn] for drawn in together]
    assert ENDS.isdisjoint(answers[2])
    assert answers[4][0] == 2, "the bias ends it at once"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculation_under_a_grammar_changes_no_token_and_some_drafts_are_accepted(
    make_model, grammar, temperature
) -> None:
    model = make_model("llama")
    bias = ((1, 30.0), (4, 30.0), (6, 29.0))
    sampling = RowSampling(temperature, grammar=grammar("(a{3}b{2}){90}"), logit_bias=bias, seed=7)
    (plain,), (drafted,) = (run(model, [sampling], 100, most=most) for most in (0, 6))
    assert [one.token for one in drafted] == [one.token for one in plain]
    batch = drafting(model, 6)
    batch.step([begin(model, prompt(9, salt=0), sampling)])
    for _ in range(60):
        batch.step([])
    assert batch.speculation.num_accepted > 0


def test_a_row_whose_grammar_allows_no_more_text_draws_only_end_tokens(make_model, grammar) -> None:
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


def test_a_resumed_answer_continues_at_the_same_point_of_its_grammar(make_model, grammar) -> None:
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
