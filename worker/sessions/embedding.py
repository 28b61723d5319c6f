"""Answers `embed` requests: vectors of texts, each a prompt of its own that leaves nothing behind.

A request takes one of its tenant's places (`shares`), and its prompts run in pieces between those of
sessions, so it delays running answers no more than a prompt does. Event loop only.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from cache.names.tokens import as_tokens
from turnkeep_client.messages import Embedded, failure
from turnkeep_client.subjects import SessionKey
from worker.process.concurrency import in_thread, task_group

from .port import DeviceFaultError, NoMemoryError, StoppingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.messages import EmbedRequest, Failed
    from worker.models.tokenizer import Tokenizer

    from .port import EnginePort
    from .shares import Shares

#: Size of a number of a vector in a reply: 32 bits in base64.
_NUMBER_BYTES: Final = 16 / 3
#: The part of a reply that vectors may fill.
_FILLED: Final = 0.9
#: Lists come behind single texts, for which somebody is likely to wait.
_LIST_PRIORITY: Final = -1


class Embedder:
    """Makes the vectors of one worker's model."""

    def __init__(
        self,
        engine: EnginePort,
        tokenizer: Tokenizer,
        shares: Shares,
        *,
        refusal: str | None,
        model: str,
        size: int,
        context_tokens: int,
        vocab_size: int,
        max_bytes: int,
    ) -> None:
        """`refusal` says why the model makes none; a vector has `size` numbers, a reply `max_bytes`."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._shares = shares
        self._refusal = refusal
        self._model = model
        self._size = size
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._max_bytes = max_bytes
        self._numbers = count()

    async def answer(self, tenant: str, request: EmbedRequest) -> Embedded | Failed:
        """Return the vectors of all inputs, or why there are none."""
        size = request.dimensions or self._size
        if self._refusal or size > self._size:
            why = self._refusal or f"a vector of this model has {self._size} dimensions, not {size}"
            return failure(None, "invalid_request", why)
        if (most := int(self._max_bytes * _FILLED / _NUMBER_BYTES / size)) < len(request.inputs):
            return failure(None, "invalid_request", f"a reply takes {most} vectors: send fewer inputs")
        prompts = await in_thread(self._tokenised, request.inputs)
        for number, prompt in enumerate(prompts):
            if why := self._fault(prompt):
                return failure(None, "invalid_request", f"inputs[{number}] {why}")
        key = SessionKey(tenant, f"_embed.{next(self._numbers)}")  # no session has such a name
        priority = _LIST_PRIORITY if len(prompts) > 1 else 0
        vectors: dict[int, bytes] = {}

        async def embed(number: int, prompt: Sequence[int]) -> None:
            own = SessionKey(tenant, f"{key.session}.{number}")
            vectors[number] = await self._engine.embed(own, as_tokens(prompt), priority=priority)

        try:
            async with self._shares.enter(key, priority, at_once=False, max_new=0), task_group() as tasks:
                for number, prompt in enumerate(prompts):
                    tasks.start_soon(embed, number, prompt)
        except StoppingError:
            return failure(None, "overloaded", "the worker stops: ask again")
        except NoMemoryError as error:
            return failure(None, "memory_exceeded", str(error))
        except DeviceFaultError as error:
            return failure(None, "internal", str(error))
        return Embedded(
            vectors=tuple(_cut(vectors[number], size) for number in range(len(prompts))),
            tokens=tuple(map(len, prompts)),
            model=self._model,
        )

    def _tokenised(self, inputs: Sequence[str | Sequence[int]]) -> list[Sequence[int]]:
        return [self._tokenizer.encode_whole(one) if isinstance(one, str) else one for one in inputs]

    def _fault(self, prompt: Sequence[int]) -> str:
        most = self._engine.most_tokens(self._context_tokens + 1) - 1  # what fits into memory
        if not 0 < len(prompt) <= most:
            return f"has {len(prompt)} tokens: it must have 1 to {most}"
        if max(prompt) >= self._vocab_size:
            return f"has a token id outside of the model's vocabulary of {self._vocab_size}"
        return ""


def _cut(vector: bytes, size: int) -> bytes:
    """Return the first numbers of a vector, of length 1 again."""
    if len(vector) == 4 * size:
        return vector
    numbers = np.frombuffer(vector, "<f4")[:size]
    return (numbers / max(float(np.linalg.norm(numbers)), 1e-12)).astype("<f4").tobytes()
