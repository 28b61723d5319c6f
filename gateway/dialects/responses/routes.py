"""The paths of OpenAI's Responses API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gateway.dialects.openai import common as openai
from gateway.form import AnswerObject, Form
from gateway.http.handlers import Dialect, Handlers, Route, routes_of_answers

from . import answers, compacting, items, requests

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.logged_answers import LoggedAnswer
    from gateway.turn import ClientTurn


def _read(body: bytes, named: Mapping[str, LoggedAnswer]) -> ClientTurn:
    """Parse a request that refers to items of the answers `named`."""
    bodies = (
        answers.described(one.turn, answer_id, one.note.created, one.result)
        for answer_id, one in named.items()
        if one.note.is_kept
    )
    return requests.read(body, {item["id"]: item for answer in bodies for item in answer["output"]})


_PATH: Final = "/v1/responses"
_KIND: Final = requests.ResponsesBody
_RESPONSES: Final = Form(
    *(requests.NAME, requests.read, answers.whole, answers.ResponseEvents, openai.error, requests.NAMES),
    object=AnswerObject(answers.described, requests.answer_ids_in, _read),
    counted={"object": "response.input_tokens"},
)
_COMPACTING: Final = _RESPONSES._replace(
    name=compacting.NAME, read=compacting.read, whole=compacting.whole, object=None
)
_EVENTS: Final = "Its events, by the Durable Streams protocol"
_ITEMS: Final = "The items of an answer's conversation"

DIALECT: Final = Dialect(
    openai.error,
    _PATH,
    [
        Route(f"{_PATH}/input_tokens", ["POST"], Handlers.count, _RESPONSES, "Count its tokens", _KIND),
        Route(f"{_PATH}/compact", ["POST"], Handlers.answer, _COMPACTING, "Sum up a conversation", _KIND),
        *routes_of_answers(_PATH, _RESPONSES, "OpenAI's Responses API", _KIND),
        Route(f"{_PATH}/{{id}}/stream", ["GET"], Handlers.durable, _RESPONSES, _EVENTS),
        Route(f"{_PATH}/{{id}}/input_items", ["GET"], Handlers.part, (_RESPONSES, items.page), _ITEMS),
    ],
)
