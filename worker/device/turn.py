"""One turn on the device, and the messages between the event loop and the device thread about turns.

The event loop makes a `DeviceTurn` and hands it over. From then on it reads only the turn's request and plan,
which never change, and what events say; only the device thread reads and writes the rest.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from worker.batch import plane
from worker.batch.drafter import MOST_SEEN
from worker.batch.rows import Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

    from cache.names.blocks import Span
    from cache.names.policy import Policy
    from cache.names.snapshot import Tensor
    from cache.names.tokens import Chain, Tokens
    from cache.store import StoredPast
    from turnkeep_client.messages import Chunk
    from turnkeep_client.subjects import SessionKey
    from worker.batch.batch import Batch
    from worker.models.vision.families import View
    from worker.observe.traces import Phase

    from .request import TurnRequest

#: The number of a turn's last snapshots whose times are kept for traces; a long prompt has hundreds.
MOST_CUTS: Final = 8


@dataclass(frozen=True, slots=True)
class ResidentKv:
    """A session's caches, the tokens that they cover, and the policy of both. Device thread only."""

    caches: list[Any]
    tokens: Tokens
    policy: Policy

    def num_usable(self, request: TurnRequest) -> int:
        """Return how many of a request's first tokens this KV covers; 0 if it is of another policy.

        The event loop looks at policies too, but a session may have been reopened under another one since.
        """
        return self.tokens.num_common(request.reusable) if self.policy == request.policy else 0


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """Where a turn's KV comes from, and which of it has no snapshot; `engine.kv_lookup` makes it.

    KV of the context's first tokens is the session's own, restored from SSD, or copied from another session.
    """

    #: How many of the first tokens the session's own KV on the device covers, and how many restored arrays.
    num_kept: int = 0
    num_restored: int = 0
    #: The session to copy KV from, which has, or will soon have, more of it.
    source: SessionKey | None = None
    #: The blocks without a snapshot.
    spans: tuple[Span, ...] = ()
    #: Where the stored pieces of the last, partial block start and end; see `blocks.tail_start`.
    edges: tuple[int, ...] = ()
    #: Names the blocks in the store.
    chain: Chain | None = None
    #: The phases of the turn's restores and fetches, for traces.
    restores: tuple[Phase, ...] = ()


@dataclass(slots=True, eq=False)
class DeviceTurn:
    """One run of a request on the device: what is asked, the plan for its KV, and its state there."""

    request: TurnRequest
    plan: TurnPlan = field(default_factory=TurnPlan)
    place_s: float = 0.0  # its order among turns of one priority, the lowest first; see `request.place`
    restored: dict[str, mx.array] | None = None  # evaluated arrays, until its caches are built of them
    num_granted: int = sys.maxsize  # the turn ends at this many tokens, the limit of its memory

    num_kept: int = field(init=False, default=0)  # as planned, if the session's KV still has these tokens
    source: SessionKey | None = field(init=False)  # as planned, until the turn does not wait for it any more
    spans: list[Span] = field(init=False)  # the blocks that have no snapshot yet
    num_reused: int = field(init=False, default=0)
    num_prefilled: int = field(init=False, default=0)
    num_cached: int = field(init=False, default=0)  # tokens that have KV
    prefill_s: float = field(init=False, default=0.0)
    resident: ResidentKv | None = field(init=False, default=None)  # its session's KV, until the turn starts
    asks: bool = field(init=False, default=False)  # requests chunks; the prompt's last token waits for them
    most_blocks: int = field(init=False, default=1)  # in a piece, if the budget allows more than one
    past: StoredPast | None = field(init=False, default=None)  # KV on SSD that the prompt's next piece reads
    #: While its snapshots find no room in the writer's queue: the queue's room in bytes, and since when.
    behind: tuple[int, float] | None = field(init=False, default=None)
    caches: list[Any] | None = field(init=False, default=None)
    row: Row | None = field(init=False, default=None)
    unsaid: list[Chunk] = field(init=False, default_factory=list)  # drawn tokens that are not reported yet
    said_s: float = field(init=False, default=0.0)  # when tokens were last reported, by `time.monotonic`
    rows: dict[bytes, mx.array] = field(init=False, default_factory=dict)  # by an image's fingerprint
    cuts: deque[Phase] = field(init=False, default_factory=lambda: deque(maxlen=MOST_CUTS))

    def __post_init__(self) -> None:
        self.source, self.spans = self.plan.source, list(self.plan.spans)

    @property
    def scale(self) -> int:
        """How many times longer than usual the prompt's pieces are, which then run alone."""
        return min(self.most_blocks, self.request.policy.scale)

    @property
    def num_left(self) -> int:
        """How many tokens the answer may still get, by its token limit and the turn's granted memory."""
        answer = self.request.answer
        if answer is None:
            return 0
        return min(answer.max_tokens, self.num_granted - self.request.num_prompt) - len(answer.tokens)

    def make_row(self) -> Row:
        """Make the row of the answer, which begins behind the whole prompt."""
        request, context = self.request, self.request.context
        return Row(
            caches=self.caches,
            known=context.ids(max(len(context) - MOST_SEEN, 0)),
            sampler=request.sampler(),
            num_cached=request.target,
            num_left=self.num_left,
            most_held=request.policy.num_held(sys.maxsize),
            shift=plane.shift_after(context.spans),
            session=request.key,
        )

    def current_caches(self, batch: Batch) -> list[Any]:
        """Return the KV of the running turn, its own or its row's in the batch; valid until the next step."""
        return (self.caches if self.row is None else batch.caches(self.row)) or []

    @property
    def cost(self) -> TurnCost:
        """What the turn has done so far."""
        done = self.num_cached, self.num_reused, self.num_prefilled
        return TurnCost(*done, self.prefill_s, tuple(self.cuts), len(self.spans))


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What a turn has done."""

    #: Tokens of its session that have KV, or had it before the turn failed; and how many had it at its start.
    num_cached: int
    num_reused: int = 0
    #: Prompt tokens that it has prefilled, in `prefill_s` seconds.
    num_prefilled: int = 0
    prefill_s: float = 0.0
    #: The times of its last snapshots.
    cuts: tuple[Phase, ...] = ()
    #: How many more snapshots found no room in the writer's queue.
    num_uncut: int = 0


@dataclass(frozen=True, slots=True)
class PrefilledPiece:
    """A piece of the prompt is done: now the first `num_cached` tokens of the context have KV."""

    turn: DeviceTurn
    num_cached: int
    #: How many of the piece's tokens were of the request's prompt, not of an answer that it continues.
    num_prompt: int


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The answer's next chunk: tokens, the text that they complete, and their log probabilities if wanted."""

    turn: DeviceTurn
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class SnapshotCut:
    """A snapshot as plain bytes: the KV of a turn's `span`."""

    turn: DeviceTurn
    span: Span
    tensors: tuple[Tensor, ...]

    @property
    def size_bytes(self) -> int:
        """The bytes of the tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class CopiedSession:
    """The device has copied what it could of the idle session for which `turn` stands."""

    turn: DeviceTurn


@dataclass(frozen=True, slots=True)
class KvRequest:
    """A turn needs KV from SSD; the event loop answers with `Device.give`.

    A prompt waits for the KV of its first `num_past` tokens, which its next piece needs, and before its last
    token for the chunks `spans`, which its answer needs. An answer requests only chunks and does not wait.
    """

    turn: DeviceTurn
    num_past: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """A turn needs the views of an image; the event loop answers with `Device.show`."""

    turn: DeviceTurn
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class KvRead:
    """KV from SSD for a turn, or what is there of it."""

    #: Earlier KV, which is read layer by layer; None if none was requested, or the disk lacks some of it.
    past: StoredPast | None = None
    #: The chunks that were read, and their tensors; requested ones may be missing.
    spans: tuple[Span, ...] = ()
    tensors: dict[str, mx.array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishedTurn:
    """The turn has ended. Its session's KV, of the first `cost.num_cached` tokens, stays on the device."""

    turn: DeviceTurn
    cost: TurnCost
    #: The bytes of this KV.
    live_bytes: int
    #: It can be truncated to any number of tokens that is at least this.
    earliest: int = 0


@dataclass(frozen=True, slots=True)
class FaultedTurn:
    """The turn failed on the device, which has dropped the KV of its session."""

    turn: DeviceTurn
    error: Exception
    cost: TurnCost


@dataclass(frozen=True, slots=True)
class DroppedKv:
    """The device has dropped the KV of idle sessions: memory was short, or an evaluation failed."""

    keys: tuple[SessionKey, ...]


@dataclass(frozen=True, slots=True)
class Starvation:
    """No step fits, and no idle session is left to drop; snapshots that wait for the disk hold the memory."""


#: What `Device.show` gives a turn: the views of an image, or why there are none.
ImageViews: TypeAlias = "Sequence[View] | Exception"
#: The events for which a turn's run waits; the last one is `FinishedTurn` or `FaultedTurn`.
TurnEvent: TypeAlias = SampledTokens | FinishedTurn | FaultedTurn
Event = (
    PrefilledPiece
    | SampledTokens
    | SnapshotCut
    | CopiedSession
    | KvRequest
    | ImageRequest
    | FinishedTurn
    | FaultedTurn
    | DroppedKv
    | Starvation
)


class LostKvError(Exception):
    """An evaluation failed, so the turn's KV is unknown; the turn can start again from its snapshots.

    `weight` says how much the failure counts against the turn: 0 if the next pieces of prompts are shorter,
    2 if a prompt of this turn was part of the step that failed, else 1.
    """

    def __init__(self, error: Exception, *, weight: int) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.weight = weight


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of one step, and the device's memory after it."""

    events: tuple[Event, ...] = ()
    #: How many answers were running, and how many tokens were drawn for them.
    num_rows: int = 0
    num_decoded: int = 0
    step_s: float = 0.0
    #: MLX's memory after the step, and the most since the start.
    active_bytes: int = 0
    peak_bytes: int = 0
    #: What the step was estimated to take besides weights and KV, and what was measured.
    estimated_bytes: int = 0
    measured_bytes: int = 0
    #: Both, of the step with the highest measurement since the start.
    highest_bytes: tuple[int, int] = (0, 0)
    #: Since the start: draft tokens, accepted ones, and the seconds that drafts have saved.
    num_drafted: int = 0
    num_accepted: int = 0
    saved_s: float = 0.0
