"""A session with images answers exactly as mlx-vlm does, however its prompt is cut, stored and restored."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import tiny_seeing
from PIL import Image
from tiny_models import BLOCK, answer
from tiny_seeing import FAMILIES, picture
from transformers import PreTrainedTokenizerFast

from cache.kv import layers
from cache.names.policy import CHUNK, SLACK, Policy
from cache.names.tokens import Tokens, as_tokens
from turnkeep_client.subjects import SessionKey
from worker.batch import batch_kinds
from worker.batch.forward import Forward
from worker.batch.image_rows import ImageRows
from worker.batch.rows import Embedding, PrefillPiece
from worker.device import vision
from worker.device.request import NoMemoryError, TurnRequest
from worker.engine.port import DeviceFaultError, TurnResult
from worker.model_start import WorkerError
from worker.models import model
from worker.models.model import LoadedModel
from worker.models.template_support import TemplateError
from worker.process.constants import CONSTANTS
from worker.process.settings import Settings
from worker.weighing import weigh


class Seeing(NamedTuple):
    """A tiny model in a folder, as the worker loads it, and mlx-vlm's with the same weights."""

    kind: str
    folder: Path
    loaded: LoadedModel
    direct: Any

    def prompt(self, text: str, *images: bytes) -> Tokens:
        """Return a prompt's tokens; `@` stands for the next image."""
        image_processor = self.loaded.vision_model.processor
        read = [(one.digest.hex(), one.grid) for one in map(image_processor.read, images)]
        placeholder = tiny_seeing.PLACEHOLDER.get(self.kind, image_processor.image)
        written = image_processor.written(text.replace("@", placeholder), [grid for _, grid in read])
        return image_processor.found(self.loaded.tokenizer.encode(written, at_start=True), read)

    def embeddings(self, tokens: Tokens, images: Sequence[bytes]) -> Any:
        """Return mlx-vlm's input embeddings of a prompt, and their positions, from all images at once."""
        views = [view for image in images for view in self.loaded.vision_model.processor.views(image)]
        axis = 1 if self.kind in ("idefics3", "smolvlm", "wide") else 0
        arrays = {}
        for name in views[0].arrays if views else ():
            found = [view.arrays[name] for view in views]
            sides = np.max([one.shape for one in found], axis=0)
            gaps = [(sides - one.shape) * (np.arange(one.ndim) != axis) for one in found]
            padded = [np.pad(one, [(0, n) for n in gap]) for one, gap in zip(found, gaps, strict=True)]
            arrays[name] = mx.array(np.concatenate(padded, axis))
        if self.kind in GEMMA4 and views:
            arrays = {"pixel_values": [mx.array(view.arrays["pixel_values"][0]) for view in views]}
        return self.direct.get_input_embeddings(_array(tokens), mask=_array([1] * len(tokens)), **arrays)

    def answer(self, tokens: Tokens, images: Sequence[bytes], num: int) -> tuple[list[int], list[Any]]:
        """Return mlx-vlm's greedy answer and its logits, from a pass over everything for each token."""
        features, found, all_logits = self.embeddings(tokens, images), list[int](), list[Any]()
        rows, places = features.inputs_embeds, features.position_ids
        for _ in range(num):
            ids = _array([*tokens.ids(), *found])
            more: dict[str, Any] = {} if places is None else {"position_ids": places}
            if (deep := getattr(features, "deepstack_visual_embeds", None)) is not None:
                masked = ids == self.loaded.vision_model.processor.image_token
                more |= {"visual_pos_masks": masked, "deepstack_visual_embeds": deep}
            if self.loaded.vision_model.tower.family.most_joint:
                logits = self._joint_logits(tokens, rows, 1)[0]
            elif getattr(features, "per_layer_inputs", None) is not None:
                inputs = self.direct.get_input_embeddings(ids).per_layer_inputs
                logits = self.direct.language_model(None, inputs_embeds=rows, per_layer_inputs=inputs)
                logits = logits.logits[0, -1]
            else:
                logits = self.direct.language_model(ids, inputs_embeds=rows, **more).logits[0, -1]
            if places is not None:
                after = mx.zeros_like(places[..., :1]) + places.max() + 1
                places = mx.concatenate([places, after], axis=-1)
            all_logits.append(np.array(logits))
            found.append(int(mx.argmax(logits).item()))
            row = self.direct.get_input_embeddings(_array(found[-1:])).inputs_embeds
            rows = mx.concatenate([rows, row], axis=1)
        return found, all_logits

    def greedy(self, tokens: Tokens, images: Sequence[bytes], found: list[int]) -> list[int]:
        """Return, from one pass, what mlx-vlm draws for each token of an answer behind those before it."""
        begun = self.direct.get_input_embeddings(_array(found[:-1])).inputs_embeds
        rows = mx.concatenate([self.embeddings(tokens, images).inputs_embeds, begun], axis=1)
        return [*map(int, np.argmax(np.array(self._joint_logits(tokens, rows, len(found))), axis=-1))]

    def _joint_logits(self, tokens: Tokens, rows: mx.array, num: int) -> mx.array:
        """Return the last `num` logits of mlx-vlm's layers with the masks of transformers' Gemma 3 or 4."""
        language = self.direct.language_model
        at = np.arange(rows.shape[1])
        causal, near = at <= at[:, None], at > at[:, None] - language.config.sliding_window
        joint = np.array(causal)
        for span in tokens.spans:
            inside = (at >= span.start) & (at < span.end)
            joint |= inside & inside[:, None]
        if self.kind == "gemma3":
            h = rows * mx.array(rows.shape[-1] ** 0.5, mx.bfloat16).astype(rows.dtype)
            for layer in language.layers:
                h = layer(h, mx.array(joint & near if layer.self_attn.is_sliding else joint), None)
            return language.lm_head(language.model.norm(h))[0, -num:]
        h = rows
        for layer in language.layers:
            h, _, _ = layer(h, mx.array(joint & near if layer.self_attn.is_sliding else causal), None)
        return language.logits_from_hidden(language.model.norm(h))[0, -num:]


def _array(ids: Iterable[int]) -> mx.array:
    return mx.array([[*ids]])


#: Families whose images no pass cuts.
JOINT = ["gemma3", "gemma4"]
GEMMA4 = ["gemma4", "gemma4_e", "large"]
#: One of each way to run: lines of tokens, recurrent layers, planes of positions, rows added behind the first
#: layers, both of the latter with recurrent layers, images as wholes, inputs for each layer.
DIFFERENT = ["idefics3", "lfm2_vl", "qwen2_vl", "qwen3_vl", "qwen3_5", *JOINT, "gemma4_e"]
_made: dict[tuple[str, str], Seeing] = {}


@pytest.fixture
def seeing(tmp_path_factory) -> Callable[..., Seeing]:
    """Return a function that makes a tiny model of a family, once for the whole test run."""

    def make(kind: str, layout: str = "mlx") -> Seeing:
        if (kind, layout) not in _made:
            folder = tmp_path_factory.mktemp(kind) / "tiny"
            direct = tiny_seeing.write(kind, folder, layout)
            loaded = model.load(folder, dtype="keep" if layout == "4-bit" else "float32")
            _made[kind, layout] = Seeing(kind, folder, loaded, direct)
        return _made[kind, layout]

    return make


class Reader:
    """Reads images by their fingerprints, and counts how often."""

    def __init__(self, seen: Seeing, *images: bytes) -> None:
        self.files = {seen.loaded.vision_model.processor.read(image).fingerprint: image for image in images}
        self.num = 0

    async def __call__(self, fingerprint: bytes) -> bytes:
        self.num += 1
        return self.files[fingerprint]


@pytest.fixture
def open_process(open_process) -> Callable[..., Any]:
    """Return a function that runs a `Process` of a model that sees, on one of the test's directories."""

    def open_(seen: Seeing, folder: str = "snapshots", dtype: str = "float32", **options: Any) -> Any:
        load = partial(model.load, seen.folder, dtype=dtype, kv_bits=options.pop("kv_bits", None))
        return open_process(None, folder, load=load, **options)

    return open_


async def run(
    process: Any, tokens: Tokens, num: int, read: Any, *, name: str = "s", **more: Any
) -> tuple[TurnResult, list[int]]:
    """Answer with up to `num` tokens, or append if it is 0; return the turn's result and the answer."""
    growing, tenant = answer(num) if num else None, more.pop("tenant", "default")
    request = TurnRequest(SessionKey(tenant, name), tokens, answer=growing, read_image=read, **more)
    outcome = await process.engine.run(request, lambda: False)
    assert outcome is not None
    return outcome, growing.tokens if growing is not None else []


@pytest.mark.parametrize("kind", FAMILIES)
async def test_an_answer_about_an_image_has_the_tokens_and_logits_of_mlx_vlm(
    seeing, open_process, kind
) -> None:
    seen, image = seeing(kind), picture(1)
    tokens = seen.prompt("Look: @ What is it?", image)
    async with open_process(seen) as process:
        outcome, found = await run(process, tokens, 8, Reader(seen, image))
        bits = process.model.bits[-7:]
    expected, logits = seen.answer(tokens, (image,), 8)
    assert found == expected
    assert outcome.num_prefilled == len(tokens)
    for one, other in zip(bits, logits[1:], strict=True):
        assert np.allclose(np.frombuffer(one, np.float32), other, atol=1e-4 * np.abs(other).max())
    assert found != seen.answer(tokens, (picture(2),), 8)[0], "the answer depends on the picture"


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("layout", ["pt", "4-bit"])
async def test_a_vision_model_loaded_from_any_supported_weight_file_layout_gives_the_same_answer(
    seeing, open_process, kind, layout
) -> None:
    seen, image = seeing(kind, layout), picture(1)
    assert not isinstance(seen.loaded.vision_model, str), seen.loaded.vision_model
    tokens = seen.prompt("Look: @ What is it?", image)
    async with open_process(seen, dtype="keep" if layout == "4-bit" else "float32") as process:
        _, found = await run(process, tokens, 4, Reader(seen, image))
    assert found == seen.answer(tokens, (image,), 4)[0]


@pytest.mark.parametrize("kind", DIFFERENT)
async def test_batched_answers_about_images_and_texts_equal_those_given_alone(
    seeing, open_process, kind
) -> None:
    seen, one, two = seeing(kind), picture(1), picture(2, 50, 40)
    asked = {
        "two images": (seen.prompt("@ or @?", one, two), (one, two)),
        "text": (seen.prompt("no picture in this one, but a longer text"), ()),
        "a large one": (seen.prompt("a longer text before it, then @", two), (two,)),
        "at the beginning": (seen.prompt("@", one), (one,)),
        "twice": (seen.prompt("@@ are they the same?", one, one), (one, one)),
        "far behind": (seen.prompt("@" + " and then" * 9, one), (one,)),
    }
    expected = {name: seen.answer(*prompt, 6)[0] for name, prompt in asked.items()}
    for num_rows in (2, 6):
        read = Reader(seen, one, two)
        async with open_process(seen, f"rows-{num_rows}", max_batch=8) as process:
            for names in np.array_split([*asked], 6 // num_rows):
                turns = [run(process, asked[name][0], 6, read, name=str(name)) for name in names]
                for name, (_, found) in zip(names, await asyncio.gather(*turns), strict=True):
                    assert found == expected[name], (num_rows, name)
        assert read.num <= max(4, num_rows)


@pytest.mark.parametrize("kind", DIFFERENT)
async def test_a_prompt_with_an_image_gets_the_same_answer_if_it_is_prefilled_in_two_parts_cut_anywhere(
    seeing, open_process, kind
) -> None:
    """Each cut is a session of another tenant, since sessions of one would share their KV."""
    seen, image = seeing(kind), picture(1)
    tokens, read = seen.prompt("ab@cdefg", image), Reader(seen, image)
    expected = seen.answer(tokens, (image,), 4)[0]
    cuts = [*range(1, len(tokens), 5), len(tokens) - 1]
    if kind in JOINT:  # an append does not run its last token
        cuts = [cut for cut in cuts if not any(span.start < cut <= span.end for span in tokens.spans)]
    async with open_process(seen) as process:
        for cut in cuts:
            await run(process, tokens[:cut], 0, read, tenant=f"t{cut}")
            assert (await run(process, tokens, 4, read, tenant=f"t{cut}"))[1] == expected, cut
        await process.store.queue.drained(10)
    read.num, longer = 0, tokens + as_tokens([5])
    expected = seen.answer(longer, (image,), 4)[0]
    async with open_process(seen) as process:
        for cut in cuts:
            assert (await run(process, longer, 4, read, tenant=f"t{cut}"))[1] == expected, cut
    assert read.num == 0, "restored blocks need no image"


@pytest.mark.parametrize("kind", ["lfm2_vl", "qwen3_vl"])
async def test_prefill_after_a_restart_begins_inside_an_image_whose_kv_was_stored_in_part(
    seeing, open_process, kind
) -> None:
    seen, image = seeing(kind), picture(3, 60, 50)
    tokens, read = seen.prompt("At the beginning @ then what?", image), Reader(seen, image)
    (span,) = tokens.spans
    middle = -(-(span.start + 1) // BLOCK) * BLOCK
    assert span.start < middle < span.end
    async with open_process(seen) as process:
        await run(process, tokens[: middle + 1], 0, read)
        await process.store.queue.drained(10)
    async with open_process(seen) as process:
        outcome, found = await run(process, tokens, 4, read)
    assert found == seen.answer(tokens, (image,), 4)[0]
    assert outcome.num_cached >= middle or kind == "lfm2_vl"
    assert read.num == 2


async def test_a_prompt_that_ends_inside_an_image_is_refused_by_models_that_encode_images_only_as_a_whole(
    seeing, open_process
) -> None:
    seen, image = seeing("gemma3"), picture(1)
    tokens, read = seen.prompt("ab@cd", image), Reader(seen, image)
    (span,) = tokens.spans
    async with open_process(seen) as process:
        for end, num in ((span.start + 2, 0), (span.end, 0), (span.end - 1, 4), (span.end, 4)):
            with pytest.raises(DeviceFaultError, match="the session ends within an image; add text"):
                await run(process, tokens[:end], num, read)
            assert (await run(process, tokens, 4, read))[1] == seen.answer(tokens, (image,), 4)[0]


@pytest.mark.parametrize("kind", JOINT)
def test_prefill_continued_inside_an_image_gives_the_same_logits_as_an_uninterrupted_prefill(
    seeing, kind
) -> None:
    seen, image = seeing(kind), picture(1)
    tokens, model = seen.prompt("A text before @ and one behind it", image), seen.loaded.model
    (span,), vision_model = tokens.spans, seen.loaded.vision_model
    (view,) = vision_model.processor.views(image)
    rows, everywhere = vision_model.tower.stages(view)[-1], vision_model.tower.family.joins_everywhere
    expected = seen.answer(tokens, (image,), 1)[1][0]
    for middle in range(span.start, span.end, 5):
        forward, caches = Forward(model), layers.make(model, rings=True, block_tokens=BLOCK, grid=0)
        for start, end in ((0, span.end), (middle, len(tokens))):
            layers.trim(caches, start)
            at = [i for i in range(end - start) if span.start <= start + i < span.end]
            some = ImageRows(at, rows[span.end - span.start - len(at) :], tokens.spans, everywhere)
            ids = tokens.ids(start, end).tolist()
            piece = PrefillPiece(caches, start, ids, None, Embedding(), some)
            logits = np.array(forward([], (), [piece])[0])
        assert np.allclose(logits, expected, atol=1e-4 * np.abs(expected).max()), middle


@pytest.mark.parametrize(
    ("multiple", "kind"),
    [(SLACK, "gemma3"), (SLACK, "gemma4"), (4096, "gemma3")],
    ids=["write boundary-gemma3", "write boundary-gemma4", "count boundary-gemma3"],
)
async def test_an_image_across_a_boundary_of_a_windows_ring_buffer_gets_the_same_answer_as_with_plain_caches(
    seeing, open_process, kind, multiple
) -> None:
    """Of the tokens that a ring writes at once, or of those after which a ring may count from 0 again."""
    seen, image = seeing(kind), picture(1)
    tokens = seen.prompt("a" * (multiple - 8) + "@?", image)
    assert tokens.spans[0].start < multiple < tokens.spans[0].end
    async with open_process(seen, num_blocks=32) as process:
        _, found = await run(process, tokens, 4, Reader(seen, image))
    assert len(found) == 4
    assert found == seen.greedy(tokens, (image,), found)


async def test_an_image_too_long_for_the_spare_room_of_a_windows_ring_buffer_gets_the_answer_of_plain_caches(
    seeing, open_process
) -> None:
    """Behind a text of which its first token still sees the end; rewound to, and restored."""
    seen, image = seeing("large"), picture(1, 40, 28)
    read, tokens = Reader(seen, image), seen.prompt("text" * 60 + "@?", image)
    (span,) = tokens.spans
    assert span.end - span.start == SLACK + 24
    async with open_process(seen, num_blocks=32) as process:
        _, expected = await run(process, tokens, 4, read)
        assert expected == seen.greedy(tokens, (image,), expected)
        await run(process, tokens[: span.start - 3] + as_tokens([5, 6]), 4, read)
        assert (await run(process, tokens, 4, read))[1] == expected
        await process.store.queue.drained(10)
    async with open_process(seen, num_blocks=32) as process:
        assert (await run(process, tokens, 4, read))[1] == expected


def test_the_ring_buffer_of_a_window_keeps_a_written_image_and_the_window_before_the_images_first_token(
    seeing,
) -> None:
    """The last layer's keys are those that follow from mlx-lm's windows, which overwrite nothing so early."""
    seen, image = seeing("large"), picture(1, 40, 28)
    tokens, vision_model = seen.prompt("a text" * 9 + "@", image), seen.loaded.vision_model
    (span,), (view,) = tokens.spans, vision_model.processor.views(image)
    at, keys = range(span.start, span.end), list[Any]()
    rows = ImageRows(at, vision_model.tower.stages(view)[-1], tokens.spans, joins_everywhere=False)
    for rings in (True, False):
        most = vision_model.tower.family.most_joint
        caches = layers.make(seen.loaded.model, rings=rings, most_joint=most, grid=0)
        piece = PrefillPiece(caches, 0, tokens.ids(0, span.end).tolist(), images=rows)
        mx.eval(Forward(seen.loaded.model)([], (), [piece]))
        keys.append(np.array(caches[-1].keys))
    assert np.allclose(*keys, atol=1e-5)


@pytest.mark.parametrize("kind", ["idefics3", "qwen3_5"])
async def test_different_images_with_equal_token_ids_get_their_own_answers_in_one_and_in_several_sessions(
    seeing, open_process, kind
) -> None:
    """One after the other and back; both at once without any KV; after a restart."""
    seen, one, two = seeing(kind), picture(1), picture(2)
    asked = [(seen.prompt("It is @ here", image), (image,)) for image in (one, two, one)]
    assert asked[0][0].ids() == asked[1][0].ids(), "the model runs the same ids"
    expected = [seen.answer(tokens, images, 6)[0] for tokens, images in asked]
    assert expected[0] != expected[1]
    read = Reader(seen, one, two)
    async with open_process(seen) as process:
        for (tokens, _), wanted in zip(asked, expected, strict=True):
            assert (await run(process, tokens, 6, read))[1] == wanted, "in one session"
        for i, ((tokens, _), wanted) in enumerate(zip(asked, expected, strict=True)):
            assert (await run(process, tokens, 6, read, name=f"of {i}"))[1] == wanted, "in several sessions"
    async with open_process(seen, "cold") as process:
        both = [run(process, tokens, 6, read, name=f"cold {i}") for i, (tokens, _) in enumerate(asked[:2])]
        assert [found for _, found in await asyncio.gather(*both)] == expected[:2]
        await process.store.queue.drained(10)
    for folder in ("snapshots", "cold"):
        async with open_process(seen, folder) as process:
            for i, ((tokens, _), wanted) in enumerate(zip(asked, expected, strict=True)):
                assert (await run(process, tokens, 6, read, name=f"again {i}"))[1] == wanted, folder


@pytest.mark.parametrize("kind", ["idefics3", "qwen2_vl", "qwen3_vl", *JOINT])
async def test_answers_about_images_are_the_same_with_batch_rows_run_one_by_one_as_in_one_pass(
    seeing, open_process, monkeypatch, kind
) -> None:
    seen, image = seeing(kind), picture(1)
    asked, read = [seen.prompt(text, image) for text in ("Look: @ What?", "@ And now?")], Reader(seen, image)
    monkeypatch.setattr(batch_kinds, "_shares", lambda *_: False)
    async with open_process(seen) as process:
        turns = [run(process, tokens, 8, read, name=f"s{i}") for i, tokens in enumerate(asked)]
        for tokens, (_, found) in zip(asked, await asyncio.gather(*turns), strict=True):
            assert found == seen.answer(tokens, (image,), 8)[0]


async def test_a_windowed_session_gives_the_same_answer_about_an_image_after_a_restart(
    seeing, open_process
) -> None:
    """A window with room for all answers like mlx-vlm; a small one answers the same after a restart."""
    seen, image = seeing("idefics3"), picture(1)
    tokens, read = seen.prompt("Look: @ What is it?", image), Reader(seen, image)
    found = {}
    for small in (False, True):
        policy = Policy(2, 16 if small else 256)
        async with open_process(seen) as process:
            _, found[small] = await run(process, tokens, 6, read, policy=policy)
            await process.store.queue.drained(10)
        async with open_process(seen) as process:
            assert (await run(process, tokens, 6, read, policy=policy))[1] == found[small]
    assert found[False] == seen.answer(tokens, (image,), 6)[0] != found[True]


@pytest.mark.parametrize("kind", ["qwen2_vl", *JOINT])
async def test_a_vision_model_with_position_grids_or_two_way_image_attention_refuses_windowed_policies(
    seeing, open_process, kind
) -> None:
    async with open_process(seeing(kind)) as process:
        assert "use the policy full" in (process.engine.refusal(Policy(2, 256)) or "")


async def test_images_with_equal_token_counts_but_different_shapes_get_their_own_answers(
    seeing, open_process
) -> None:
    """Tokens, and their numbers, are the same; rows and positions differ."""
    seen, images = seeing("qwen2_vl"), (picture(1, 48, 16), picture(1, 16, 48), picture(1, 48, 16))
    asked = [(seen.prompt("It is @ here: @", image, image), (image, image)) for image in images]
    assert asked[0][0].ids() == asked[1][0].ids()
    async with open_process(seen) as process:
        for tokens, some in asked:
            _, found = await run(process, tokens, 6, Reader(seen, *images))
            assert found == seen.answer(tokens, some, 6)[0]


async def test_batched_answers_after_images_of_different_sizes_equal_those_given_alone(
    seeing, open_process
) -> None:
    seen, images = seeing("qwen2_vl"), [picture(i, 20 + 10 * i, 20) for i in range(4)]
    asked = [seen.prompt("@?", image) for image in images]
    read = Reader(seen, *images)
    async with open_process(seen) as process:
        for tokens, name in zip(asked, "abcd", strict=True):
            await run(process, tokens, 0, read, name=name)
        turns = [
            run(process, tokens, 40, read, name=name) for tokens, name in zip(asked, "abcd", strict=True)
        ]
        for tokens, image, (_, found) in zip(asked, images, await asyncio.gather(*turns), strict=True):
            assert found == seen.answer(tokens, (image,), 40)[0]


async def test_a_paged_prompt_attends_to_an_image_whose_kv_is_only_on_disk(seeing, open_process) -> None:
    """A prompt attends to all of its tokens, so that the answer's first token is that of full attention."""
    seen, image, policy = seeing("wide"), picture(1), Policy.paged(9 * CHUNK + 4, [], sink=4)
    tokens = seen.prompt("@" + "What was in the picture that began this text? " * 25, image)
    assert len(tokens) > 1024
    async with open_process(seen, num_blocks=8) as process:
        assert process.engine.refusal(policy) is None
        _, (found,) = await run(process, tokens, 1, Reader(seen, image), policy=policy)
    assert found == seen.answer(tokens, (image,), 1)[0][0]


async def test_with_quantised_kv_a_different_image_gives_a_different_answer(seeing, open_process) -> None:
    seen, images = seeing("wide"), (picture(1), picture(2), picture(1))
    read, found = Reader(seen, *images), list[list[int]]()
    async with open_process(seen, kv_bits=8) as process:
        for image in images:
            found.append((await run(process, seen.prompt("Look: @!", image), 8, read))[1])
    assert found[0] == found[2] != found[1]
    assert found[0][:2] == seen.answer(seen.prompt("Look: @!", images[0]), images[:1], 2)[0]


@pytest.mark.parametrize("kind", ["qwen2_vl", "gemma4"])
async def test_speculative_drafts_and_priorities_do_not_change_answers_about_images(
    seeing, open_process, kind
) -> None:
    seen, image = seeing(kind), picture(4)
    tokens, read = seen.prompt("aaaa aaaa aaaa @ aaaa aaaa", image), Reader(seen, image)
    expected = seen.answer(tokens, (image,), 24)[0]
    async with open_process(seen, max_draft=4) as process:
        both = [run(process, tokens, 24, read, name=f"s{i}", priority=i) for i in range(2)]
        assert [found for _, found in await asyncio.gather(*both)] == [expected] * 2


async def test_a_turn_whose_image_cannot_be_read_fails_and_concurrent_turns_complete(
    seeing, open_process
) -> None:
    """Files that were fine when the prompts were made."""
    seen, good, bad, other = seeing("idefics3"), picture(1), picture(2), picture(3)
    both = (("@?", (good,)), ("@@?", (good, bad)), ("no picture", ()), ("@?", (other,)))
    asked = [seen.prompt(text, *images) for text, images in both]
    read = Reader(seen, good, bad, other)
    broken = {bad: b"\x89PNG", other: b"GIF89a" + b"\xff\xff\xff\xff" + b"\0\0\0;"}
    read.files = {name: broken.get(file, file) for name, file in read.files.items()}
    async with open_process(seen) as process:
        turns = [run(process, tokens, 6, read, name=f"s{i}") for i, tokens in enumerate(asked)]
        (_, found), *errors = await asyncio.gather(*turns, return_exceptions=True)
        assert found == seen.answer(asked[0], (good,), 6)[0]
        assert errors.pop(1)[1] == seen.answer(asked[2], (), 6)[0]
        assert all(isinstance(error, DeviceFaultError) for error in errors)
        assert ["broken or truncated" in str(error) for error in errors] == [True, True]
        assert (await run(process, asked[0], 6, read))[1] == found


async def test_cancelling_a_turn_that_waits_for_an_image_ends_that_turn_and_the_next_turn_is_answered(
    seeing, open_process
) -> None:
    seen, image = seeing("idefics3"), picture(1)
    tokens, asked = seen.prompt("@?", image), asyncio.Event()

    async def read(_: bytes) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        return image

    async with open_process(seen) as process:
        running = asyncio.create_task(run(process, tokens, 6, read))
        await asked.wait()
        process.engine.cancel(SessionKey("default", "s"))
        outcome, found = await running
        assert (outcome.complete, found) == (False, [])
        assert (await run(process, tokens, 6, Reader(seen, image)))[1] == seen.answer(tokens, (image,), 6)[0]


async def test_an_encoded_image_is_reused_by_other_sessions_until_a_session_with_that_image_is_erased(
    seeing, open_process
) -> None:
    seen, image = seeing("idefics3"), picture(1)
    read = Reader(seen, image)
    async with open_process(seen) as process:
        for text in ("@?", "What is in @?", "An image: @"):
            tokens = seen.prompt(text, image)
            assert (await run(process, tokens, 4, read, name=text))[1] == seen.answer(tokens, (image,), 4)[0]
        assert read.num == 1
        await process.engine.erase(SessionKey("default", text), tokens, 0)
        await run(process, seen.prompt("Again: @", image), 4, read)
    assert read.num == 2, "a forgotten image's rows are dropped"


async def test_a_running_answer_is_delayed_by_at_most_one_layer_of_the_vision_encoder_at_a_time(
    seeing, open_process, monkeypatch
) -> None:
    seen, image = seeing("smolvlm"), picture(1, 50, 40)
    vision_model, text, growing = seen.loaded.vision_model, seen.prompt("only text"), answer(400)
    num_layers = sum(len(vision_model.tower.stages(view)) for view in vision_model.processor.views(image))
    layers, counts = list[Any](), list[int]()
    run_tower, evaluate = vision.Vision.step, mx.eval

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

        def eval(self, array: mx.array) -> None:
            layers.append(array.shape)
            evaluate(array)

    def step(self: Any, most_s: float) -> Any:
        counts.append(len(growing.tokens))
        return run_tower(self, most_s)

    monkeypatch.setattr(vision, "mx", Watched())
    monkeypatch.setattr(vision.Vision, "step", step)
    async with open_process(seen, stall_s=0.0) as process:
        request = TurnRequest(SessionKey("default", "text"), text, answer=growing)
        answering = asyncio.create_task(process.engine.run(request, lambda: False))
        while not growing.tokens:  # noqa: ASYNC110
            await asyncio.sleep(0)
        tokens = seen.prompt("@?", image)
        _, found = await run(process, tokens, 6, Reader(seen, image))
        assert len(growing.tokens) < 400, "the answer runs beside the tower"
        await answering
    assert found == seen.answer(tokens, (image,), 6)[0]
    assert growing.tokens[:20] == seen.answer(text, (), 20)[0]
    assert len(layers) == len(counts) + 1 == num_layers + 1, "the last evaluation joins the views"
    assert all(later > before for before, later in itertools.pairwise(counts)), counts


async def test_an_image_too_large_for_free_memory_waits_for_memory_and_is_then_refused_with_its_size_in_bytes(
    seeing, open_process, monkeypatch
) -> None:
    seen, image, starved = seeing("idefics3"), picture(1), list[vision.Starvation]()

    def starvation() -> vision.Starvation:
        starved.append(event := starve())
        return event

    starve = vision.Starvation
    monkeypatch.setattr(vision, "Starvation", starvation)
    monkeypatch.setattr(vision, "view_bytes", lambda *_: 1 << 50)
    monkeypatch.setattr(vision, "PATIENCE_S", 0.05)
    async with open_process(seen) as process:
        for num_before in range(2):
            assert len(starved) == num_before
            with pytest.raises(NoMemoryError, match=f"an image of 16 patches takes {1 << 50} bytes"):
                await run(process, seen.prompt("@?", image), 4, Reader(seen, image))
        assert len(starved) == 2
        text = seen.prompt("only text")
        assert (await run(process, text, 4, None))[1] == seen.answer(text, (), 4)[0]


async def test_a_vision_model_without_its_processor_config_refuses_images_with_the_reason(
    seeing, open_process, tmp_path
) -> None:
    seen, image = seeing("idefics3"), picture(1)
    (seen.folder / "preprocessor_config.json").rename(tmp_path / "away")
    try:
        blind = model.load(seen.folder, dtype="float32")
        assert "it has no preprocessor_config.json" in blind.vision_model
        async with open_process(seen) as process:
            with pytest.raises(DeviceFaultError, match="cannot see images with its files"):
                await run(process, seen.prompt("@?", image), 4, Reader(seen, image))
    finally:
        (tmp_path / "away").rename(seen.folder / "preprocessor_config.json")


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("size", [(20, 70), (1, 1), (100, 100), (200, 20)], ids=str)
def test_an_image_is_expanded_to_the_same_tokens_as_by_the_processor_of_mlx_vlm(seeing, kind, size) -> None:
    """Its processors need the tokenizer of transformers."""
    seen, image = seeing(kind), picture(1, *size)
    image_processor = seen.loaded.vision_model.processor
    family = seen.loaded.vision_model.tower.family
    placeholder = tiny_seeing.PLACEHOLDER.get(kind, "<image>")
    name = "qwen3_vl" if kind.startswith("qwen3") else kind.removesuffix("_e")
    module = import_module(f"mlx_vlm.models.{name}.processing_{name}")
    names = {
        "lfm2_vl": "Lfm2VlProcessor",
        "smolvlm": "SmolVLMProcessor",
        "qwen2_vl": "Qwen2VLProcessor",
        "qwen2_5_vl": "Qwen2_5_VLProcessor",
        "qwen3_vl": "Qwen3VLProcessor",
    }
    hf = PreTrainedTokenizerFast(
        tokenizer_file=str(seen.folder / "tokenizer.json"),
        extra_special_tokens={
            "image_token": family.image if kind.startswith(("qwen", "gemma")) else "<image>",
            "boi_token": "<|image>" if name == "gemma4" else "<start_of_image>",
            "eoi_token": "<image|>" if name == "gemma4" else "<end_of_image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
    )
    more = {
        "idefics3": {"image_seq_len": 4},
        "smolvlm": {"image_seq_len": 4},
        "gemma3": {"image_seq_length": 16},
        "llava": {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        "pixtral": {"patch_size": 4},
        "mistral3": {"patch_size": 4, "spatial_merge_size": 2},
    }
    processor = getattr(module, names.get(name, f"{name.capitalize()}Processor"))(
        family.processor, hf, **more.get(kind, {})
    )
    made = processor(images=[Image.open(io.BytesIO(image))], text=[f"a{placeholder}b"])
    (ids,) = np.array(made["input_ids"]).tolist()
    assert seen.prompt("a@b", image).ids().tolist() == ids
    assert image_processor.read(image).end - image_processor.read(image).start >= 1


def test_a_chat_template_that_writes_fewer_or_more_images_than_the_messages_have_raises_an_error(
    seeing,
) -> None:
    image_processor, image = seeing("idefics3").loaded.vision_model.processor, picture(1)
    with pytest.raises(TemplateError, match="the chat template writes 1 of 2 images; "):
        image_processor.written(f"a{image_processor.image}b", [image_processor.read(image).grid] * 2)
    with pytest.raises(TemplateError, match="the chat template writes 2 of 1 images; "):
        image_processor.written(image_processor.image * 2, [image_processor.read(image).grid])
    with pytest.raises(TemplateError, match="the tokenizer writes an image in another way; "):
        image_processor.found(
            [image_processor.image_token] * 2,
            [(image_processor.read(image).digest.hex(), image_processor.read(image).grid)],
        )


def test_the_cache_fingerprint_of_an_image_depends_on_its_file_the_processor_and_the_grid(seeing) -> None:
    """Two processors of one class, which give the image the same grid."""
    image, other = picture(1), picture(2)
    image_processor, wide = (seeing(kind).loaded.vision_model.processor for kind in ("smolvlm", "bright"))
    read = image_processor.read(image)
    assert image_processor.tokens(read.digest, read.grid) == read, (
        "the log stores the digest and the grid alone"
    )
    assert wide.read(image).grid == read.grid
    found = {each.fingerprint for each in (read, wide.read(image), image_processor.read(other))}
    assert len(found | {image_processor.tokens(read.digest, (1, 2)).fingerprint}) == 4


async def test_a_turn_whose_first_image_another_turn_has_encoded_still_gets_its_second_image_encoded(
    seeing, open_process
) -> None:
    seen, image, later = seeing("idefics3"), picture(1), picture(2)
    tokens = [seen.prompt(text, image, *rest) for text, rest in (("@?", ()), ("b @ @!", (later,)))]
    read, is_over = Reader(seen, image, later), asyncio.Event()

    async def slow(fingerprint: bytes) -> bytes:
        await is_over.wait()
        return await read(fingerprint)

    async with open_process(seen) as process:
        other = asyncio.create_task(run(process, tokens[1], 6, slow, name="slow"))
        await asyncio.sleep(0.1)
        await run(process, tokens[0], 6, read, name="fast")
        is_over.set()
        assert (await asyncio.wait_for(other, 20))[1] == seen.answer(tokens[1], (image, later), 6)[0]


async def test_a_vision_model_can_be_served_with_the_estimated_least_memory_and_not_with_less(
    local_worker: Any, taught_model: Path, tmp_path: Path
) -> None:
    least_bytes = weigh(Settings(data_dir=tmp_path, model=str(taught_model))).least_bytes
    given = {"model": str(taught_model), "block_tokens": CONSTANTS.block_tokens}
    await (await local_worker(**given, device_memory=least_bytes)).stop()
    with pytest.raises(WorkerError, match="leaves no room for KV"):
        await local_worker(**given, device_memory=least_bytes - 2**16)
