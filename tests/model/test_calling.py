"""Grammars for tool calls in each family's format, and for answers after reasoning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_splitting import FAMILIES, markup, wide, written

from turnkeep_client.messages import LarkFormat
from worker.batch.row_sampler import Constraint
from worker.models.answer_markup import AnswerMarkup, markup_of
from worker.models.tokenizer import Tokenizer
from worker.text.calling import calls_grammar
from worker.text.grammar import Grammars
from worker.text.thinking import Thinking

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "weather", "strict": True, "parameters": {**CITY, "additionalProperties": False}}},
    {"function": {"name": "clock"}},
]
#: For families with several call formats: the template text that tells which one is used.
OWN = {"mistral_args": " [ARGS]", "deepseek_v3": " ```json"}
#: Families whose calls have JSON arguments and begin with a marker.
JSON = [
    name
    for name in FAMILIES
    if name not in ("harmony", "llama_bare", "kimi_singular") and markup(name).form[1] is not None
]


def of(family: str) -> AnswerMarkup:
    template, vocabulary, _ = FAMILIES[family]
    return markup_of(wide(template) + OWN.get(family, ""), vocabulary)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


async def compiled(
    grammars: Grammars, tokenizer: Tokenizer, family: str, answer: str | None, *, several: bool = True
) -> Constraint:
    source = calls_grammar(of(family), TOOLS, tokenizer.control_id, answer=answer, several=several)
    found = await grammars.compiled(LarkFormat(source))
    assert found is not None
    return found


def accepts(tokenizer: Tokenizer, grammar: Constraint, text: str) -> bool:
    return grammar.follow(tokenizer.encode(tokenizer.as_text(text), at_start=False)).is_complete


@pytest.mark.parametrize("family", JSON)
async def test_the_grammar_for_required_tool_calls_accepts_only_offered_tools_and_arguments_of_their_schema(
    grammars: Grammars, tokenizer: Tokenizer, family: str
) -> None:
    grammar = await compiled(grammars, tokenizer, family, None)
    good, clock = written(family, "weather", {"city": "Rome"}), written(family, "clock", {"any": [1]})
    for text in (good, clock, f"\n{good}", f"{good}\n{clock}"):
        assert accepts(tokenizer, grammar, text), text
    for text in (
        "Hello.",
        f"Hello. {good}",
        "\n" * 9 + good,  # a small model would go on with white space
        written(family, "other", {"city": "Rome"}),
        written(family, "weather", {"town": "Rome"}),
        written(family, "weather", {"city": 3}),
        good[:-4],
    ):
        assert not accepts(tokenizer, grammar, text), text
    one = await compiled(grammars, tokenizer, family, None, several=False)
    assert accepts(tokenizer, one, good)
    assert not accepts(tokenizer, one, good + good)


@pytest.mark.parametrize("family", JSON)
async def test_the_grammar_for_optional_tool_calls_accepts_text_and_calls_whose_arguments_fit_the_schema(
    grammars: Grammars, tokenizer: Tokenizer, family: str
) -> None:
    grammar = await compiled(grammars, tokenizer, family, "text")
    good, bad = written(family, "weather", {"city": "Rome"}), written(family, "weather", {"town": "Rome"})
    for text in ("Hello.", good, f"Hello. {good}", f"{good}\nAnd {good}", "a <b> [c] {d}"):
        assert accepts(tokenizer, grammar, text), text
    for text in (bad, f"Hello. {bad}", f"{good}\nAnd {bad}"):
        assert not accepts(tokenizer, grammar, text), text


async def test_the_harmony_grammar_accepts_one_call_of_an_offered_tool_or_one_final_message(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    good = written("harmony", "weather", {"city": "Rome"}).removesuffix("<|call|>")  # an end token
    bad = good.replace('"city"', '"town"')
    again, final = "<|start|>assistant", "<|channel|>final<|message|>"
    must = await compiled(grammars, tokenizer, "harmony", None)
    for text in (good, again + good):
        assert accepts(tokenizer, must, text), text
    for text in (bad, good + good, f"{final}Hello.", good.replace("weather", "other"), f"\n{good}"):
        assert not accepts(tokenizer, must, text), text
    may = await compiled(grammars, tokenizer, "harmony", "text")
    for text in (good, again + good, f"{final}Hello.", f"{again}{final}"):
        assert accepts(tokenizer, may, text), text
    for text in (bad, "Hello.", f"{again}Hello."):
        assert not accepts(tokenizer, may, text), text
    described = await compiled(grammars, tokenizer, "harmony", '"yes" | "no"')
    assert accepts(tokenizer, described, f"{final}yes")
    assert not accepts(tokenizer, described, f"{final}maybe")


@pytest.mark.parametrize("family", ["qwen3_coder", "glm47", "pythonic"])
async def test_in_tool_call_formats_without_json_the_grammar_requires_a_call_of_an_offered_tool(
    grammars: Grammars, tokenizer: Tokenizer, family: str
) -> None:
    grammar = await compiled(grammars, tokenizer, family, None)
    assert accepts(tokenizer, grammar, written(family, "weather", {"city": "Rome"}))
    assert not accepts(tokenizer, grammar, "Hello.")
    assert not accepts(tokenizer, grammar, written(family, "other", {"city": "Rome"}))


async def test_the_grammar_for_tools_and_a_response_format_accepts_a_call_or_text_in_that_format(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = await compiled(grammars, tokenizer, "generic", '"yes" | "no"')
    for text in ("yes", written("generic", "weather", {"city": "Rome"})):
        assert accepts(tokenizer, grammar, text)
    assert not accepts(tokenizer, grammar, "maybe")


def thinking(tokenizer: Tokenizer, grammar: Constraint | None = None, **more: Any) -> Thinking:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, at_start=False))

    given: dict[str, Any] = {"is_begun": True, **more}
    return Thinking(
        spell=tokenizer.token_bytes,
        opens=b"<think>",
        closes=re.compile(b"</think>"),
        opening=ids("<think>"),
        closing=ids("</think>"),
        spaces=ids("\n"),
        grammar=grammar,
        **given,
    )


def allowed(tokenizer: Tokenizer, mask: np.ndarray[Any, Any] | None) -> str | None:
    """Return the texts of the tokens that a mask allows, joined; None if every token is allowed."""
    if mask is None:
        return None
    ids = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
    return "".join(sorted(tokenizer.decode([one]) for one in ids))


def next_of(tokenizer: Tokenizer, follower: Any, draft: str = "") -> list[str | None]:
    tokens = tokenizer.encode(draft, at_start=False)
    return [allowed(tokenizer, mask) for mask in follower.masks(tokens)]


def test_once_the_reasoning_budget_is_used_up_token_masks_allow_only_the_end_of_reasoning(
    tokenizer: Tokenizer,
) -> None:
    follower = thinking(tokenizer, budget=3).follow(())
    assert next_of(tokenizer, follower, "ab") == [None] * 3
    assert next_of(tokenizer, follower, "abc</x") == [None] * 3 + ["<", "/", "t", "<"]
    follower.push(tokenizer.encode("abc</think>", at_start=False))
    assert next_of(tokenizer, follower, "xyz") == [None] * 4
    at_once = thinking(tokenizer, budget=0).follow(tokenizer.encode("</thi", at_start=False))
    assert next_of(tokenizer, at_once, "nk>") == ["n", "k", ">", None]
    again = thinking(tokenizer, budget=2).follow(tokenizer.encode("ab</think>x<think>", at_start=False))
    assert next_of(tokenizer, again) == ["<"]
    ended = thinking(tokenizer, budget=30).follow(tokenizer.encode("a</think>" + "b" * 40, at_start=False))
    assert next_of(tokenizer, ended) == [None]


def test_token_masks_decode_each_white_space_token_before_the_reasoning_of_an_answer_only_once(
    tokenizer: Tokenizer,
) -> None:
    spelled: list[int] = []

    def spell(token: int) -> bytes:
        spelled.append(token)
        return tokenizer.token_bytes(token)

    (space,) = tokenizer.encode("\n", at_start=False)
    follower = replace(thinking(tokenizer, budget=2, is_begun=False), spell=spell).follow([space] * 1_000)
    assert len(spelled) == 1_000
    follower.push(tokenizer.encode("<think>ab", at_start=False))
    assert next_of(tokenizer, follower) == ["<"]


async def test_token_masks_apply_the_grammar_only_after_the_reasoning_has_ended(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = await grammars.compiled(LarkFormat('start: "yes" | "no"'))
    end = tokenizer.decode(sorted(tokenizer.eos_ids))
    follower = thinking(tokenizer, grammar).follow(())
    assert next_of(tokenizer, follower, "no</think>\nno") == [None] * 10 + ["\nny", "ny", "o", end]
    assert not follower.is_complete
    follower.push(tokenizer.encode("hm</think>yes", at_start=False))
    assert follower.is_complete
    assert next_of(tokenizer, follower) == [end]


async def test_token_masks_under_a_grammar_allow_an_answer_to_begin_with_or_without_reasoning(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = await grammars.compiled(LarkFormat('start: "yes" | "no"'))
    whole = thinking(tokenizer, grammar, is_begun=False)
    assert next_of(tokenizer, whole.follow(()), "no")[:2] == ["\n<ny", "o"]
    thought = whole.follow(tokenizer.encode("<think>x</think>", at_start=False))
    assert next_of(tokenizer, thought, "ye") == ["\nny", "e", "s"]


@pytest.mark.parametrize("answered", ["", "\n", "<", "\n<", "<t", "<think>", "<think>x</think>", "yes", "y"])
async def test_an_answer_that_may_still_start_reasoning_is_complete_only_where_its_grammar_allows_an_end(
    grammars: Grammars, tokenizer: Tokenizer, answered: str
) -> None:
    grammar = await grammars.compiled(LarkFormat('start: ("yes" | "<")?'))
    follower = thinking(tokenizer, grammar, is_begun=False).follow(tokenizer.encode(answered, at_start=False))
    assert follower.is_complete == (answered not in {"<t", "<think>", "y"})


async def test_token_masks_allow_tokens_that_continue_the_reasoning_marker_or_the_grammars_text(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    yes = thinking(tokenizer, await grammars.compiled(LarkFormat('start: "yes"')), is_begun=False)
    assert next_of(tokenizer, yes.follow(()), "\n<th")[1:] == ["<y", "t", "h", "i"]
    both = thinking(tokenizer, await grammars.compiled(LarkFormat('start: "<b>" | "<tt>"')), is_begun=False)
    assert next_of(tokenizer, both.follow(()), "<th") == ["\n<", "bt", "ht", "i"]
    assert next_of(tokenizer, both.follow(()), "<tt>")[3] == ">"


@pytest.mark.parametrize("cut", range(14))
async def test_a_grammar_state_rebuilt_from_all_answer_tokens_equals_a_state_advanced_token_by_token(
    grammars: Grammars, tokenizer: Tokenizer, cut: int
) -> None:
    grammar = await grammars.compiled(LarkFormat('start: "yes" | "no"'))
    whole = thinking(tokenizer, grammar, budget=4, is_begun=False)
    tokens: Sequence[int] = tokenizer.encode("<think>a</think>yes"[: cut + 5], at_start=False)
    at_once, stepwise = whole.follow(tokens), whole.follow(())
    for token in tokens:
        for draft in ("yes", "\n<th", "<think>a"):  # asking about a draft changes nothing
            stepwise.masks(tokenizer.encode(draft, at_start=False))
        stepwise.push((token,))
    assert next_of(tokenizer, at_once) == next_of(tokenizer, stepwise)
    assert at_once.is_complete == stepwise.is_complete
