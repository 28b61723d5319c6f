"""Crafted calls and results of a worker, and streams in parts, for the tests of each API's format."""

import json
from typing import Any

from turnkeep_client.messages import Called, CalledFunction, Generated, Seconds, Usage

#: The text of a tool call: the calling model's token 259; token 260 is its beginning.
TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
#: A bias of a request for which a tiny model's answer is letters, which come back as they were.
LETTERS = {str(token): 100 for token in range(68, 90)}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def generated(reason: str = "stop", *calls: tuple[str, str, str], **more: Any) -> Generated:
    """Return an answer with this finish reason, and with calls of these ids, names and arguments."""
    usage = Usage(
        prompt_tokens=10, cached_tokens=7, prefilled_tokens=3, completion_tokens=5, reasoning_tokens=2
    )
    seconds = Seconds(queued=0, prefill=0, first_token=0, total=0)
    made = tuple(Called(id=call_id, function=CalledFunction(name, text)) for call_id, name, text in calls)
    fields = {
        "text": "Yes.",
        "tokens": (1,),
        "finish_reason": reason,
        "tool_calls": made,
        "position": 3,
        **more,
    }
    return Generated(id="g", seq=1, usage=usage, seconds=seconds, kv_live_bytes=0, **fields)


def events(written: bytes | str) -> list[dict[str, Any]]:
    """Parse a stream's events; assert that the name of each named event equals its `type`."""
    text, found = written.decode() if isinstance(written, bytes) else written, []
    for one in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in one.split("\n"))
        if lines["data"] != "[DONE]":
            found.append(json.loads(lines["data"]))
            assert lines.get("event") == found[-1].get("type")
    return found
