"""Chunks that are split, repeated or reordered in any way join to the result, or raise an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_worker import generated

from turnkeep_client.chunks import Assembly
from turnkeep_client.errors import StreamBrokenError
from turnkeep_client.messages import Chunk, Generate

answers = st.lists(st.tuples(st.integers(0, 9), st.text("aäb\U0001f600", max_size=3)), max_size=12)


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[tuple[int, str]], list[Chunk]]:
    """Draw an answer as (token, text) pairs, and chunks of it that overlap, repeat, are reordered or lost."""
    answer = draw(answers)
    ends = st.integers(0, len(answer))
    cuts = draw(st.lists(st.tuples(ends, ends), max_size=30))
    chunks = []
    for start, end in (sorted(cut) for cut in cuts):
        if start < end:
            part = answer[start:end]
            tokens = tuple(token for token, _ in part)
            chunks.append(Chunk(i=start, tokens=tokens, text="".join(text for _, text in part)))
    return answer, chunks


@given(deliveries())
def test_overlapping_repeated_reordered_or_missing_chunks_and_the_result_together_give_the_recorded_answer(
    delivery,
) -> None:
    answer, chunks = delivery
    tokens, text = tuple(token for token, _ in answer), "".join(text for _, text in answer)
    assembly = Assembly()
    seen = [new for chunk in chunks if (new := assembly.add(chunk))]
    if rest := assembly.finish(generated(1, Generate(id="g1"), text=text, tokens=tokens)):
        seen.append(rest)
    assert tuple(token for chunk in seen for token in chunk.tokens) == tokens
    assert "".join(chunk.text for chunk in seen) == text
    assert [chunk.i for chunk in seen] == [sum(len(c.tokens) for c in seen[:n]) for n in range(len(seen))]


def test_a_missing_chunk_is_reported_as_a_gap_until_its_tokens_have_arrived() -> None:
    assembly = Assembly()
    assert assembly.add(Chunk(i=1, tokens=(12,), text="b")) is None
    assert assembly.has_gap
    assert assembly.add(Chunk(i=0, tokens=(11, 12), text="ab")) == Chunk(i=0, tokens=(11, 12), text="ab")
    assert not assembly.has_gap


def test_a_repeated_chunk_with_text_but_no_tokens_adds_its_text_only_once() -> None:
    assembly = Assembly()
    assembly.add(Chunk(i=0, tokens=(11, 12), text="a"))
    assert assembly.add(Chunk(i=2, tokens=(), text="b")) == Chunk(i=2, tokens=(), text="b")
    assert assembly.add(Chunk(i=2, tokens=(), text="b")) is None


def test_chunks_that_contradict_each_other_or_the_recorded_result_raise_an_error() -> None:
    assembly = Assembly()
    assembly.add(Chunk(i=0, tokens=(11, 12), text="ab"))
    with pytest.raises(StreamBrokenError, match="tokens from 0"):
        assembly.add(Chunk(i=0, tokens=(11, 13), text="ab"))
    with pytest.raises(StreamBrokenError, match="text from token 0"):
        assembly.add(Chunk(i=0, tokens=(11, 12), text="ac"))
    with pytest.raises(StreamBrokenError, match="recorded tokens"):
        assembly.finish(generated(1, Generate(id="g1"), text="ab", tokens=(11,)))
    with pytest.raises(StreamBrokenError, match="recorded text"):
        assembly.finish(generated(1, Generate(id="g1"), text="a", tokens=(11, 12)))
