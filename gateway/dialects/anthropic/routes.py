"""The paths of Anthropic's Messages API."""

from __future__ import annotations

from functools import partial
from typing import Final

from gateway.form import Form
from gateway.http.handlers import Dialect, Handlers, Route, routes_of_answers

from . import common as anthropic
from . import messages

_PATH: Final = "/v1/messages"
_KIND: Final = messages.MessagesBody
_MESSAGES: Final = Form(
    *("message", messages.read, messages.whole, messages.MessageEvents, anthropic.error, messages.NAMES)
)
_COUNTED: Final = _MESSAGES._replace(read=partial(messages.read, is_counted=True))

DIALECT: Final = Dialect(
    anthropic.error,
    _PATH,
    [
        Route(f"{_PATH}/count_tokens", ["POST"], Handlers.count, _COUNTED, "Count a prompt's tokens", _KIND),
        # Before the routes of answers: "batches" is no answer's id.
        Route(f"{_PATH}/batches", ["GET", "POST"], Handlers.absent, None, "Refused: there are no batches"),
        *routes_of_answers(_PATH, _MESSAGES, "Anthropic's Messages API", _KIND),
    ],
    header="anthropic-version",
    key_header="x-api-key",
)
