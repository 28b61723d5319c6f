"""The paths of reranking, which other servers have under three versions of Cohere's and Jina's API."""

from __future__ import annotations

from typing import Final

from gateway.dialects.openai import common as openai
from gateway.http.handlers import Dialect, Handlers, Route

from .reranking import RerankBody, rerank

DIALECT: Final = Dialect(
    openai.error,
    "/rerank",
    [
        Route(
            f"{version}/rerank", ["POST"], Handlers.ask, rerank, "Cohere's reranking, and Jina's", RerankBody
        )
        for version in ("", "/v1", "/v2")
    ],
)
