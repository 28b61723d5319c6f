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
    """Input embeddings for the tokens of a piece at the indices `at`: `rows`, (tokens, hidden size).

    Rows may be longer: what follows is added to the outputs of the first layers, a hidden size for each. The
    tokens of each image in `joint` attend to each other in both directions: in layers with windows, and if it
    `joins_everywhere`, in all.
    """

    at: Sequence[int]
    rows: mx.array
    joint: Sequence[ImageSpan] = ()
    joins_everywhere: bool = True


def embedded(
    model: Any, tokens: mx.array, images: Sequence[tuple[int, ImageRows | None]]
) -> tuple[mx.array, mx.array]:
    """Return the input embeddings of `tokens`, (tokens, hidden size), and the tokens for later layers.

    `images` replace some embeddings, for which later layers get the token 0, padding. Each of the `images`
    has the index in `tokens` of its piece's first token.
    """
    found, later = embedding(model)(tokens), mx.array(tokens)
    for start, image in images:
        if image is not None and len(image.at):
            at = mx.array([start + i for i in image.at])
            found[at] = image.rows[:, : found.shape[-1]].astype(found.dtype)
            later[at] = 0
    return found, later


def added(embeddings: mx.array, images: Sequence[tuple[int, ImageRows | None]]) -> list[mx.array]:
    """Return what to add to the outputs of the first layers, each in the shape of the pass's `embeddings`."""
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

    Some models scale embeddings. Its later layers may use the tokens too only if it is known that it
    `uses_tokens`.
    """
    tokens = mx.arange(1, 5)
    try:
        plain = model(tokens[None], cache=make_prompt_cache(model))
        rows, later = embedded(model, tokens, ())
        later = later if uses_tokens else mx.zeros_like(later)
        other = model(later[None], cache=make_prompt_cache(model), input_embeddings=rows[None])
        return bool(mx.array_equal(plain, other).item())
    except (AttributeError, TypeError):
        return False
