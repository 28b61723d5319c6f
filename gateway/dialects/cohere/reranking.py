"""Answers reranking requests in the formats of Cohere and Jina; the worker scores the documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

import msgspec
from msgspec import Struct

from gateway.turn import ALL_THAT_FITS, WholeNumber, as_whole, decoded, refused

if TYPE_CHECKING:
    from turnkeep_client.client import Client

_MOST_DOCUMENTS: Final = 1000
#: Enough for several documents as long as the context, on a slow device.
_TIMEOUT_S: Final = 600.0


class _Document(Struct, frozen=True):
    text: str


class RerankBody(Struct, frozen=True, kw_only=True):
    """A request to `/v1/rerank` or `/v2/rerank`; a document is a text, or an object with a `text`."""

    query: str
    documents: list[str | _Document]
    model: str | None = None
    top_n: WholeNumber | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: WholeNumber | None = None
    truncation: bool | None = None
    instruction: str | None = None


_ASKED: Final = msgspec.json.Decoder(RerankBody, dec_hook=as_whole)


async def rerank(client: Client, body: bytes) -> tuple[dict[str, Any], int]:
    """Score a request's documents; return the response, best documents first, and the number of tokens.

    Raises `Fault`, `TurnkeepError`.
    """
    asked = decoded(_ASKED, body)
    for name in ("top_n", "max_tokens_per_doc"):
        if (given := getattr(asked, name)) is not None and given < 1:
            raise refused(f"{name} must be 1 or more, not {given}", name)
    if not 1 <= len(asked.documents) <= _MOST_DOCUMENTS:
        why = f"a request has 1 to {_MOST_DOCUMENTS} documents, not {len(asked.documents)}"
        raise refused(why, "documents")
    most = asked.max_tokens_per_doc or (ALL_THAT_FITS if asked.truncation else None)
    texts = [one if isinstance(one, str) else one.text for one in asked.documents]
    found = await client.rerank(
        asked.query,
        texts,
        instruction=asked.instruction,
        document_tokens=most and int(most),
        timeout_s=_TIMEOUT_S,
    )
    best = sorted(range(len(texts)), key=lambda index: -found.scores[index])
    results = [
        {"index": index, "relevance_score": found.scores[index]}
        | ({"document": {"text": texts[index]}} if asked.return_documents else {})
        for index in best[: asked.top_n and int(asked.top_n)]
    ]
    num_tokens = sum(found.tokens)
    return {
        "id": str(uuid4()),
        "model": asked.model or found.model,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }, num_tokens
