"""Translates `/v1/responses/compact`, where the model shortens a conversation to a summary. Pure.

The client gets the summary as an opaque item, which `items` decodes when the client sends it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.turn import ClientTurn, decoded, refused
from turnkeep_client.images import files_of

from . import requests
from .answers import usage_of
from .items import items_of, sealed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.messages import Generated

NAME: Final = "response.compaction"
_BODY: Final = msgspec.json.Decoder(dict[str, Any])
#: The limit of a summary's tokens; a longer one saves little.
_MOST_TOKENS: Final = 4096
_ASKED: Final = (
    "Sum up this conversation so that you can go on with it from your summary and my messages alone. Keep"
    " what was asked, decided, done and found, with names, paths and numbers as they are, and what is left to"
    " do. Write nothing but the summary."
)


def read(body: bytes) -> ClientTurn:
    """Parse a request into a `ClientTurn` whose last message asks for a summary. Raises `Fault`."""
    given = {name: value for name, value in decoded(_BODY, body).items() if value is not None}
    said = given.get("input") or []
    if not said and not given.get("previous_response_id"):
        raise refused("input is empty", "input")
    said = [{"role": "user", "content": said}] if isinstance(said, str) else said
    asked = [*said, {"role": "user", "content": _ASKED}] if isinstance(said, list) else said
    fixed = {"input": asked, "stream": False, "background": False, "store": False}
    return requests.read(msgspec.json.encode({"max_output_tokens": _MOST_TOKENS} | given | fixed))


def whole(turn: ClientTurn, answer_id: str, created: int, results: Sequence[Generated]) -> dict[str, Any]:
    """Return the JSON body with the compacted conversation: all messages of the user, then the summary."""
    (result,) = results
    users = [one for one in (turn.messages or ())[:-1] if one.role == "user"]
    kept = [
        item
        for number, one in enumerate(users)
        for item in items_of(one, f"{answer_id}_{number}", files_of(turn))
    ]
    summary = {"id": f"cmp_{answer_id}", "type": "compaction", "encrypted_content": sealed(result.text)}
    return {
        "id": answer_id,
        "object": NAME,
        "created_at": created,
        "output": [*kept, summary],
        "usage": usage_of(result),
    }
