"""Says whether a model makes embeddings: the hidden state of a text's last token, after the final norm.

Decoders that were trained for this, such as Qwen3-Embedding, come in sentence-transformers' layout. Any other
decoder has such states too, but they are of little use for a search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .model_files import read_json

if TYPE_CHECKING:
    from pathlib import Path

POOLINGS: Final = ("auto", "last")


def no_embeddings(model: Any, folder: Path, pooling: str) -> str | None:
    """Say why a loaded model makes no embeddings; None if it does. Raises `ModelError`.

    With the `pooling` auto, the folder must say that it is a model for that; with last, any will do.
    """
    said = folder / "1_Pooling" / "config.json"
    if pooling == "auto" and not (folder / "modules.json").exists():
        return (
            "the worker's model makes no embeddings: serve one that does, such as `turnkeep serve --model"
            " Qwen/Qwen3-Embedding-0.6B`, or this one with --pooling last"
        )
    if pooling == "auto" and said.exists() and not read_json(said).get("pooling_mode_lasttoken"):
        return "the worker's model pools its tokens otherwise than by the last one, which is not supported"
    if not callable(getattr(model, "model", None)):
        return "the hidden states of the worker's model cannot be read"
    return None
