"""A worker is killed in the middle of an answer, and a worker with another model serves its sessions."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from test_tools_served import model_with_tokens

from tests.parts import CHAT_TEMPLATE

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def tuned(endless_model: Path) -> Path:
    """The model `endless_model` with other weights."""
    folder = endless_model.with_name("tuned")
    if not folder.exists():
        shutil.copytree(endless_model, folder)
        weights = mx.load(str(folder / "model.safetensors"))
        (folder / "model.safetensors").unlink()
        mx.save_safetensors(
            str(folder / "model.safetensors"), {name: one * 1.5 for name, one in weights.items()}
        )
    return folder


@pytest.mark.parametrize("is_tuned", [True, False])
async def test_an_answer_interrupted_by_a_change_of_model_ends_and_the_session_continues(
    worker_process: Any, endless_model: Path, tuned: Path, tmp_path: Path, *, is_tuned: bool
) -> None:
    """The other model has other weights, or another tokenizer."""
    other = tuned if is_tuned else model_with_tokens(tmp_path / "other", CHAT_TEMPLATE, "<new>")
    process = worker_process(model=endless_model)
    process.start()
    async with await process.client() as client:
        session, text = client.session("s"), ""
        first = await session.generate(messages=[{"role": "user", "content": "One"}], max_tokens=8)
        answer = session.generate(messages=[{"role": "user", "content": "Two"}], max_tokens=50_000)
        async for piece in answer:
            text += piece.text
            if len(text) > 200 and process.command[process.command.index("--model") + 1] == str(
                endless_model
            ):
                process.kill()
                process.command[process.command.index("--model") + 1] = str(other)
                process.start()
        result = await answer
        assert (result.text, result.finish_reason) == (text, "model_changed")
        assert result.previous_model == first.model
        again = await session.generate(messages=[{"role": "user", "content": "Three"}], max_tokens=4)
        assert (again.model, again.previous_model) == (result.model, None)
        assert again.rewritten_from is None
        assert (result.rewritten_from == 0) != is_tuned
        info = await session.info()
        assert info.answered_by == again.model
        show = (sys.executable, "-m", "commands", "show", "s", "--nats", process.url, "--json")
        shown = await asyncio.to_thread(subprocess.run, show, capture_output=True, check=True, timeout=60)
        models = [turn["result"]["model"]["name"] for turn in json.loads(shown.stdout)["turns"]]
        assert models == [first.model.name, result.model.name, result.model.name]
