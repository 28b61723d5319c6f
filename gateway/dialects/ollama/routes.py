"""The paths of Ollama's API, and LM Studio's list of models, which is beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gateway.dialects.openai import embeddings
from gateway.form import Form
from gateway.http.handlers import Dialect, Handlers, Route
from turnkeep_client import __version__

from . import answers, requests

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.turn import ClientTurn


def _form(name: str, read: Callable[[bytes], ClientTurn], words: answers.AnswerWriter) -> Form:
    return Form(
        *(f"ollama.{name}", read, words.whole, words.events, answers.error, requests.NAMES, answers.NDJSON),
        loading=requests.loading,
    )


def _version(_path: Mapping[str, str]) -> dict[str, Any]:
    return {"version": __version__}


_CHAT: Final = _form("chat", requests.chat, answers.CHAT)
_PROMPT: Final = _form("generate", requests.generate, answers.GENERATE)
_LOADED: Final = "The models that are loaded, as Ollama lists them"
_EMBED: Final = embeddings.embed
_REFUSED: Final = "Refused: models are managed beside the gateway"
_STUDIO: Final = "The models, as LM Studio lists them"

DIALECT: Final = Dialect(
    answers.error,
    "/api/",
    [
        Route("/api/chat", ["POST"], Handlers.answer, _CHAT, "Ollama's chat", requests.ChatBody),
        Route("/api/generate", ["POST"], Handlers.answer, _PROMPT, "Ollama's answer", requests.GenerateBody),
        Route("/api/embed", ["POST"], Handlers.ask, _EMBED, "Ollama's embeddings", embeddings.EmbedBody),
        Route("/api/tags", ["GET"], Handlers.models, answers.tags, "The models, as Ollama lists them"),
        Route("/api/ps", ["GET"], Handlers.models, answers.running, _LOADED),
        Route("/api/show", ["POST"], Handlers.model, answers.description, "A model, as Ollama describes it"),
        Route("/api/version", ["GET"], Handlers.fixed, _version, "The version"),
        Route("/api/v0/models", ["GET"], Handlers.models, answers.page_v0, _STUDIO),
        Route("/api/{name}", ["POST", "DELETE"], Handlers.fixed, requests.refuse, _REFUSED),
    ],
)
