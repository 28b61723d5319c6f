"""What a session asks of the device for one turn, and how requests are ordered. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from cache.names.policy import FULL
from worker.batch.row_sampler import RowSampler, RowSampling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import TypeAlias

    from cache.names.blocks import Span
    from cache.names.policy import Policy
    from cache.names.snapshot import Tensor
    from cache.names.tokens import Tokens
    from turnkeep_client.subjects import SessionKey
    from worker.batch.rows import Embedding
    from worker.text.answer import Answer

    #: Returns the file of the image with a fingerprint.
    ReadImage: TypeAlias = Callable[[bytes], Awaitable[bytes]]

#: The most tokens of a short answer.
SHORT_TOKENS: Final = 64
#: One step of priority counts as much as arriving this much earlier.
PRIORITY_S: Final = 10.0
#: One token of an answer's limit counts as much as arriving this much later, up to `_MOST_TOKENS` tokens.
TOKEN_S: Final = 0.02
_MOST_TOKENS: Final = 1024


class NoMemoryError(Exception):
    """The device had no room for a prompt's next piece, and nothing left to drop for it."""


@dataclass(slots=True)
class AuditedBlock:
    """A block, or a piece of one, whose KV is computed again to compare it with stored KV."""

    span: Span
    #: Its KV; empty until it has run, and if it could not be cut.
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
    """A turn that the device is to run: an append, or a generate, which has an `answer`."""

    key: SessionKey
    #: All tokens of the session up to where sampling starts, and what the answer has already.
    context: Tokens
    policy: Policy = FULL
    #: Higher ones run first.
    priority: int = 0
    #: Tokens that it already has were published before a crash.
    answer: Answer | None = None
    sampling: RowSampling = field(default_factory=RowSampling)
    #: Gets the vector of the token before the context's last one, which is unused; the turn stores no KV.
    embedding: Embedding | None = None
    #: Reads images of the context whose rows and KV are unknown.
    read_image: ReadImage | None = None
    #: Gets the KV of the context's end, without its last token, which is unused.
    audited: AuditedBlock | None = None
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        num_answered = len(self.answer.tokens) if self.answer is not None else 0
        object.__setattr__(self, "num_prompt", len(self.context) - num_answered)  # the answer grows later

    @property
    def tenant(self) -> str:
        """The session's tenant."""
        return self.key.tenant

    @property
    def max_new(self) -> int:
        """The most tokens that the answer may still add after the context."""
        return 0 if self.answer is None else self.num_prompt + self.answer.max_tokens - len(self.context)

    @property
    def target(self) -> int:
        """How many tokens have KV once the prompt is done.

        An append does not run its last token: the next turn runs it to draw an answer. If it ran twice, its
        KV could have other bits in memory than on disk.
        """
        return max(len(self.context) - (self.answer is None), 0)

    @property
    def draws(self) -> bool:
        """Whether the turn draws an answer after its prompt; the answer needs a batch row."""
        return self.answer is not None

    @property
    def is_short(self) -> bool:
        """Whether the answer's token limit is so low that it holds a batch row only for a short time."""
        return self.answer is not None and self.answer.max_tokens <= SHORT_TOKENS

    @property
    def is_drawn(self) -> bool:
        """Whether the answer, if there is one, is complete."""
        return self.answer is None or self.answer.finish_reason is not None

    @property
    def reusable(self) -> Tokens:
        """The prefix of the context whose KV may be reused; later tokens must run, for their outputs."""
        if self.audited is not None:
            return self.context[: self.audited.span.start]
        return self.context if self.embedding is None else self.context[:-2]

    def tokens(self, end: int) -> Tokens:
        """Return the first `end` tokens of the context followed by the answer."""
        if end <= len(self.context) or self.answer is None:
            return self.context[:end]
        num_forced = len(self.context) - self.num_prompt
        return (self.context + self.answer.tokens[num_forced:])[:end]

    def sampler(self) -> RowSampler:
        """Make the sampler for the answer's next tokens, after those that it has already."""
        return RowSampler(
            self.sampling,
            answered=self.answer.tokens if self.answer is not None else (),
            prompt=self._penalised() if self.sampling.repetition_penalty != 1.0 else (),
            end_tokens=self.answer.end_tokens if self.answer is not None else frozenset(),
        )

    def _penalised(self) -> list[int]:
        """Return the token ids of the prompt that the answer's repetition penalty applies to.

        Under a policy with a window, these are only ids of tokens that the model still sees.
        """
        num = self.num_prompt
        seen = self.policy.seen(num) if self.policy.is_endless else ((0, num),)
        ids = [self.context.ids(start, end) for start, end in seen]
        # Takes a quarter of the time of a set of all tokens.
        penalised: list[int] = np.flatnonzero(np.bincount(np.concatenate(ids))).tolist()
        return penalised

    def continued(self) -> TurnRequest:
        """Return what is left to do: the same request behind the tokens that the answer has by now."""
        if self.answer is None:
            return self
        return replace(self, context=self.context[: self.num_prompt] + self.answer.tokens)


def place(arrived_s: float, priority: int, max_new: int = 0) -> float:
    """Return a request's rank among all requests, in seconds; the request with the lowest rank is first.

    The fewer tokens its answer may have (`max_new`), the lower its rank. A rank never changes, so no
    request starves: later requests can overtake it only for a limited time.
    """
    return arrived_s - priority * PRIORITY_S + min(max_new, _MOST_TOKENS) * TOKEN_S


def has_place(num: int, num_short: int, limit: int, part: int, *, is_short: bool) -> bool:
    """Return whether one more request may run beside `num` others, of which `num_short` have short answers.

    Up to (limit - 1) / part requests with short answers, rounded up, do not count towards `limit`, so that
    they need not wait for long answers. Any further ones count like requests with long answers.
    """
    return num + 1 - min(num_short + is_short, -(-(limit - 1) // part)) <= limit
