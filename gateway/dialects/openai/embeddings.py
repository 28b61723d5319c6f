"""Answers requests for embeddings in the formats of OpenAI and Ollama; the worker computes the vectors."""

from __future__ import annotations

from base64 import b64encode
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct

from gateway.turn import ALL_THAT_FITS, WholeNumber, as_whole, decoded, fault_of, refused, renamed
from turnkeep_client.errors import RequestFailedError

from .common import ANY
from .completions import prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.client import Client
    from turnkeep_client.messages import Embedded

_MOST_INPUTS: Final = 2048
#: Enough for several texts as long as the context, on a slow device.
_TIMEOUT_S: Final = 600.0


class EmbeddingsBody(Struct, frozen=True, kw_only=True):
    """A request to `/v1/embeddings`."""

    input: Any
    model: str | None = None
    dimensions: WholeNumber | None = None
    encoding_format: Literal["float", "base64"] | None = None
    #: Of vLLM: the most tokens of an input, -1 for those that fit the model.
    truncate_prompt_tokens: WholeNumber | None = None


class EmbedBody(Struct, frozen=True, kw_only=True):
    """A request to `/api/embed`."""

    model: str
    input: str | list[str] | None = None
    dimensions: WholeNumber | None = None
    truncate: bool | None = None


_ASKED: Final = msgspec.json.Decoder(EmbeddingsBody, dec_hook=as_whole)
_EMBED: Final = msgspec.json.Decoder(EmbedBody, dec_hook=as_whole)


async def embeddings(client: Client, body: bytes) -> tuple[dict[str, Any], int]:
    """Return OpenAI's answer with embeddings, and the number of tokens. Raises `Fault`, `TurnkeepError`."""
    asked, most = decoded(_ASKED, body), None
    if (given := asked.truncate_prompt_tokens) is not None:
        most = ALL_THAT_FITS if given == ANY else int(given)
        if most < 1:
            raise refused(f"truncate_prompt_tokens must be 1 or more, not {most}", "truncate_prompt_tokens")
    inputs = prompts(asked.input, _MOST_INPUTS, "input")
    found = await _found(client, inputs, asked.dimensions, most)
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
    began_s, asked = monotonic(), decoded(_EMBED, body)
    inputs = [asked.input] if isinstance(asked.input, str) else asked.input
    most = None if asked.truncate is False else ALL_THAT_FITS
    found = await _found(client, inputs, asked.dimensions or None, most) if asked.input and inputs else None
    num_tokens = sum(found.tokens) if found else 0
    took = {"total_duration": int((monotonic() - began_s) * 1e9), "load_duration": 0}
    vectors = found.floats if found else []
    return {"model": asked.model, "embeddings": vectors, **took, "prompt_eval_count": num_tokens}, num_tokens


async def _found(
    client: Client, inputs: Sequence[str | tuple[int, ...]], size: WholeNumber | None, most: int | None
) -> Embedded:
    """Return vectors of `size` numbers (default: all), each of the first `most` tokens of an input."""
    dimensions = None if size is None else int(size)
    if dimensions is not None and dimensions < 1:
        raise refused(f"dimensions must be 1 or more, not {dimensions}", "dimensions")
    try:
        return await client.embed(inputs, dimensions=dimensions, input_tokens=most, timeout_s=_TIMEOUT_S)
    except RequestFailedError as error:
        fault = fault_of(error)
        raise (renamed(fault, {"inputs": "input"}) if fault.param else fault) from None
