"""An answer depends on its tokens only: a resumed answer equals an uninterrupted one."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from turnkeep_client.messages import Chunk
from worker.models.answer_markup import markup_of
from worker.models.tokenizer import Tokenizer
from worker.text.answer import Answer
from worker.text.arguments import OfferedTools
from worker.text.splitting import AnswerCalls, MarkedSplitter, call_id
from worker.text.text_stream import TextStream

STOPS = ("ab", "aab", "\u00e9x")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    """A tokenizer with one token for each byte: characters and stop strings span several tokens."""
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="module")
def new_answer(tokenizer):
    def make(max_tokens: int = 12, stop: tuple[str, ...] = STOPS) -> Answer:
        stream = TextStream(tokenizer, stop)
        return Answer(stream, max_tokens=max_tokens, max_bytes=2**20, end_tokens=tokenizer.eos_ids)

    return make


def push_until_over(answer: Answer, tokens: list[int]) -> list[str]:
    return [answer.push(token).text for token in tokens if answer.finish_reason is None]


@given(data=st.data())
def test_an_answer_resumed_after_any_token_has_the_same_remaining_text_as_an_uninterrupted_one(
    tokenizer, new_answer, data
) -> None:
    """Resumed after any token, it has the same further text and end, and the same text if cancelled."""
    letters = [tokenizer.encode(letter, at_start=False) for letter in ("a", "b", "x", "\u00e9", "\u20ac")]
    bytes_and_ends = sorted({token for letter in letters for token in letter} | tokenizer.eos_ids)
    tokens = data.draw(st.lists(st.sampled_from(bytes_and_ends), min_size=1, max_size=16))
    whole = new_answer()
    texts = push_until_over(whole, tokens)
    cut = data.draw(st.integers(0, len(texts)))
    resumed = new_answer()
    push_until_over(resumed, tokens[:cut])
    assert resumed.tokens == whole.tokens[:cut]
    assert resumed.texts == texts[:cut]
    assert push_until_over(resumed, tokens[cut:]) == texts[cut:]
    assert (resumed.text, resumed.finish_reason) == (whole.text, whole.finish_reason)
    assert "".join(texts) == whole.text
    if whole.finish_reason is None:
        one, other = new_answer(), new_answer()
        push_until_over(one, tokens)
        push_until_over(other, tokens)
        assert one.cancel() == other.cancel()
        assert one.text == other.text
        assert one.text.startswith(whole.text)


@pytest.mark.parametrize("max_tokens", [4, 12])
def test_an_answer_that_ends_at_a_stop_string_has_text_without_the_string_and_tokens_with_it(
    tokenizer, new_answer, max_tokens
) -> None:
    """It also counts as the reason for the end if the last token that the answer may have completes it."""
    answer = new_answer(max_tokens=max_tokens)
    texts = push_until_over(answer, tokenizer.encode("xaab", at_start=False))
    assert ("".join(texts), answer.finish_reason, len(answer.tokens)) == ("x", "stop", 4)


def test_an_answer_whose_last_allowed_token_is_an_end_token_has_the_finish_reason_stop(
    tokenizer, new_answer
) -> None:
    answer = new_answer(max_tokens=2)
    push_until_over(answer, [*tokenizer.encode("x", at_start=False), min(tokenizer.eos_ids)])
    assert (len(answer.tokens), answer.finish_reason) == (2, "stop")


def test_an_answer_that_ends_at_max_tokens_releases_text_held_back_for_a_stop_string(
    tokenizer, new_answer
) -> None:
    answer = new_answer(max_tokens=3)
    texts = push_until_over(answer, tokenizer.encode("xaaa", at_start=False))
    assert texts == ["x", "", "aa"]
    assert answer.finish_reason == "length"


CALL = '{"name":"f"}'


@pytest.fixture(scope="module")
def calling(tokenizer):
    """Answer with a text in which `f` may be called, then an end token; return the answer and its chunks."""

    def make(text: str, max_bytes: int) -> tuple[Answer, list[Chunk]]:
        calls = AnswerCalls(OfferedTools([{"function": {"name": "f"}}]), lambda index: call_id("r", index))
        splitter = MarkedSplitter(markup_of("", ()), calls, in_reasoning=False)
        answer = Answer(
            TextStream(tokenizer),
            max_tokens=10_000,
            max_bytes=max_bytes,
            end_tokens=tokenizer.eos_ids,
            splitter=splitter,
        )
        tokens = [*tokenizer.encode(text, at_start=False), min(tokenizer.eos_ids)]
        return answer, [answer.push(token) for token in tokens if answer.finish_reason is None]

    return make


def num_bytes(answer: Answer) -> int:
    """Return the size of an answer in a result, without the brackets and quotes around its parts."""
    return sum(len(msgspec.json.encode(part)) for part in (answer.tokens, answer.text, answer.calls)) - 4


@pytest.mark.parametrize("closes", ["</tool_call>", ""])
def test_an_answer_whose_tool_calls_grow_too_large_keeps_those_that_fit_and_has_finish_reason_length(
    calling, closes: str
) -> None:
    """A short call is a long object in the result: its id, its type and its names."""
    text = f"<tool_call>{CALL * 60}{closes}"
    whole, _ = calling(text, 2**20)
    answer, chunks = calling(text, 5_000)
    assert (len(whole.calls), whole.finish_reason) == (60, "tool_calls")
    assert (answer.calls, answer.finish_reason) == (whole.calls[: len(answer.calls)], "length")
    assert 0.9 * 5_000 < num_bytes(answer) <= 5_000
    assert [part.id for chunk in chunks for part in chunk.tool_calls] == [call.id for call in answer.calls]
    assert calling(text, num_bytes(whole))[0].finish_reason == "tool_calls"
