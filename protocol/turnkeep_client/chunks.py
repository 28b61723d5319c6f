"""Joins the token chunks of one answer, without gaps or repeats, and checks them against the recorded result.

Pure: takes chunks, returns new text and tokens. Knows nothing of NATS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import StreamBrokenError
from .messages import CallPart, Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .messages import Called, Generated


class _Stream:
    """Joins one field that chunks have beside their tokens: text, reasoning, or parts of tool calls.

    The field's length before a token is known only if some chunk began or ended at this token.
    """

    def __init__(self, what: str, empty: Any) -> None:
        self.known: Any = empty
        self.length_at = {0: 0}  # token index at which some chunk began or ended -> length before it
        self._what = what

    def new(self, chunk: Chunk, part: Any) -> Any:
        """Return the end of `part`, a chunk's value of the field, that earlier chunks did not have.

        Raises `StreamBrokenError` if the beginning of `part` differs from that of earlier chunks.
        """
        start = self.length_at[chunk.i]
        overlap = part[: len(self.known) - start]
        if overlap != self.known[start : start + len(overlap)]:
            raise StreamBrokenError(f"{self._what} from token {chunk.i} on was published twice and differs")
        self.length_at.setdefault(chunk.i + len(chunk.tokens), start + len(part))
        return part[len(overlap) :]

    def rest(self, whole: Any, of: str) -> Any:
        """Return the end of the result's field `whole` that no chunk had. `of`: the result's id, for errors.

        Raises `StreamBrokenError` if `whole` does not begin with `known`.
        """
        if whole[: len(self.known)] != self.known:
            raise StreamBrokenError(f"the recorded {self._what} of {of} differs from that streamed")
        return whole[len(self.known) :]


class Assembly:
    """The beginning of one answer, joined from the chunks received so far.

    After a worker or server crash the same tokens may come again in different chunks. A chunk's `i` is the
    position of its first token in the answer. The position of its text is known only if another chunk began
    or ended at `i`. Otherwise the chunk is ignored, and `has_gap` is true until a later chunk adds tokens.
    """

    def __init__(self) -> None:
        self.has_gap = False
        self._tokens: list[int] = []
        self._text, self._reasoning = _Stream("text", ""), _Stream("reasoning", "")
        self._calls = _Stream("tool calls", ())

    def add(self, chunk: Chunk) -> Chunk | None:
        """Add a chunk; return its new part, or None if nothing in it is new or the chunk is ignored.

        Raises `StreamBrokenError` if the chunk contradicts earlier chunks.
        """
        if chunk.i not in self._text.length_at:
            self.has_gap = True
            return None
        num_known = len(self._tokens) - chunk.i
        if self._tokens[chunk.i : chunk.i + len(chunk.tokens)] != list(chunk.tokens[:num_known]):
            raise StreamBrokenError(f"tokens from {chunk.i} on were published twice and differ")
        new = Chunk(
            i=len(self._tokens),
            tokens=chunk.tokens[num_known:],
            text=self._text.new(chunk, chunk.text),
            logprobs=chunk.logprobs[num_known:],
            reasoning=self._reasoning.new(chunk, chunk.reasoning),
            tool_calls=self._calls.new(chunk, chunk.tool_calls),
            warnings=() if self._tokens else chunk.warnings,
        )
        if len(chunk.tokens) > num_known:
            self.has_gap = False
        return self._extend(new)

    def finish(self, result: Generated) -> Chunk | None:
        """Return the end of `result` that no chunk had, None if there is none.

        Raises `StreamBrokenError` if `result` contradicts the chunks.
        """
        num_known = len(self._tokens)
        if list(result.tokens[:num_known]) != self._tokens:
            raise StreamBrokenError(f"the recorded tokens of {result.id} differ from those streamed")
        return self._extend(
            Chunk(
                i=num_known,
                tokens=result.tokens[num_known:],
                text=self._text.rest(result.text, result.id),
                logprobs=result.logprobs[num_known:],
                reasoning=self._reasoning.rest(result.reasoning, result.id),
                tool_calls=_missing(self._calls.known, result.tool_calls),
                warnings=() if self._tokens else result.warnings,
            )
        )

    def _extend(self, new: Chunk) -> Chunk | None:
        if not (new.tokens or new.text or new.reasoning or new.tool_calls):
            return None
        self._tokens += new.tokens
        self._text.known += new.text
        self._reasoning.known += new.reasoning
        self._calls.known += new.tool_calls
        return new


def _missing(parts: Sequence[CallPart], calls: Sequence[Called]) -> tuple[CallPart, ...]:
    """Return the parts of the result's tool `calls` that are not in `parts`, those that were streamed."""
    missing = []
    for index, call in enumerate(calls):
        told = "".join(part.arguments for part in parts if part.index == index)
        is_new = all(part.index != index for part in parts)
        rest = call.function.arguments[len(told) :]
        if is_new:
            missing.append(CallPart(index, call.id, call.function.name, rest))
        elif rest:
            missing.append(CallPart(index, arguments=rest))
    return tuple(missing)
