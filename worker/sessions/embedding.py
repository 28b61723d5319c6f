"""Answers `embed` and `rerank` requests: each text or document is a prompt whose KV is not kept.

A request counts as one session towards its tenant's limit (`shares`). The device prefills its prompts in
pieces, as it does for sessions, so they delay running answers no more than a session does. Event loop only.
"""

from __future__ import annotations

import math
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from cache.names.tokens import as_tokens
from turnkeep_client.messages import Embedded, EmbedRequest, Failed, Reranked, failure
from turnkeep_client.subjects import SessionKey
from worker.device.request import NoMemoryError
from worker.engine.port import DeviceFaultError, StoppingError
from worker.process.concurrency import task_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.messages import RerankRequest

    from .services import Services

#: Bytes that one number of a vector takes in a reply: 32 bits in base64.
_NUMBER_BYTES: Final = 16 / 3
#: The share of a reply's bytes that vectors may fill.
_FILLED: Final = 0.9
#: The priority of requests with several texts: a user is more likely to wait for a request with one.
_LIST_PRIORITY: Final = -1
#: The prompt that Qwen3-Reranker was trained with, as its authors published it.
_JUDGE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"


class Embedder:
    """Computes vectors with the worker's model, or relevance scores if the model is a reranker."""

    def __init__(
        self, services: Services, *, refusal: str | None, judging: tuple[int, ...] | str, size: int
    ) -> None:
        """`refusal` says why the model makes no vectors, None if it does; a vector has `size` numbers.

        `judging` are the ids of the logits that score a document (yes and no, or only one); if it is a
        string, it says why the model cannot score.
        """
        self._services = services
        self._engine = services.engine
        self._shares = services.shares
        self._tokenising = services.fold.tokenising
        self._max_bytes = services.limits.max_result_bytes
        self._tokenizer = services.formats.tokenizer
        self._refusal = refusal
        self._judging = judging
        self._size = size
        self._numbers = count()

    async def answer(
        self, tenant: str, request: EmbedRequest | RerankRequest
    ) -> Embedded | Reranked | Failed:
        """Return the vectors of all inputs, or the scores of all documents.

        Returns `Failed` if an input is invalid, the memory does not suffice, the device fails, or it stops.
        """
        if isinstance(request, EmbedRequest):
            return await self._embed(tenant, request)
        return await self._rerank(tenant, request)

    async def _embed(self, tenant: str, request: EmbedRequest) -> Embedded | Failed:
        size = request.dimensions or self._size
        if self._refusal or size > self._size:
            why = self._refusal or f"a vector of this model has {self._size} dimensions, not {size}"
            return failure(None, "invalid_request", why, field=None if self._refusal else "dimensions")
        if (most := int(self._max_bytes * _FILLED / _NUMBER_BYTES / size)) < len(request.inputs):
            why = f"a reply takes {most} vectors: send fewer inputs"
            return failure(None, "invalid_request", why, field="inputs")
        room = request.input_tokens and min(request.input_tokens, self._most_tokens)
        prompts = await self._tokenising.in_thread(tenant, self._tokenised, request.inputs, room)
        vectors = await self._run(tenant, prompts, "inputs")
        if isinstance(vectors, Failed):
            return vectors
        return Embedded(
            vectors=tuple(_cut(vector, size) for vector in vectors),
            tokens=tuple(map(len, prompts)),
            model=self._services.model,
        )

    async def _rerank(self, tenant: str, request: RerankRequest) -> Reranked | Failed:
        if isinstance(self._judging, str):
            return failure(None, "invalid_request", self._judging)
        in_pairs = len(self._judging) == 1
        prompted = self._paired if in_pairs else self._judged
        prompts = await self._tokenising.in_thread(tenant, prompted, request)
        logits = await self._run(tenant, prompts, "documents", logits_of=self._judging)
        if isinstance(logits, Failed):
            return logits
        scores = tuple(_share(*np.frombuffer(both, "<f4").tolist()) for both in logits)
        return Reranked(scores=scores, tokens=tuple(map(len, prompts)), model=self._services.model)

    async def _run(
        self,
        tenant: str,
        prompts: Sequence[Sequence[int]],
        param: str,
        *,
        logits_of: tuple[int, ...] = (),
    ) -> list[bytes] | Failed:
        """Compute each prompt's vector, or, if `logits_of` has token ids, their logits after the prompt."""
        for number, prompt in enumerate(prompts):
            if why := self._fault(prompt):
                where = f"{param}[{number}]"
                return failure(None, "invalid_request", f"{where} {why}", field=where)
        key = SessionKey(tenant, f"_embed.{next(self._numbers)}")  # no session has such a name
        priority = _LIST_PRIORITY if len(prompts) > 1 else 0
        vectors: dict[int, bytes] = {}

        async def embed(number: int, prompt: Sequence[int]) -> None:
            own = SessionKey(tenant, f"{key.session}.{number}")
            tokens = as_tokens(prompt)
            vectors[number] = await self._engine.embed(own, tokens, priority=priority, logits_of=logits_of)

        try:
            async with (
                self._shares.enter(key, priority, at_once=False, max_new=0),
                task_group() as tasks,
            ):
                for number, prompt in enumerate(prompts):
                    tasks.start_soon(embed, number, prompt)
        except StoppingError:
            return failure(None, "overloaded", "the worker stops: ask again")
        except NoMemoryError as error:
            return failure(None, "memory_exceeded", str(error))
        except DeviceFaultError as error:
            return failure(None, "internal", str(error))
        return [vectors[number] for number in range(len(prompts))]

    def _tokenised(self, inputs: Sequence[str | Sequence[int]], most: int | None) -> list[Sequence[int]]:
        encode = self._tokenizer.encode_whole
        return [encode(one, most=most) if isinstance(one, str) else one[:most] for one in inputs]

    def _judged(self, request: RerankRequest) -> list[Sequence[int]]:
        """Return a Qwen3-Reranker prompt for each document; special tokens in its text become plain text."""
        known = self._tokenizer
        asked = [known.as_text(one) for one in (request.instruction or _INSTRUCTION, request.query)]

        def prompt(text: str) -> list[int]:
            return known.encode(_JUDGE.format(*asked, text), at_start=True)

        texts = [known.as_text(document) for document in request.documents]
        if request.document_tokens is not None:
            most = min(request.document_tokens, max(self._most_tokens - len(prompt("")), 0))
            texts = [known.marked(known.encode(text, at_start=False)[:most]) for text in texts]
        return [prompt(text) for text in texts]

    def _paired(self, request: RerankRequest) -> list[Sequence[int]]:
        """Return a cross-encoder's prompt for each document: query and document, encoded as one pair."""
        encode, query, most = self._tokenizer.encode_whole, self._tokenizer.encode_whole(request.query), None
        if request.document_tokens is not None:
            most = min(len(encode("", query)) + request.document_tokens, self._most_tokens)
        return [encode(one, query, most) for one in request.documents]

    @property
    def _most_tokens(self) -> int:
        """The length of the longest prompt for which the model has positions and memory."""
        return self._engine.most_tokens(self._services.limits.context_tokens + 1) - 1

    def _fault(self, prompt: Sequence[int]) -> str:
        most = self._most_tokens
        if not 0 < len(prompt) <= most:
            return f"has {len(prompt)} tokens: it must have 1 to {most}"
        if max(prompt) >= self._services.limits.vocab_size:
            return f"has a token id outside of the model's vocabulary of {self._services.limits.vocab_size}"
        return ""


def _cut(vector: bytes, size: int) -> bytes:
    """Return the first `size` numbers of a vector (32-bit floats), scaled to length 1."""
    if len(vector) == 4 * size:
        return vector
    numbers = np.frombuffer(vector, "<f4")[:size]
    return (numbers / max(float(np.linalg.norm(numbers)), 1e-12)).astype("<f4").tobytes()


def _share(yes: float, no: float = 0.0) -> float:
    """Return the probability of the first of two logits (softmax), or of one logit alone (sigmoid)."""
    less = math.exp(-abs(yes - no))  # at most 1, so it does not overflow
    return (1.0 if yes >= no else less) / (1.0 + less)
