"""A Temporal activity that asks a model: each retry joins the answer that runs, or gets the recorded one.

Needs `pip install temporalio openai`, a Temporal server (`temporal server start-dev`), a worker
(`turnkeep serve`), and `turnkeep gateway`.
python temporal_activity.py [NAME [URL [TEMPORAL]]]

Kill this program, the worker or the gateway in the middle of the answer, and start it again: the answer
goes on.
"""

import asyncio
import sys
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.worker import Worker

with workflow.unsafe.imports_passed_through():
    from openai import AsyncOpenAI

GIVEN = dict(enumerate(sys.argv[1:]))
NAME, URL = GIVEN.get(0, "essay-1"), GIVEN.get(1, "http://127.0.0.1:8080/v1")
TEMPORAL = GIVEN.get(2, "localhost:7233")


@activity.defn
async def ask(question: str) -> str:
    # The same name in each attempt: without it, each one would begin again at the first token.
    key = f"{activity.info().workflow_run_id}-{activity.info().activity_id}"
    text = ""
    async with AsyncOpenAI(base_url=URL, api_key="none") as model:
        stream = await model.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": question}],
            max_tokens=1000,
            stream=True,
            extra_headers={"Idempotency-Key": key},
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or "" if chunk.choices else ""
            activity.heartbeat(len(text))
    return text


@workflow.defn
class Essay:
    @workflow.run
    async def run(self, question: str) -> str:
        # An attempt that is silent for so long counts as dead. The next one joins the answer all the same.
        silence, most = timedelta(seconds=10), timedelta(hours=1)
        return await workflow.execute_activity(
            ask, question, heartbeat_timeout=silence, start_to_close_timeout=most
        )


async def main() -> None:
    client = await Client.connect(TEMPORAL)
    async with Worker(client, task_queue="essays", workflows=[Essay], activities=[ask]):
        essay = await client.start_workflow(
            Essay.run,
            "Write a long essay about rain.",
            id=NAME,
            task_queue="essays",
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        )
        print(await essay.result())


if __name__ == "__main__":  # Temporal imports this file again, to run the workflow apart from all else
    asyncio.run(main())
