"""Translates OpenAI's `/v1/completions`: prompts of text or tokens, without a chat template. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.turn import ClientTurn, WholeNumber, as_whole, check, refused

from . import common as openai

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.messages import Chunk, Generated, TokenLogprob


_MOST_PROMPTS: Final = 128
#: This API's names of fields, by the protocol's names.
NAMES: Final = dict.fromkeys(("messages", "text", "tokens"), "prompt")


class CompletionBody(openai.SamplingFields, frozen=True, kw_only=True):
    """A request's body."""

    prompt: Any
    logprobs: WholeNumber | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: WholeNumber | None = None


_DECODER: Final = msgspec.json.Decoder(CompletionBody, dec_hook=as_whole)


def read(body: bytes) -> ClientTurn:
    """Parse a request's body into a `ClientTurn`. Raises `Fault`."""
    asked, reading = openai.request(_DECODER, body)
    openai.refuse(asked, ("suffix", "echo"))
    num_answers = 1 if asked.n is None else int(asked.n)
    if asked.best_of not in (None, num_answers):
        raise refused("best_of is not supported", "best_of")
    given = prompts(asked.prompt, _MOST_PROMPTS, "prompt")
    text, tokens = (given[0], None) if isinstance(given[0], str) else (None, given[0])
    options = openai.sampling(asked, asked.max_tokens)
    if asked.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": int(asked.logprobs)}
    streamed = asked.stream_options
    turn = ClientTurn(
        text=text,
        tokens=tokens,
        options=options,
        n=num_answers * len(given),
        prompts=given if len(given) > 1 else (),
        model=asked.model,
        stream=bool(asked.stream),
        include_usage=bool(streamed and streamed.include_usage),
        warnings=tuple(reading.warnings),
    )
    return check(turn, NAMES)


def prompts(given: Any, most: int, param: str) -> tuple[str | tuple[int, ...], ...]:
    """Return a request's prompts, at most `most`, each as text or token ids. Raises `Fault`."""
    several = given if isinstance(given, list) and not all(isinstance(one, int) for one in given) else [given]
    if len(several) > most:
        raise refused(f"a request may have {most} prompts", param)
    found: list[str | tuple[int, ...]] = []
    for one in several:
        if isinstance(one, str) and one:
            found.append(one)
        elif isinstance(one, list) and one and all(isinstance(token, int) for token in one):
            found.append(tuple(one))
        else:
            raise refused("a prompt must be a text, or token ids, and not be empty", param)
    return tuple(found)


def whole(turn: ClientTurn, answer_id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:
    """Return the JSON body of the response to a request without `stream`."""
    choices = [
        {
            "index": index,
            "text": result.text,
            "logprobs": _logprobs(result.logprobs, 0) if turn.options.get("logprobs") else None,
            "finish_reason": openai.finish_reason(result),
        }
        for index, result in enumerate(results)
    ]
    return _head(turn, answer_id, created) | {
        "choices": choices,
        "usage": openai.usage(results, len(turn.prompts) or 1),
    }


class CompletionEvents(openai.CompletionStream):
    """Encodes the events of one streamed response."""

    def __init__(self, turn: ClientTurn, answer_id: str, created: int) -> None:
        super().__init__(
            _head(turn, answer_id, created),
            include_usage=turn.include_usage,
            num_prompts=len(turn.prompts) or 1,
        )
        self._lengths = dict.fromkeys(range(turn.n), 0)

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Encode the event for a chunk of an answer; return empty bytes if the chunk adds nothing."""
        if not chunk.text and not chunk.logprobs:
            return b""
        said = _logprobs(chunk.logprobs, self._lengths[index]) if chunk.logprobs else None
        self._lengths[index] += sum(len(one.token) for one in chunk.logprobs)
        return self.choice(index, {"text": chunk.text}, said, None)

    def finish(self, index: int, result: Generated) -> bytes:
        """Encode the event with an answer's `finish_reason`."""
        return self.choice(index, {"text": ""}, None, openai.finish_reason(result))


def _head(turn: ClientTurn, answer_id: str, created: int) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer_id}",
        "object": "text_completion",
        "created": created,
        "model": turn.model,
    }


def _logprobs(tokens: Sequence[TokenLogprob], start: int) -> dict[str, Any]:
    """Return log probabilities in this API's format; `text_offset` counts characters from `start`."""
    offsets, end = [], start
    for one in tokens:
        offsets.append(end)
        end += len(one.token)
    return {
        "tokens": [one.token for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [
            # The likeliest comes last, and so wins: tokens of incomplete characters have the same text.
            {other.token: other.logprob for other in reversed(one.top)}
            for one in tokens
        ],
        "text_offset": offsets,
    }
