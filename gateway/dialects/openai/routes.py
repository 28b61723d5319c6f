"""The paths of OpenAI's chat completions, completions, embeddings and models."""

from __future__ import annotations

from typing import Final

from gateway.form import Form
from gateway.http.handlers import Dialect, Handlers, Route, routes_of_answers

from . import chat, completions, embeddings, models
from . import common as openai

_CHAT: Final = Form("chat.completion", chat.read, chat.whole, chat.ChatEvents, openai.error)
_COMPLETIONS: Final = Form(
    *("text_completion", completions.read, completions.whole, completions.CompletionEvents, openai.error),
    completions.NAMES,
)
_EMBED: Final = embeddings.embeddings

DIALECT: Final = Dialect(
    openai.error,
    "/v1/",
    [
        *routes_of_answers("/v1/chat/completions", _CHAT, "OpenAI's chat completions", chat.ChatBody),
        *routes_of_answers(
            "/v1/completions", _COMPLETIONS, "OpenAI's completions", completions.CompletionBody
        ),
        Route(
            "/v1/embeddings", ["POST"], Handlers.ask, _EMBED, "OpenAI's embeddings", embeddings.EmbeddingsBody
        ),
        Route("/v1/models", ["GET"], Handlers.models, models.page, "The models"),
        Route("/v1/models/{model:path}", ["GET"], Handlers.model, models.described, "One model"),
    ],
)
