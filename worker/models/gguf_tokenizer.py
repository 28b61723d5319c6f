"""Builds a Hugging Face tokenizer from the tokenizer fields of a GGUF file.

Supports byte-level BPE (`gpt2`) with the pre-tokenizers below, and SentencePiece BPE (`llama`) with byte
fallback. Must not import MLX.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from .model_files import ModelError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
#: The id for no token: -1, without a sign.
_NONE: Final = 2**32 - 1
_SPACE: Final = "\u2581"

_CL100K_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Mistral's words: a capital letter begins a new word; each digit, and a contraction, is a word.
_TEKKEN_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: Values of `tokenizer.ggml.pre`, grouped by how they split text before the merges.
_SINGLE_DIGITS: Final = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2: Final = ("gpt-2", "mpt", "olmo", "jais", "default")
_LLAMA3: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
_QWEN2: Final = ("qwen2", "stablelm2", "deepseek-r1-qwen")
_TEKKEN: Final = ("tekken",)

#: Control tokens that end an answer in some model family, even if the file does not say so.
_ANSWER_ENDS: Final = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>"}
)


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer, its tokenizer_config.json, and the ids of its start and end tokens."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self.tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config, indent=2), encoding="utf-8")


def build(fields: Mapping[str, Any], architecture: str) -> GgufTokenizer:
    """Build the tokenizer that a file's fields describe; raises `ModelError` if the fields are invalid."""
    model = fields.get("tokenizer.ggml.model")
    tokens: Sequence[str] = fields.get("tokenizer.ggml.tokens") or ()
    if model not in {"gpt2", "llama"} or not tokens:
        raise ModelError(
            f"the GGUF file has a {model!r} tokenizer; gpt2 and llama tokenizers can be converted"
        )
    kinds: Sequence[int] = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(kinds)} token types")
    tokenizer = _byte_level(fields, tokens) if model == "gpt2" else _sentencepiece(fields, tokens, kinds)
    _add_special(tokenizer, tokens, kinds)

    named = {
        name: _token_id(fields, name, tokens) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    bos_id = named["bos"]
    if bos_id is not None and fields.get("tokenizer.ggml.add_bos_token", _adds_bos(fields)):
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_id)]
        )
    ends = [i for i in (named["eos"], named["eot"], named["eom"]) if i is not None]
    ends += [i for i, token in enumerate(tokens) if kinds[i] == _CONTROL and token in _ANSWER_ENDS]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.get(f"{architecture}.context_length"),
        "chat_template": fields.get("tokenizer.chat_template"),
        **{
            f"{key}_token": tokens[token_id]
            for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (token_id := named[name]) is not None
        },
    }
    return GgufTokenizer(
        tokenizer, {k: v for k, v in config.items() if v is not None}, bos_id, tuple(dict.fromkeys(ends))
    )


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.get("tokenizer.ggml.merges") or ()]
    # Llama 3 and Mistral use a word that is itself a token, even if no merges produce it.
    ignore_merges = pre in _LLAMA3 + _TEKKEN
    try:
        tokenizer = Tokenizer(models.BPE(_ids(tokens), merges, ignore_merges=ignore_merges))
    except Exception as error:  # noqa: BLE001  the library raises plain Exception for inconsistent merges
        raise ModelError(f"the GGUF file's merges do not fit its tokens: {one_line(error)}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_splitters(pre))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splitters(pre: str) -> list[Any]:
    gpt2_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        return [pre_tokenizers.Digits(individual_digits=True), gpt2_words]
    if pre in _GPT2:
        return [gpt2_words]
    if pre in _LLAMA3 + _QWEN2 + _TEKKEN:
        words = Regex(_TEKKEN_WORDS if pre in _TEKKEN else _CL100K_WORDS % (3 if pre in _LLAMA3 else 1))
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return [pre_tokenizers.Split(words, "isolated"), as_bytes]
    known = ", ".join(_SINGLE_DIGITS + _GPT2 + _LLAMA3 + _QWEN2 + _TEKKEN)
    raise ModelError(f"the GGUF file's pre-tokenizer {pre!r} is unknown; known are {known}")


def _sentencepiece(fields: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    scores = fields.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(
            "the GGUF file's llama tokenizer has no score for every token; it needs tokenizer.ggml.scores"
        )
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            _ids(tokens), _merges(tokens, kinds, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    if prefix:
        # Add the space only at a session's start: text that is appended later continues earlier text.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Recover the BPE merges, in their order, from the tokens' scores.

    SentencePiece first merges the pair whose merged token has the highest score.
    """
    normal = {token: score for token, kind, score in zip(tokens, kinds, scores, strict=True) if kind == 1}
    found = [
        (-score, token[:cut], token[cut:])
        for token, score in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    pairs = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in pairs if k == _CONTROL]
    )
    # Some are runs of spaces, which the normalizer changes in texts: so normalize them too.
    is_normalized = tokenizer.normalizer is not None
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=is_normalized) for t, k in pairs if k == _USER_DEFINED]
    )


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _token_id(fields: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    value = fields.get(f"tokenizer.ggml.{name}_token_id")
    if value in (None, _NONE) or (value == len(tokens) and name == "padding"):  # one that was never added
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ModelError(f"the GGUF file's {name} token id is {value}; it must be below {len(tokens)}")
    return value


def _adds_bos(fields: Mapping[str, Any]) -> bool:
    """Return whether the model's family adds a beginning-of-sequence token.

    Used for files that do not state this.
    """
    return fields["tokenizer.ggml.model"] == "llama" or fields.get("tokenizer.ggml.pre") in _LLAMA3 + _TEKKEN
