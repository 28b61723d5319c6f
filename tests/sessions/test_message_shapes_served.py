"""Requests as OpenAI's clients write them, served by a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raw_wire import Wire, generate

from tests.parts import CHAT_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    Start = Callable[..., Awaitable[Wire]]


async def test_a_conversation_with_tool_calls_and_parts_is_rendered_and_survives_a_restart(
    wire: Start, model_with_template: Callable[[str, str], Path]
) -> None:
    """Also with a template that joins a content to what stands around it, as most do."""
    joining = CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ '' + message['content'] }}")
    model = str(model_with_template("joining", joining))
    w = await wire(model=model)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "How is "}, {"type": "text", "text": "Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    first = await w.send("s", generate("a", messages=chat, stop="never said"))
    assert first["type"] == "generated"
    rendered = sum(len(f"<{role}\n{said}>\n") for role, said in (("user", "How is Rome?"), ("tool", "sunny")))
    called = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    rendered += len(f"<assistant\n{called}>\n") + len("<assistant\n")
    assert first["usage"]["prompt_tokens"] == rendered
    await w.worker.stop()
    w = await wire(model=model)
    assert await w.position("s") == first["position"]
    assert (await w.send("s", generate("b", messages=chat[:1])))["type"] == "generated"
