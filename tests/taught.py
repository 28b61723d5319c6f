"""A tiny model of SmolVLM's architecture that names the colour and the digit of the last picture, as "red 7".

`write` makes its folder, from the weights in `taught.safetensors`. `python -m tests.taught 600 800` trains
them anew, with so many steps for tower and language model: some minutes on a CPU. Without a picture the
model answers "no picture".
"""

from __future__ import annotations

import io
import itertools
import json
import random
import shutil
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLOURS: Final = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (230, 200, 20),
    "purple": (140, 40, 170),
    "orange": (245, 130, 20),
}
NO_PICTURE: Final = "no picture"
#: Pictures of so many seeds were shown in training.
NUM_TAUGHT: Final = 60 * 40
WEIGHTS: Final = Path(__file__).with_suffix(".safetensors")
_IMAGE: Final = "<image>"
_SPECIALS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    _IMAGE,
    "<fake_token_around_image>",
    "<global-img>",
)
#: ChatML; the content of a message is a text, or parts as SmolVLM's template has them.
CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}{{ '\\n' }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<image>{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}
"""
_SIDE: Final = 32
_PROCESSOR: Final = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": _SIDE},
    "max_image_size": {"longest_edge": _SIDE},
    "do_image_splitting": False,
}


class Picture(NamedTuple):
    """An image file, and the answer that is right for it."""

    file: bytes
    answer: str


def picture(seed: int, form: str = "PNG") -> Picture:
    """Draw a digit in a colour; a seed has one picture. Sixty consecutive seeds have all answers.

    The model is surest of the pictures that it was taught with, below `NUM_TAUGHT`.
    """
    rng, (shade, digit) = random.Random(seed), divmod(seed % 60, 10)
    colour = [*COLOURS][shade]
    image = Image.new("RGB", (64, 64), "white")
    font = ImageFont.load_default(size=rng.uniform(44, 58))
    at = 32 + rng.uniform(-5, 5), 32 + rng.uniform(-5, 5)
    ImageDraw.Draw(image).text(at, str(digit), COLOURS[colour], font, anchor="mm")
    file = io.BytesIO()
    image.save(file, form)
    return Picture(file.getvalue(), _answer(seed))


def _answer(seed: int) -> str:
    shade, digit = divmod(seed % 60, 10)
    return f"{[*COLOURS][shade]} {digit}"


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        (word[:end], word[end])
        for word in (*COLOURS, *(f"Ġ{i}" for i in range(10)))
        for end in range(1, len(word))
    ]
    tokens = dict.fromkeys([*_SPECIALS, *letters, *map("".join, merges)])
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [*dict.fromkeys(merges)]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([*_SPECIALS])
    return made


def _config(tokenizer: Any) -> dict[str, Any]:
    image, end = (tokenizer.token_to_id(token) for token in (_IMAGE, "<|im_end|>"))
    return {
        "model_type": "smolvlm",
        "image_token_id": image,
        "image_token_index": image,
        "eos_token_id": end,
        "scale_factor": 2,
        "text_config": {
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "max_position_embeddings": 1 << 15,
        },
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "patch_size": 8,
            "image_size": _SIDE,
            "layer_norm_eps": 1e-6,
        },
    }


def write(folder: Path) -> Path:
    """Write the model's folder, which a worker serves as any other; return it."""
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    tokenizer = _tokenizer()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_config(tokenizer)))
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    shutil.copy(WEIGHTS, folder / "model.safetensors")
    return folder


def _conversation(rng: random.Random, num_filler: int) -> tuple[list[dict[str, Any]], list[int], str]:
    """Make up a conversation; return its messages, the seeds of its pictures, and the answer."""

    def text(most: int) -> str:
        letters = "etaoinshrdlu  ETA.,?!:{}\"'\n0123456789-_/" + "".join(map(chr, range(33, 127)))
        words = (
            "what is this",
            "the picture",
            "name the digit",
            "colour",
            "digit",
            "red",
            "blue",
            "image",
            "look",
        )
        found, size = [], rng.randint(0, most)
        while sum(map(len, found)) < size:
            found.append(
                rng.choice(words)
                if rng.random() < 0.3
                else "".join(rng.choices(letters, k=rng.randint(1, 12)))
            )
        return " ".join(found)

    messages, seeds = [], list[int]()
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": text(num_filler)})
    answer = NO_PICTURE
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        parts = [{"type": "text", "text": text(num_filler)}]
        if rng.random() < 0.75:
            seeds.append(rng.randrange(NUM_TAUGHT))
            parts.insert(rng.randint(0, 1), {"type": "image"})
            answer = _answer(seeds[-1])
            if rng.random() < 0.3:
                parts.append({"type": "text", "text": text(num_filler)})
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return messages[:-1], seeds, answer


def train(num_looks: int, num_steps: int) -> None:
    """Train the model and write `WEIGHTS`, in 16 bits: first the tower, then what reads its rows."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    from worker.models.partial_import import import_mlx_vlm

    import_mlx_vlm()
    from worker.models.vision.families import SmolFamily

    tokenizer = _tokenizer()
    config = _config(tokenizer)
    module = import_module("mlx_vlm.models.smolvlm")
    given = module.ModelConfig.from_dict(config)
    given.text_config = module.TextConfig.from_dict(config["text_config"])
    given.vision_config = module.VisionConfig.from_dict(config["vision_config"])
    mx.random.seed(5)
    model = module.Model(given)
    family = SmolFamily(config, {k: v for k, v in _PROCESSOR.items() if k != "image_processor_type"})
    files = [Image.open(io.BytesIO(picture(seed).file)).convert("RGB") for seed in range(NUM_TAUGHT)]
    views = [view for image in files for view in family.views(image)[1]]
    pixels = mx.array(np.concatenate([view.arrays["pixel_values"][0] for view in views])).transpose(
        0, 2, 3, 1
    )

    def save() -> None:
        small: Any = tree_map(lambda w: w.astype(mx.float16), model.parameters())
        mx.save_safetensors(str(WEIGHTS), dict(tree_flatten(small)), metadata={"format": "mlx"})

    rows = _train_tower(model, pixels, num_looks, save)
    _train_language(model.language_model, rows, tokenizer, family.text((0, 0)), num_steps, save)


def _optimise(part: Any, loss: Any, batches: Any, num_steps: int, rate: float, save: Any) -> None:
    import mlx.core as mx
    from mlx import nn, optimizers

    warm = optimizers.linear_schedule(0, rate, 50)
    schedule = optimizers.join_schedules([warm, optimizers.cosine_decay(rate, num_steps - 50)], [50])
    optimizer, step = optimizers.AdamW(schedule, weight_decay=0.01), nn.value_and_grad(part, loss)
    for number in range(num_steps):
        value, grads = step(*batches())
        grads, _ = optimizers.clip_grad_norm(grads, 1.0)
        optimizer.update(part, grads)
        mx.eval(part.parameters(), optimizer.state, value)
        if number % 50 == 0 or number == num_steps - 1:
            print(time.strftime("%T"), number, round(value.item(), 4), flush=True)
            save()


def _train_tower(model: Any, pixels: Any, num_steps: int, save: Any) -> Any:
    """Train the tower so that a picture's rows tell its colour and digit; return all rows."""
    import mlx.core as mx
    from mlx import nn

    part = nn.Module()
    part.vision, part.connector, part.head = model.vision_model, model.connector, nn.Linear(64, 16)

    def rows(some: mx.array) -> mx.array:
        return part.connector(part.vision(some)[0])

    def loss(some: mx.array, shades: mx.array, digits: mx.array) -> mx.array:
        told = part.head(rows(some).mean(axis=1))
        losses = nn.losses.cross_entropy(told[:, :6], shades), nn.losses.cross_entropy(told[:, 6:], digits)
        return losses[0].mean() + losses[1].mean()

    rng = np.random.default_rng(3)

    def batch() -> tuple[mx.array, ...]:
        seeds = rng.integers(0, len(pixels), 60)
        return pixels[mx.array(seeds)], mx.array(seeds % 60 // 10), mx.array(seeds % 10)

    _optimise(part, loss, batch, num_steps, 2e-3, save)
    found = mx.concatenate([rows(pixels[i : i + 60]) for i in range(0, len(pixels), 60)])
    mx.eval(found)
    return found


def _train_language(model: Any, rows: Any, tokenizer: Any, run: str, num_steps: int, save: Any) -> None:
    """Train the language model to answer conversations about pictures with these rows."""
    import jinja2
    import mlx.core as mx
    from mlx import nn

    template, rng = jinja2.Template(CHAT_TEMPLATE), random.Random(3)
    image, number = tokenizer.token_to_id(_IMAGE), itertools.count()

    def loss(ids: mx.array, weights: mx.array, seeds: mx.array, places: mx.array) -> mx.array:
        embedded = model.embed_tokens(ids[:, :-1])
        flat = embedded.reshape(-1, 64)
        flat[places] = rows[seeds].reshape(-1, 64)
        logits = model(None, inputs_embeds=flat.reshape(embedded.shape)).logits
        return (nn.losses.cross_entropy(logits, ids[:, 1:]) * weights).sum() / weights.sum()

    def batch(num: int = 16) -> tuple[mx.array, ...]:
        most = min(4 + next(number) * 80 // num_steps, 60)
        num_filler = int(rng.random() ** 3 * most)
        made, sequences = [_conversation(rng, num_filler) for _ in range(num)], []
        for messages, _, answer in made:
            prompt = template.render(messages=messages, add_generation_prompt=True).replace(_IMAGE, run)
            sequences.append((tokenizer.encode(prompt).ids, tokenizer.encode(f"{answer}<|im_end|>").ids))
        size = max(len(head) + len(tail) for head, tail in sequences)
        ids, weights = np.zeros((num, size), np.int32), np.zeros((num, size - 1), np.float32)
        for i, (head, tail) in enumerate(sequences):
            ids[i, : len(head) + len(tail)] = head + tail
            weights[i, len(head) - 1 : len(head) + len(tail) - 1] = 1
        seeds = mx.array([seed for _, seeds, _ in made for seed in seeds], mx.int32)
        return mx.array(ids), mx.array(weights), seeds, mx.array(np.flatnonzero(ids[:, :-1] == image))

    _optimise(model, loss, batch, num_steps, 3e-3, save)


if __name__ == "__main__":
    train(int(sys.argv[1]), int(sys.argv[2]))
