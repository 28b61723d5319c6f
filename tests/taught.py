"""A tiny model of SmolVLM's architecture that names the colour and the digit of the last picture, as "red 7".

`write` makes its folder, from the weights in `taught.safetensors`. Without a picture the model answers
"no picture". The program that trained the weights, in some minutes on a CPU, is this file at the commit
61ab2f44: `python -m tests.taught 600 800`.
"""

import io
import json
import random
import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

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

    The model is surest of the pictures that it was taught with, those of seeds below 2,400.
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
