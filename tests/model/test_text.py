"""Streamed text equals the decoded tokens, up to the first stop string."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from worker.models.tokenizer import Tokenizer
from worker.text.text_stream import TextStream

pytestmark = pytest.mark.model

#: Without unassigned characters: the packaged vocabulary lacks some of their bytes.
TEXTS = st.text(
    st.sampled_from("aab \n<|>é数🙂\u200d\u0301\ufffd")
    | st.characters(codec="utf-8", exclude_categories=["C"]),
    max_size=30,
)
RANDOM = st.lists(st.integers(3, 49_151), max_size=30)


def pieces(tokenizer: Tokenizer, tokens: list[int], stop: list[str]) -> tuple[list[str], str | None]:
    stream = TextStream(tokenizer, stop, lambda _: True)
    found = [stream.push(token) for token in tokens]
    return [*found, stream.finish()], stream.stop


def expected(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Cut the text at the stop string that ends first; if several end there, at the longest of them."""
    for end in range(1, len(text) + 1):
        ending = [string for string in stop if text.endswith(string, 0, end)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(tokens=RANDOM)
def test_streamed_pieces_join_to_the_text_decoded_at_once(tokenizer: Tokenizer, tokens: list[int]) -> None:
    whole = tokenizer._rust.decode(tokens, skip_special_tokens=False)
    assert tokenizer.decode(tokens) == whole
    assert "".join(pieces(tokenizer, tokens, [])[0]) == whole


@given(text=TEXTS)
def test_any_text_survives_encoding_and_streaming_unchanged(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text, at_start=False)
    assume(tokenizer.eos_ids.isdisjoint(tokens))
    assert "".join(pieces(tokenizer, tokens, [])[0]) == text


@given(
    tokens=RANDOM | TEXTS,
    stop=st.lists(st.text("aab \n<|>é数🙂\u0301", min_size=1, max_size=4), max_size=6),
    cuts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=4),
)
def test_streamed_text_ends_before_the_stop_string_that_ends_first_however_tokens_divide_it(
    tokenizer: Tokenizer, tokens: list[int] | str, stop: list[str], cuts: list[tuple[int, int]]
) -> None:
    ids = tokenizer.encode(tokens, at_start=False) if isinstance(tokens, str) else tokens
    ids = [token for token in ids if token not in tokenizer.eos_ids]
    whole = tokenizer.decode(ids)
    stop = [*stop, *(part for start, size in cuts if (part := whole[start : start + size]))]
    found, seen = pieces(tokenizer, ids, stop)
    assert ("".join(found), seen) == expected(whole, stop)


@given(
    text=TEXTS, stop=st.lists(st.text("aab é🙂", min_size=1, max_size=4), max_size=4), cut=st.integers(0, 30)
)
def test_replaying_the_first_tokens_of_an_answer_streams_the_same_pieces_of_text(
    tokenizer: Tokenizer, text: str, stop: list[str], cut: int
) -> None:
    tokens = tokenizer.encode(text, at_start=False)
    again = TextStream(tokenizer, stop)
    first = [again.push(token) for token in tokens[:cut]]
    assert first == pieces(tokenizer, tokens, stop)[0][: len(first)]


def test_only_text_that_may_become_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["\n\nUser"])
    sent = [stream.push(token) for char in "ab\n\nUsed" for token in tokenizer.encode(char, at_start=False)]
    assert sent == ["a", "b", "", "", "", "", "", "\n\nUsed"]


def test_a_character_is_sent_when_its_last_byte_arrives(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("🫠", at_start=False)
    stream = TextStream(tokenizer)
    assert [stream.push(token) for token in tokens] == [""] * (len(tokens) - 1) + ["🫠"]
    assert stream.finish() == ""


def test_an_incomplete_character_at_the_end_becomes_one_replacement_character(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokenizer.encode("🫠", at_start=False)[0]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_end_of_turn_tokens_produce_no_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert {2} <= tokenizer.eos_ids
    assert [stream.push(token) for token in tokenizer.eos_ids] == [""] * len(tokenizer.eos_ids)
    assert stream.finish() == ""


def test_a_special_token_is_no_text_unless_it_is_a_marker_or_in_a_stop_string(tokenizer: Tokenizer) -> None:
    name = "<repo_name>"
    control, other = tokenizer.control_id(name), tokenizer.encode("a", at_start=False)[0]
    assert control is not None
    for stop, is_marker, shown in [
        ([], None, "aa"),
        (["b"], lambda text: text == name, f"a{name}a"),
        ([f"{name}b"], None, f"a{name}a"),
        ([name], None, "a"),
    ]:
        stream = TextStream(tokenizer, stop, is_marker)
        assert "".join(stream.push(one) for one in (other, control, other)) + stream.finish() == shown
