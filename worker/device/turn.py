"""The messages between the event loop and the device thread about one turn.

The event loop builds and submits a `Turn`. From then on only the device thread writes to it, until a
`Finished` or `Faulted` event returns the turn to the event loop.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from worker.device.order import SHORT_TOKENS

from .request import TurnRequest

if TYPE_CHECKING:
    import mlx.core as mx

    from cache.names.blocks import Span
    from cache.names.snapshot import Tensor
    from cache.names.tokens import Chain, Tokens
    from cache.store import StoredPast
    from turnkeep_client.messages import Chunk
    from turnkeep_client.subjects import SessionKey
    from worker.batch.rows import Row
    from worker.observe.traces import Phase

#: The number of a turn's last snapshots whose times are kept for traces; a long prompt has hundreds.
MOST_CUTS: Final = 8


@dataclass(frozen=True, slots=True)
class ResidentKv:
    """A session's caches, and the tokens that they cover. Device thread only."""

    caches: list[Any]
    tokens: Tokens


@dataclass(slots=True, eq=False)
class Turn(TurnRequest):
    """One run of a session's request on the device: its input from the event loop, and its state there.

    Turns of one priority run in the order of `place_s` (see `sessions.order`), the lowest first. KV of the
    context's first tokens comes from one of three places: the session's own KV on the device covers the first
    `num_kept` tokens; `restored` (evaluated arrays by name) covers the first `num_restored`; or KV is copied
    from the session `source`, which has, or will soon have, more of it. The turn ends at `num_granted`
    tokens, the limit of its memory, even if its answer is not complete. `spans` are the blocks that have no
    snapshot, of which the device removes those that it has cut; `edges` are the positions where the stored
    pieces of the last, partial block start and end (see `blocks.tail_start`). Only the event loop uses
    `chain`, which names the turn's blocks in the store, and `restores`, the traced phases of its restores
    and fetches.
    """

    place_s: float = 0.0
    num_kept: int = 0
    restored: dict[str, mx.array] | None = None
    num_restored: int = 0
    source: SessionKey | None = None
    num_granted: int = sys.maxsize
    spans: list[Span] = field(default_factory=list)
    edges: tuple[int, ...] = ()
    chain: Chain | None = None
    restores: list[Phase] = field(default_factory=list)

    # Written by the device thread:
    num_reused: int = field(init=False, default=0)
    num_prefilled: int = field(init=False, default=0)
    num_cached: int = field(init=False, default=0)  # tokens that have KV
    target: int = field(init=False, default=0)  # tokens that have KV once the prompt is done
    prefill_s: float = field(init=False, default=0.0)
    resident: ResidentKv | None = field(init=False, default=None)  # its session's KV, until the turn starts
    asks: bool = field(init=False, default=False)  # requests chunks; the prompt's last token waits for them
    most_blocks: int = field(init=False, default=1)  # in a piece, if the budget allows more than one
    past: StoredPast | None = field(init=False, default=None)  # KV on SSD that the prompt's next piece reads
    #: While its snapshots find no room in the writer's queue: the queue's room in bytes, and since when.
    behind: tuple[int, float] | None = field(init=False, default=None)
    caches: list[Any] | None = field(init=False, default=None)
    row: Row | None = field(init=False, default=None)
    cuts: deque[Phase] = field(init=False, default_factory=lambda: deque(maxlen=MOST_CUTS))

    @classmethod
    def of(cls, asked: TurnRequest, context: Tokens, place_s: float) -> Turn:
        """Make a turn for a request; `context` is the request's context, then the tokens of earlier turns."""
        return cls(
            asked.key,
            context,
            policy=asked.policy,
            priority=asked.priority,
            answer=asked.answer,
            sampling=asked.sampling,
            embedding=asked.embedding,
            place_s=place_s,
        )

    @property
    def tenant(self) -> str:
        """The session's tenant."""
        return self.key.tenant

    @property
    def scale(self) -> int:
        """How many times longer than usual the prompt's pieces are, which then run alone."""
        return min(self.most_blocks, self.policy.scale)

    @property
    def draws(self) -> bool:
        """Whether the turn draws an answer after its prompt; the answer needs a batch row."""
        return self.answer is not None

    @property
    def is_short(self) -> bool:
        """Whether the answer's token limit is so low that it holds a batch row only for a short time."""
        return self.answer is not None and self.answer.max_tokens <= SHORT_TOKENS

    @property
    def reusable(self) -> Tokens:
        """The prefix of the context whose KV may be reused; later tokens must run, for their outputs."""
        return self.context if self.embedding is None else self.context[:-2]

    def tokens(self, end: int) -> Tokens:
        """Return the first `end` tokens of the context followed by the answer."""
        if end <= len(self.context) or self.answer is None:
            return self.context[:end]
        num_forced = len(self.context) - self.num_prompt
        return (self.context + self.answer.tokens[num_forced:])[:end]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A piece of the prompt is done: now the first `num_cached` tokens of the context have KV."""

    turn: Turn
    num_cached: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """The answer's next chunk: one token, the text that it completes, and its log probability if wanted."""

    turn: Turn
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class SnapshotCut:
    """A snapshot as plain bytes: the KV of a turn's `span`."""

    turn: Turn
    span: Span
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """The device has copied what it could of the idle session for which `turn` stands."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class NeedsKv:
    """A turn needs KV from SSD; the event loop answers with `Device.give`.

    A prompt waits for the KV of its first `num_past` tokens, which its next piece needs, and before its last
    token for the chunks `spans`, which its answer needs. An answer requests only chunks and does not wait.
    """

    turn: Turn
    num_past: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class KvRead:
    """KV from SSD for a turn: `past`, read layer by layer, and the chunks `spans` with their tensors.

    `past` is None if some of its KV is missing on disk; requested chunks may be missing, too.
    """

    past: StoredPast | None = None
    spans: tuple[Span, ...] = ()
    tensors: dict[str, mx.array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn has ended. KV of its session's first `num_cached` tokens, `live_bytes`, stays on the device.

    This KV can be truncated to any number of tokens that is at least `earliest`.
    """

    turn: Turn
    num_cached: int
    live_bytes: int
    earliest: int = 0


@dataclass(frozen=True, slots=True)
class Faulted:
    """The turn failed on the device, which has dropped the KV of its session."""

    turn: Turn
    error: Exception


@dataclass(frozen=True, slots=True)
class Dropped:
    """The device has dropped the KV of idle sessions: memory was short, or an evaluation failed."""

    keys: tuple[SessionKey, ...]


@dataclass(frozen=True, slots=True)
class Starved:
    """No step fits, and no idle session is left to drop; snapshots that wait for the disk hold the memory."""


#: The events for which a turn's run waits; the last one is `Finished` or `Faulted`.
TurnEvent: TypeAlias = Sampled | Finished | Faulted
Event = Prefilled | Sampled | SnapshotCut | Copied | NeedsKv | Finished | Faulted | Dropped | Starved


class LostKvError(Exception):
    """An evaluation failed, so the turn's KV is unknown; the turn can start again from its snapshots.

    `weight` says how much the failure counts against the turn: 0 if the next pieces of prompts are shorter,
    2 if a prompt of this turn was part of the step that failed, else 1.
    """

    def __init__(self, error: Exception, *, weight: int) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.weight = weight


class NoRoomError(Exception):
    """A prompt's next piece would exceed the memory limit, and nothing is left to drop for it."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of one step, and the device's memory after it.

    `num_decoded` tokens were drawn for the `num_rows` answers that were running. Since the start,
    `num_drafted` counts draft tokens, `num_accepted` accepted draft tokens, and `saved_s` the seconds that
    drafts have saved.
    `estimated_bytes` is the estimate for the step besides weights and KV, `measured_bytes` the measurement.
    """

    events: tuple[Event, ...]
    num_rows: int
    num_decoded: int
    step_s: float
    active_bytes: int
    peak_bytes: int
    estimated_bytes: int
    measured_bytes: int
    num_drafted: int
    num_accepted: int
    saved_s: float
