"""The paths of reranking, which other servers have under three versions of Cohere's and Jina's API."""

from __future__ import annotations

from typing import Final

from gateway.http.handlers import Dialect, Handlers, Route
from gateway.openai import common as openai

from .reranking import Asked, rerank

DIALECT: Final = Dialect(
    openai.error,
    "/rerank",
    [
        Route(f"{version}/rerank", ["POST"], Handlers.ask, rerank, "Jina's and Cohere's reranking", Asked)
        for version in ("", "/v1", "/v2")
    ],
)
