"""Many questions about one text, which is prefilled once: each question goes to a fork of its session.

NATS_URL=$(turnkeep info --url) python fan_out.py [SESSION]

Kill the worker, or this program, at any moment, and start it again: no question is answered twice.
"""

import asyncio
import os
import sys

from turnkeep_client import connect
from turnkeep_client.messages import Generated
from turnkeep_client.session import Session

TEXT = " ".join(f"On day {day} the ferry left at {6 + day % 12} o'clock." for day in range(1, 40))
QUESTIONS = ["Who wrote this?", "When did it leave on day 3?", "What is it about?", "How did it end?"]


async def asked(trunk: Session, position: int, number: int) -> Generated:
    # The position is given, so that the fork is the same if this program is run again.
    fork = await trunk.fork(f"{trunk.key.session}-{number}", position, request_id="fork")
    question = [{"role": "user", "content": QUESTIONS[number]}]
    return await fork.generate(messages=question, request_id="ask", max_tokens=100)


async def main() -> None:
    async with connect(os.environ["NATS_URL"]) as client:
        trunk = client.session(sys.argv[1] if len(sys.argv) > 1 else "ferry")
        text = [{"role": "system", "content": f"Answer from this logbook. {TEXT}"}]
        begun = await trunk.append(messages=text, request_id="text")
        answers = await asyncio.gather(
            *(asked(trunk, begun.position, number) for number in range(len(QUESTIONS)))
        )
        for question, answer in zip(QUESTIONS, answers, strict=True):
            print(f"{question} {answer.text}")
            print(f"  {answer.usage.prefilled_tokens} of {answer.usage.prompt_tokens} tokens prefilled")


asyncio.run(main())
