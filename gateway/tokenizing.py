"""Converts texts to tokens and tokens to text, in the formats of llama.cpp and vLLM.

The gateway has no tokenizer, so the worker prefills the prompt and returns its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from .openai import chat
from .planning import new_name
from .turn import decoded, refused

if TYPE_CHECKING:
    from turnkeep_client.messages import PromptToken

    from .conversations import Conversations


class Tokenize(Struct, frozen=True):
    """A request to `/tokenize`: a text, as `content` or as `prompt`, or messages."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    with_pieces: bool = False
    return_token_strs: bool = False


class Detokenize(Struct, frozen=True):
    """A request to `/detokenize`."""

    tokens: list[int]
    model: str | None = None


_TOKENIZE: Final = msgspec.json.Decoder(Tokenize)
_DETOKENIZE: Final = msgspec.json.Decoder(Detokenize)


async def tokenize(conversations: Conversations, body: bytes, context: int) -> tuple[dict[str, Any], int]:
    """Return the tokens of a request's text or messages, and how many were prefilled for that.

    Raises `Fault`, `TurnkeepError`.
    """
    asked = decoded(_TOKENIZE, body)
    text = asked.prompt if asked.content is None else asked.content
    if (text is None) == (asked.messages is None):
        raise refused("content, prompt or messages must be there", "content")
    given: dict[str, Any] = {"text": text}
    if text is None:
        given = {"messages": chat.read(body).messages}
    found, num_prefilled = await _prefilled(conversations, **given) if text != "" else ((), 0)
    ids = [one.id for one in found]
    told: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": context}
    if asked.with_pieces:
        told["tokens"] = [{"id": one.id, "piece": one.token} for one in found]
    if asked.return_token_strs:
        told["token_strs"] = [one.token for one in found]
    return told, num_prefilled


async def detokenize(conversations: Conversations, body: bytes) -> tuple[dict[str, Any], int]:
    """Return the text of a request's tokens, and how many were prefilled for that.

    Raises `Fault`, `TurnkeepError`.
    """
    tokens = decoded(_DETOKENIZE, body).tokens
    found, num_prefilled = await _prefilled(conversations, tokens=tokens) if tokens else ((), 0)
    parts = (one.token.encode() if one.bytes is None else bytes(one.bytes) for one in found)
    text = b"".join(parts).decode(errors="replace")
    return {"content": text, "prompt": text}, num_prefilled


async def _prefilled(conversations: Conversations, **prompt: Any) -> tuple[tuple[PromptToken, ...], int]:
    """Let the worker prefill a prompt in a temporary session, without an answer.

    Returns the prompt's tokens, and how many of them had no KV yet.
    """
    name = new_name()
    try:
        result = await conversations.client.session(name).generate(**prompt, max_tokens=0, echo=True)
    finally:
        conversations.beside(conversations.forget(name))
    return result.prompt_logprobs, result.usage.prefilled_tokens
