"""An agent loop with tools in plain nats-py: all of the protocol that an agent needs.

NATS_URL=$(turnkeep info --url) python agent_nats.py [SESSION]

Kill the worker or this program at any moment, and start it again: no step is answered twice.
"""

import asyncio
import json
import os
import sys
from typing import Any

import nats
import nats.errors
from nats.aio.client import Client

WEATHER = {"Rome": "sunny, 24 degrees", "Oslo": "rain, 9 degrees"}


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    parameters = {**schema, "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    tool("weather", "The weather in a city", city={"enum": [*WEATHER]}),
    tool("answer", "Answers the user", text={"type": "string", "maxLength": 60}),
]


async def result_of(nc: Client, session: str, request: dict[str, Any]) -> dict[str, Any]:
    """Put a request into the session's log, and return its result."""
    subject, body = f"turnkeep.default.{session}", json.dumps(request).encode()
    results = await nc.subscribe(f"{subject}.out")
    while True:
        ack = await nc.jetstream().publish(f"{subject}.in", body)
        try:
            while True:
                result: dict[str, Any] = json.loads((await results.next_msg(timeout=60)).data)
                if result["seq"] == ack.seq:
                    await results.unsubscribe()
                    return result
        except nats.errors.TimeoutError:
            continue  # the same id again: a request that was answered meanwhile gets the same result


async def main() -> None:
    session = sys.argv[1] if len(sys.argv) > 1 else "agent-nats"
    nc = await nats.connect(os.environ["NATS_URL"])
    said = [{"role": "user", "content": "What is the weather in Rome?"}]
    # The packaged model is too small to choose a tool, so each step names one. A larger model gets
    # `"tool_choice": "required"` in every step, and calls `answer` when it knows enough.
    for step, name in enumerate(["weather", "answer"]):
        choice = {"type": "function", "function": {"name": name}}
        request = {"type": "generate", "id": f"step-{step}", "messages": said, "tools": TOOLS}
        result = await result_of(
            nc, session, {**request, "tool_choice": choice, "parallel_tool_calls": False}
        )
        if result["type"] == "failed":
            sys.exit(result["message"])
        (call,) = result["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        print(call["function"]["name"], arguments)
        if call["function"]["name"] == "answer":
            break
        said = [{"role": "tool", "tool_call_id": call["id"], "content": WEATHER[arguments["city"]]}]
    await nc.close()


asyncio.run(main())
