"""Computes the input embeddings of pieces of prompts that have images. Device thread only.

Steps without images do not use this module: there the model embeds the tokens itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.names.images import ImageSpan


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The input embeddings of those tokens of a piece of a prompt that belong to images."""

    #: The indices of these tokens in the piece.
    at: Sequence[int]
    #: One row for each: (tokens, hidden size). If rows are longer, the second hidden size is added to the
    #: outputs of the first layer, the third to those of the second layer, and so on.
    rows: mx.array
    #: Images whose tokens attend to each other in both directions.
    joint: Sequence[ImageSpan] = ()
    #: Whether they do so in all layers; otherwise only in layers with windows.
    joins_everywhere: bool = True


def input_embeddings(
    model: Any, tokens: mx.array, images: Sequence[tuple[int, ImageRows | None]]
) -> tuple[mx.array, mx.array]:
    """Return the input embeddings of `tokens`, (tokens, hidden size), and the tokens for later layers.

    `images` has, for each piece, the index in `tokens` of the piece's first token, and the `ImageRows`. They
    replace the embeddings of their tokens, for which later layers get the token 0, padding.
    """
    found, later = embedding(model)(tokens), mx.array(tokens)
    for start, image in images:
        if image is not None and len(image.at):
            at = mx.array([start + i for i in image.at])
            found[at] = image.rows[:, : found.shape[-1]].astype(found.dtype)
            later[at] = 0
    return found, later


def layer_additions(embeddings: mx.array, images: Sequence[tuple[int, ImageRows | None]]) -> list[mx.array]:
    """Return what to add to the outputs of the first layers, for each layer an array as `embeddings`.

    `images` are as for `input_embeddings`, which has returned `embeddings`. Empty if rows are not longer.
    """
    size, found = embeddings.shape[-1], list[mx.array]()
    for start, image in images:
        if image is None or not len(image.at):
            continue
        at = mx.array([start + i for i in image.at])
        for layer, rows in enumerate(mx.split(image.rows, image.rows.shape[-1] // size, axis=-1)[1:]):
            if layer == len(found):
                found.append(mx.zeros_like(embeddings))
            found[layer][at] = rows.astype(embeddings.dtype)
    return found


def embedding(model: Any) -> Any:
    """Return the module of a language model that embeds tokens. Raises `AttributeError` if there is none."""
    return getattr(model, "language_model", model).model.embed_tokens


def takes_rows(model: Any, *, uses_tokens: bool) -> bool:
    """Say whether a model accepts input embeddings, and computes the same from them as from the tokens.

    Some models scale embeddings. Unless `uses_tokens`, the result must not depend on the tokens that the
    later layers get besides the embeddings.
    """
    tokens = mx.arange(1, 5)
    try:
        plain = model(tokens[None], cache=make_prompt_cache(model))
        rows, later = input_embeddings(model, tokens, ())
        later = later if uses_tokens else mx.zeros_like(later)
        other = model(later[None], cache=make_prompt_cache(model), input_embeddings=rows[None])
        return bool(mx.array_equal(plain, other).item())
    except (AttributeError, TypeError):
        return False
