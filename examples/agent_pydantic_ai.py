"""An agent of pydantic-ai through the gateway, which finds its conversation again at each step and turn.

Needs `pip install 'pydantic-ai-slim[openai]'`, a worker (`turnkeep serve`), and `turnkeep gateway`.
python agent_pydantic_ai.py [URL]

Kill the worker in the middle of an answer, and start it again: the answer goes on.
"""

import asyncio
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

WEATHER = {"Rome": "sunny, 24 degrees", "Oslo": "rain, 9 degrees"}
URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080/v1"


class Answer(BaseModel):
    text: Annotated[str, Field(max_length=60)]


class Chosen(AbstractCapability[None]):
    """Names the tool of each step, for the packaged model is too small to choose. Others do without."""

    def get_model_settings(self) -> Any:
        names = ["weather", "final_result"]
        return lambda context: {"tool_choice": [names[context.run_step - 1]], "parallel_tool_calls": False}


async def main() -> None:
    model = OpenAIChatModel("turnkeep", provider=OpenAIProvider(base_url=URL, api_key="none"))
    agent = Agent(model, output_type=Answer, capabilities=[Chosen()])

    @agent.tool_plain
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather in a city."""
        return WEATHER[city]

    rome = await agent.run("What is the weather in Rome?")
    oslo = await agent.run("And in Oslo?", message_history=rome.all_messages())
    print(rome.output.text, oslo.output.text, sep="\n")
    print(f"{oslo.usage.cache_read_tokens} of {oslo.usage.input_tokens} tokens were not prefilled again")


asyncio.run(main())
