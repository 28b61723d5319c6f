"""The same agent by the client library; in the end it prints the conversation from the log.

NATS_URL=$(turnkeep info --url) python agent.py [SESSION]

Kill the worker or this program at any moment, and start it again: no step is answered twice.
"""

import asyncio
import json
import os
import sys
from typing import Any

from turnkeep_client import connect

WEATHER = {"Rome": "sunny, 24 degrees", "Oslo": "rain, 9 degrees"}


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    parameters = {**schema, "additionalProperties": False}
    return {"function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("weather", "The weather in a city", city={"enum": [*WEATHER]}),
    tool("answer", "Answers the user", text={"type": "string", "maxLength": 60}),
]


async def main() -> None:
    async with connect(os.environ["NATS_URL"]) as client:
        session = client.session(sys.argv[1] if len(sys.argv) > 1 else "agent")
        said = [{"role": "user", "content": "What is the weather in Rome?"}]
        # The packaged model is too small to choose a tool, so each step names one. With a larger model, and
        # the tool `weather` alone, `turnkeep_client.run_tools` is this loop.
        for step, name in enumerate(["weather", "answer"]):
            answer = await session.generate(
                messages=said,
                tools=TOOLS,
                tool_choice={"function": {"name": name}},
                parallel_tool_calls=False,
                request_id=f"step-{step}",  # run again under this id, it gets the recorded answer
            )
            (call,) = answer.tool_calls
            if call.function.name == "answer":
                break
            found = WEATHER[json.loads(call.function.arguments)["city"]]
            said = [{"role": "tool", "tool_call_id": call.id, "content": found}]

        for turn in (await session.history()).turns:
            for message in turn.messages:
                calls = [
                    f"{call.function.name} {call.function.arguments}" for call in message.tool_calls or ()
                ]
                print(f"{message.role}:", message.content, *calls)
            print(f"  tokens {turn.start} to {turn.position}")


asyncio.run(main())
