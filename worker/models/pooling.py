"""Decides whether a model can make answers or embeddings, or rerank documents.

A decoder does both from a prompt's last token: an embedding is its hidden state after the final norm, and a
reranking score compares its logits of two words. Decoders trained for this, such as Qwen3-Embedding and
Qwen3-Reranker, come in the layout of sentence-transformers. An encoder (see `encoder`) does one of the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .backbone import is_bare
from .model_files import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from .tokenizer import Tokenizer

#: Control tokens of the prompt format that Qwen3-Reranker was trained with.
_MARKS: Final = ("<|im_start|>", "<|im_end|>")
_WORDS: Final = ("true_token_id", "false_token_id")
#: The name of the module in sentence-transformers that compares two logits.
_JUDGING: Final = "LogitScore"
_NO_JUDGE: Final = (
    "the worker's model does not rerank: serve one that does, such as `turnkeep serve --model"
    " Qwen/Qwen3-Reranker-0.6B`"
)
_NO_EMBEDDINGS: Final = (
    "the worker's model makes no embeddings: serve one that does, such as `turnkeep serve --model"
    " Qwen/Qwen3-Embedding-0.6B`"
)
_CONVERTED: Final = ", or give this one the modules.json of the repository that it was converted from"


def no_answers(config: Mapping[str, Any], folder: Path) -> str | None:
    """Return why a model makes no answers: it was trained for something else; None if it makes some.

    Raises `ModelError`.
    """
    modules = _modules(folder)
    if not (is_encoder(config) or modules or is_bare(folder)):
        return None
    kind = "scores" if is_cross_encoder(config) or _JUDGING in modules else "embeddings"
    return (
        f"the worker's model makes {kind} of texts, and no answers: ask for {kind}, or serve one that chats"
    )


def no_embeddings(model: Any, config: Mapping[str, Any], folder: Path) -> str | None:
    """Return why a loaded model cannot make embeddings, as its folder says; None if it can.

    Raises `ModelError`.
    """
    said = folder / "1_Pooling" / "config.json"
    if is_encoder(config) and not is_cross_encoder(config):
        return None
    modules = _modules(folder)
    if is_cross_encoder(config) or _JUDGING in modules:
        return _NO_EMBEDDINGS
    if not modules:
        return _NO_EMBEDDINGS + _CONVERTED
    if said.exists() and not read_json(said).get("pooling_mode_lasttoken"):
        return "the worker's model pools its tokens otherwise than by the last one, which is not supported"
    if not callable(getattr(model, "model", None)):
        return "the hidden states of the worker's model cannot be read"
    return None


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether a model is an encoder (see `encoder`), which cannot answer."""
    return config.get("model_type") == "bert"


def is_cross_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether a model is a cross-encoder, which scores pairs of texts."""
    return is_encoder(config) and config.get("architectures") == ["BertForSequenceClassification"]


def judging(tokenizer: Tokenizer, config: Mapping[str, Any], folder: Path) -> tuple[int, ...] | str:
    """Return the indices of the logits for a reranking score, or why the model cannot rerank.

    The indices are the tokens yes and no, or a cross-encoder's only output. Raises `ModelError`.
    """
    if is_cross_encoder(config):
        return (0,)
    if _JUDGING not in _modules(folder):
        return _NO_JUDGE if is_encoder(config) else _NO_JUDGE + _CONVERTED
    ids = [token for word in ("yes", "no") for token in tokenizer.encode(word, at_start=False)]
    said = folder / "1_LogitScore" / "config.json"
    told = read_json(said) if said.exists() else dict(zip(_WORDS, ids, strict=False))
    if [told.get(word) for word in _WORDS] != ids or any(tokenizer.control_id(one) is None for one in _MARKS):
        return "the worker's model judges in another format than Qwen3-Reranker's, which is not supported"
    return ids[0], ids[1]


def _modules(folder: Path) -> str:
    """Return the text of modules.json, which lists the modules after the model; empty without this file."""
    path = folder / "modules.json"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
