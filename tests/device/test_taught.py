"""Answers about pictures of a taught model: alone, in a batch of eight, after a restart from disk."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, Final

import engine_process
import pytest
from jinja2 import Template
from tiny_models import Endless

from cache.names.tokens import Tokens
from tests import taught
from tests.matrices import first
from turnkeep_client.subjects import SessionKey
from worker.device.request import TurnRequest
from worker.model_start import WorkerError
from worker.models import model
from worker.models.model import LoadedModel
from worker.process.constants import CONSTANTS
from worker.process.settings import Settings
from worker.text.answer import Answer
from worker.weighing import weigh

_MOST: Final = 12


@pytest.fixture(scope="module")
def loaded(taught_model: Path) -> LoadedModel:
    found = model.load(taught_model, dtype="float32")
    assert not isinstance(found.vision_model, str), found.vision_model
    return found


def prompt(loaded: LoadedModel, text: str, *files: bytes) -> Tokens:
    """Return the prompt of a user's message: the text, then the pictures."""
    assert not isinstance(loaded.vision_model, str)
    image_processor = loaded.vision_model.processor
    parts = [{"type": "text", "text": text}, *({"type": "image"} for _ in files)]
    template = Template(taught.CHAT_TEMPLATE)
    written = template.render(messages=[{"role": "user", "content": parts}], add_generation_prompt=True)
    read = [(one.digest.hex(), one.grid) for one in map(image_processor.read, files)]
    ids = loaded.tokenizer.encode(
        image_processor.written(written, [grid for _, grid in read]), at_start=False
    )
    return image_processor.found(ids, read)


async def said(process: Any, loaded: LoadedModel, name: str, tokens: Tokens, *files: bytes) -> str:
    """Return the answer to a prompt with the pictures `files`."""
    assert not isinstance(loaded.vision_model, str)
    known = {loaded.vision_model.processor.read(file).fingerprint: file for file in files}

    async def read(fingerprint: bytes) -> bytes:
        return known[fingerprint]

    growing = Answer(Endless(), max_tokens=_MOST, max_bytes=1 << 20, end_tokens=loaded.tokenizer.eos_ids)
    request = TurnRequest(SessionKey("default", name), tokens, answer=growing, read_image=read)
    await process.engine.run(request, lambda: False)
    return loaded.tokenizer.decode(
        [token for token in growing.tokens if token not in loaded.tokenizer.eos_ids]
    )


@pytest.mark.parametrize("num", first([48, 200]))
async def test_pictures_are_named_alone_in_a_batch_and_after_a_restart(
    loaded: LoadedModel, taught_model: Path, trials: Path, tmp_path: Path, num: int
) -> None:
    pictures = [taught.picture(seed) for seed in range(num)]
    prompts = [prompt(loaded, "What is this?", each.file) for each in pictures]
    load = partial(model.load, taught_model, dtype="float32")

    def open_(name: str) -> Any:
        return engine_process.open_process(None, tmp_path / name, trials=trials, load=load, max_batch=8)

    async with open_("alone") as process:
        alone = [
            await said(process, loaded, f"s{i}", tokens, each.file)
            for i, (tokens, each) in enumerate(zip(prompts, pictures, strict=True))
        ]
        await process.store.queue.drained(20)
    right = [found == each.answer for found, each in zip(alone, pictures, strict=True)]
    assert sum(right) >= num * 0.95, "the weights are those of this renderer"
    async with open_("batch") as process:
        together = []
        for start in range(0, num, 8):
            some = range(start, min(start + 8, num))
            turns = [said(process, loaded, f"s{i}", prompts[i], pictures[i].file) for i in some]
            together += await asyncio.gather(*turns)
    assert together == alone
    async with open_("alone") as process:
        again = [await said(process, loaded, f"again {i}", tokens) for i, tokens in enumerate(prompts)]
    assert again == alone, "from disk, without the pictures"


async def test_a_prompt_without_a_picture_is_answered_so(
    loaded: LoadedModel, taught_model: Path, trials: Path, tmp_path: Path
) -> None:
    load = partial(model.load, taught_model, dtype="float32")
    async with engine_process.open_process(None, tmp_path / "s", trials=trials, load=load) as process:
        assert await said(process, loaded, "s", prompt(loaded, "What is this?")) == taught.NO_PICTURE


async def test_the_memory_that_a_model_needs_has_room_for_images(
    local_worker: Any, taught_model: Path, tmp_path: Path
) -> None:
    least_bytes = weigh(Settings(data_dir=tmp_path, model=str(taught_model))).least_bytes
    given = {"model": str(taught_model), "block_tokens": CONSTANTS.block_tokens}
    await (await local_worker(**given, device_memory=least_bytes)).stop()
    with pytest.raises(WorkerError, match="leaves no room for KV"):
        await local_worker(**given, device_memory=least_bytes - 2**16)
