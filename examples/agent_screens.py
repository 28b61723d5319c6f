"""An agent that looks at screenshots: each is the result of a tool, and stays in the session's log.

NATS_URL=$(turnkeep info --url) python agent_screens.py FIRST.png SECOND.png

Kill the worker or this program at any moment, and start it again: nothing is answered or stored twice.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from turnkeep_client import connect, image

SCREENS = {Path(name).name: Path(name) for name in sys.argv[1:]}


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    parameters = {**schema, "additionalProperties": False}
    return {"function": {"name": name, "description": description, "parameters": parameters}}


async def main() -> None:
    tools = [
        tool("look", "Shows a screenshot", screen={"enum": [*SCREENS]}),
        tool("answer", "Answers the user", text={"type": "string", "maxLength": 60}),
    ]
    async with connect(os.environ["NATS_URL"]) as client:
        session = client.session("screens")
        said: list[dict[str, Any]] = [{"role": "user", "content": "Which of the screens shows an error?"}]
        # A model that chooses tools by itself needs no `tool_choice`. One that does not see images
        # (`vision` in its metrics) is told so in place of each.
        for step, name in enumerate(["look"] * len(SCREENS) + ["answer"]):
            answer = await session.generate(
                messages=said,
                tools=tools,
                tool_choice={"function": {"name": name}},
                parallel_tool_calls=False,
                request_id=f"step-{step}",  # run again under this id, it gets the recorded answer
            )
            (call,) = answer.tool_calls
            print(call.function.name, call.function.arguments)
            if call.function.name == "answer":
                break
            screen = SCREENS[json.loads(call.function.arguments)["screen"]]
            said = [{"role": "tool", "tool_call_id": call.id, "content": [image(screen)]}]


asyncio.run(main())
