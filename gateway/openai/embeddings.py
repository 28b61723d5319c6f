"""Answers requests for embeddings in the formats of OpenAI and Ollama; the worker computes the vectors."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct

from gateway.turn import Whole, as_whole, decoded, refused

from .completions import prompts

if TYPE_CHECKING:
    from turnkeep_client.client import Client
    from turnkeep_client.messages import Embedded

_MOST_INPUTS: Final = 2048
#: Enough for several texts as long as the context, on a slow device.
_TIMEOUT_S: Final = 600.0


class Asked(Struct, frozen=True, kw_only=True):
    """A request to `/v1/embeddings`."""

    input: Any
    model: str | None = None
    dimensions: Whole | None = None
    encoding_format: Literal["float", "base64"] | None = None


class Embed(Struct, frozen=True, kw_only=True):
    """A request to `/api/embed`."""

    input: Any
    model: str
    dimensions: Whole | None = None


_ASKED: Final = msgspec.json.Decoder(Asked, dec_hook=as_whole)
_EMBED: Final = msgspec.json.Decoder(Embed, dec_hook=as_whole)


async def embeddings(client: Client, body: bytes) -> tuple[dict[str, Any], int]:
    """Return OpenAI's answer with embeddings, and the number of tokens. Raises `Fault`, `TurnkeepError`."""
    asked = decoded(_ASKED, body)
    found = await _found(client, asked)
    in_base64 = asked.encoding_format == "base64"
    vectors = [b64encode(one).decode() for one in found.vectors] if in_base64 else found.floats
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
    ]
    num_tokens = sum(found.tokens)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": asked.model or found.model, "usage": usage}, num_tokens


async def embed(client: Client, body: bytes) -> tuple[dict[str, Any], int]:
    """Return Ollama's answer with embeddings, and the number of tokens. Raises `Fault`, `TurnkeepError`."""
    asked = decoded(_EMBED, body)
    found = await _found(client, asked)
    num_tokens = sum(found.tokens)
    told = {"model": asked.model, "embeddings": found.floats, "prompt_eval_count": num_tokens}
    return told, num_tokens


async def _found(client: Client, asked: Asked | Embed) -> Embedded:
    dimensions = None if asked.dimensions is None else int(asked.dimensions)
    if dimensions is not None and dimensions < 1:
        raise refused(f"dimensions must be 1 or more, not {dimensions}", "dimensions")
    inputs = prompts(asked.input, _MOST_INPUTS, "input")
    return await client.embed(inputs, dimensions=dimensions, timeout_s=_TIMEOUT_S)
