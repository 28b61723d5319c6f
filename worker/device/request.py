"""What a session asks of the device for one turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cache.names.policy import FULL
from worker.batch.row_sampler import Sampling

if TYPE_CHECKING:
    from cache.names.policy import Policy
    from cache.names.tokens import Tokens
    from turnkeep_client.subjects import SessionKey
    from worker.batch.rows import Embedding
    from worker.text.answer import Answer


@dataclass(slots=True, eq=False)
class TurnRequest:
    """A turn that the device is to run: an append, or a generate, which has an `answer`.

    `context` has all tokens of the session up to where sampling starts. Tokens that the answer already has
    were published before a crash; they are the end of the context. Higher priorities run first. With
    `embedding`, the context ends with an unused token: the turn computes the vector of the token before it,
    and stores no KV.
    """

    key: SessionKey
    context: Tokens
    policy: Policy = FULL
    priority: int = 0
    answer: Answer | None = None
    sampling: Sampling = field(default_factory=Sampling)
    embedding: Embedding | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.context) - (len(self.answer.tokens) if self.answer else 0)

    @property
    def max_new(self) -> int:
        """The most tokens that the answer may still add after the context."""
        return 0 if self.answer is None else self.num_prompt + self.answer.max_tokens - len(self.context)
