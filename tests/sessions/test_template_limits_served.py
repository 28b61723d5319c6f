"""A chat template that never ends delays neither its own session nor others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from raw_wire import Start, append, generate

from tests.parts import CHAT_TEMPLATE

SPINS = (
    "{% for m in messages if m['content'] in ['spin', 'spin later' if add_generation_prompt else ''] %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
)


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


async def test_a_message_on_which_the_template_never_ends_is_refused_and_the_session_continues(
    wire: Start, model_with_template: Callable[[str, str], Path]
) -> None:
    """It never ends for some message, or for an answer's header. Other sessions are answered meanwhile."""
    w = await wire(model=str(model_with_template("spinning", SPINS + CHAT_TEMPLATE)))
    await w.send("s", {"type": "append", "id": "a", "messages": said("hello")})
    await w.send("later", {"type": "append", "id": "a", "messages": said("spin later")})
    spinning = [
        await w.publish("s", generate("b", messages=said("spin"))),
        await w.publish("later", generate("b")),
    ]
    others = [await w.publish(f"other-{i}", append("a")) for i in range(20)]
    refused, *served = await asyncio.gather(*(w.result(seq) for seq in (*spinning, *others)))
    for result in (refused, served[0]):
        assert (result["type"], result["code"]) == ("failed", "invalid_request")
        assert "it takes more than 5000000 steps" in result["message"]
    assert {result["type"] for result in served[1:]} == {"appended"}
    assert (await w.send("s", generate("c", messages=said("go on"))))["type"] == "generated"
