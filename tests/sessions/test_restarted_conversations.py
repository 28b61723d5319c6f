"""Real conversations with the packaged model have the same tokens with a restart after every turn."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from pathlib import Path
from typing import Final
from uuid import uuid4

import pytest

from bench.local import LocalWorker

NUM_CONVERSATIONS: Final = 50
TURNS: Final = 3
MAX_TOKENS: Final = 16
TIMEOUT_S: Final = 60.0

pytestmark = [
    pytest.mark.model,
    pytest.mark.process,
    pytest.mark.soak,
    pytest.mark.timeout(3600),
]


def conversations() -> list[list[str]]:
    """Return, for the first chats with enough turns, the texts of the person who wrote first."""
    try:
        package = importlib.metadata.distribution("chitchat-dataset")
    except importlib.metadata.PackageNotFoundError as error:
        pytest.skip(f"{error} is not installed; make setup installs it")
    file = Path(str(package.locate_file("chitchat_dataset/dataset.json")))
    found = []
    for chat in json.loads(file.read_bytes()).values():
        turns = [turn for turn in chat["messages"] if turn]
        mine = [turn for turn in turns if turn[0]["sender"] == turns[0][0]["sender"]]
        texts = ["\n".join(message["text"] for message in turn).strip() for turn in mine]
        found.append([text for text in texts if text])
    return [chat for chat in found if len(chat) >= TURNS][:NUM_CONVERSATIONS]


async def turn(worker: LocalWorker, chats: list[list[str]], number: int) -> list[tuple[int, ...]]:
    """Run turn `number` of all conversations, one after the other; every second one is sampled."""
    client = await worker.ready("default")
    try:
        answers = []
        for index, chat in enumerate(chats):
            generated = await client.session(f"c{index}").generate(
                messages=[{"role": "user", "content": chat[number]}],
                max_tokens=MAX_TOKENS,
                temperature=0.7 * (index % 2),
                seed=index,
                id=f"turn-{number}",
                timeout_s=TIMEOUT_S,
            )
            answers.append(tuple(generated.tokens))
        return answers
    finally:
        await client.close()


async def test_a_worker_restarted_after_every_turn_answers_with_the_tokens_of_one_never_restarted(
    packaged_folder: Path, tmp_path: Path
) -> None:
    chats = conversations()
    assert len(chats) == NUM_CONVERSATIONS
    steady = LocalWorker(tmp_path / f"steady-{uuid4().hex}", "--model", str(packaged_folder))
    restarted = LocalWorker(tmp_path / f"restarted-{uuid4().hex}", "--model", str(packaged_folder))
    try:
        steady.start()
        for number in range(TURNS):
            restarted.start()
            expected = await turn(steady, chats, number)
            assert await turn(restarted, chats, number) == expected, f"turn {number}"
            await asyncio.to_thread(restarted.kill if number % 2 else restarted.stop)
    finally:
        await asyncio.to_thread(steady.stop)
        await asyncio.to_thread(restarted.stop)
