"""A session with images answers exactly as mlx-vlm does, however its prompt is cut, stored and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import engine_process
import mlx.core as mx
import numpy as np
import pytest
import tiny_seeing
from tiny_models import GREEDY, answer, key
from tiny_seeing import CONFIGS, picture

from cache.names.policy import FULL, Policy
from cache.names.tokens import Tokens
from worker.batch.row_sampler import Sampling
from worker.device.request import TurnRequest
from worker.models import model
from worker.models.model import LoadedModel

FAMILIES = list(CONFIGS)


class Seeing(NamedTuple):
    """A tiny model as the worker loads it, and mlx-vlm's with the same weights."""

    kind: str
    loaded: LoadedModel
    direct: Any

    def prompt(self, text: str, *images: bytes) -> Tokens:
        """Return a prompt's tokens; `@` stands for the next image."""
        eyes = self.loaded.sight.eyes
        written = text.replace("@", tiny_seeing.PLACEHOLDER.get(self.kind, "<image>"))
        ids = self.loaded.tokenizer.encode(written, at_start=True)
        return eyes.placed(ids, [eyes.read(image) for image in images])

    def embeddings(self, tokens: Tokens, images: Sequence[bytes]) -> mx.array:
        """Return mlx-vlm's input embeddings of a prompt, from all its images at once."""
        views = [view for image in images for view in self.loaded.sight.eyes.views(image)]
        axis = 1 if self.kind in ("idefics3", "smolvlm") else 0
        arrays = {
            name: mx.array(np.concatenate([view.arrays[name] for view in views], axis))
            for name in (views[0].arrays if views else ())
        }
        found: mx.array = self.direct.get_input_embeddings(_array(tokens), **arrays).inputs_embeds
        return found

    def answer(self, tokens: Tokens, images: Sequence[bytes], num: int) -> list[int]:
        """Return mlx-vlm's greedy answer, from a pass over everything for each token."""
        rows, found = self.embeddings(tokens, images), list[int]()
        for _ in range(num):
            ids = _array([*tokens.ids(), *found])
            logits = self.direct.language_model(ids, inputs_embeds=rows).logits[0, -1]
            found.append(int(mx.argmax(logits).item()))
            row = self.direct.get_input_embeddings(_array(found[-1:])).inputs_embeds
            rows = mx.concatenate([rows, row], axis=1)
        return found


def _array(ids: Iterable[int]) -> mx.array:
    return mx.array([[*ids]])


_made: dict[str, Seeing] = {}


@pytest.fixture
def seeing(tmp_path_factory) -> Callable[[str], Seeing]:
    """Return a function that makes a tiny model of a family, once for the whole test run."""

    def make(kind: str) -> Seeing:
        if kind not in _made:
            folder = tmp_path_factory.mktemp(kind) / "tiny"
            direct = tiny_seeing.write(kind, folder)
            _made[kind] = Seeing(kind, model.load(folder, dtype="float32"), direct)
        return _made[kind]

    return make


class Reader:
    """Reads images by their fingerprints, and counts how often."""

    def __init__(self, seen: Seeing, *images: bytes) -> None:
        self.files = {seen.loaded.sight.eyes.read(image).fingerprint: image for image in images}
        self.num = 0

    async def __call__(self, fingerprint: bytes) -> bytes:
        self.num += 1
        return self.files[fingerprint]


@pytest.fixture
def open_process(trials, tmp_path) -> Callable[..., Any]:
    def open_(seen: Seeing, folder: str = "snapshots", **options: Any) -> Any:
        return engine_process.open_process(
            seen.loaded.model, tmp_path / folder, trials=trials, seeing=seen.loaded, **options
        )

    return open_


async def generate(
    process: Any,
    tokens: Tokens,
    num: int,
    read: Reader,
    *,
    name: str = "s",
    sampling: Sampling = GREEDY,
    policy: Policy = FULL,
) -> tuple[Any, list[int]]:
    growing = answer(num)
    request = TurnRequest(
        key(name), tokens, answer=growing, sampling=sampling, policy=policy, read_image=read
    )
    outcome = await process.engine.run(request, lambda: False)
    return outcome, growing.tokens


@pytest.mark.parametrize("kind", FAMILIES)
async def test_an_answer_about_an_image_is_mlx_vlms(seeing, open_process, kind) -> None:
    seen, image = seeing(kind), picture(1)
    tokens = seen.prompt("Look: @ What is it?", image)
    async with open_process(seen) as process:
        outcome, found = await generate(process, tokens, 8, Reader(seen, image))
    assert found == seen.answer(tokens, (image,), 8)
    assert outcome.num_prefilled == len(tokens)
    assert found != seen.answer(tokens, (picture(2),), 8), "the answer depends on the picture"
