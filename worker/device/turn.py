"""What the event loop and the device thread say to each other about one turn.

A `Turn` changes hands once: the loop builds it and submits it, from then on the device thread alone writes
to it, until its `Finished` or `Faulted` event hands it back.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cache.names import blocks
from cache.names.blocks import as_tokens
from worker.batch.sampling import Sampling

if TYPE_CHECKING:
    import mlx.core as mx

    from cache.names.blocks import Chain, Span, Tokens
    from cache.names.snapshot import Tensor
    from turnkeep_client.subjects import SessionKey
    from worker.batch.batch import Row
    from worker.text.answer import Answer


@dataclass(frozen=True, slots=True)
class ResidentKv:
    """A session's caches, and the tokens that they cover. Device thread only."""

    caches: list[Any]
    tokens: Tokens


@dataclass(slots=True, eq=False)
class Turn:
    """One append or generate on its way through the device.

    `context` are all tokens of the session up to where sampling starts. The first `num_kept` of them have
    KV on the device under `key`; or `restored` brings the KV of the first `num_restored`, as evaluated
    arrays by name; or the session `source` has, or is about to have, more of it than that. A generate has
    an `answer`; what it already holds are tokens that were published before a crash, and they are the
    context's end. At `num_granted` tokens the turn ends, whether its answer is over or not: no more memory
    is reserved for it. `spans` are the pieces of the context that have no snapshot, `edges` where the
    stored pieces of its last, partial block start and end: see `blocks.tail_start`. `chain`, which
    names the turn's blocks to the store, is the event loop's alone. `resident` is what its session had on the
    device, until the turn is taken up.
    """

    key: SessionKey
    context: Tokens
    num_kept: int = 0
    restored: dict[str, mx.array] | None = None
    num_restored: int = 0
    source: SessionKey | None = None
    answer: Answer | None = None
    sampling: Sampling = field(default_factory=Sampling)
    priority: int = 0
    num_granted: int = sys.maxsize
    spans: list[Span] = field(default_factory=list)
    edges: tuple[int, ...] = ()
    chain: Chain | None = None

    # Written by the device thread:
    num_prompt: int = field(init=False)
    num_reused: int = field(init=False, default=0)
    num_prefilled: int = field(init=False, default=0)
    num_cached: int = field(init=False, default=0)
    target: int = field(init=False, default=0)
    prefill_s: float = field(init=False, default=0.0)
    resident: ResidentKv | None = field(init=False, default=None)
    caches: list[Any] | None = field(init=False, default=None)
    row: Row | None = field(init=False, default=None)

    @property
    def tenant(self) -> str:
        """Whose turn it is."""
        return self.key.tenant

    @property
    def draws(self) -> bool:
        """Whether an answer follows the prompt."""
        return self.answer is not None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.context) - (len(self.answer.tokens) if self.answer else 0)

    def tokens(self, end: int) -> Tokens:
        """Return the first `end` tokens of context and answer."""
        if end <= len(self.context) or self.answer is None:
            return self.context[:end]
        num_forced = len(self.context) - self.num_prompt
        return (self.context + as_tokens(self.answer.tokens[num_forced:]))[:end]


def num_common(one: Tokens, other: Tokens) -> int:
    """Count the leading tokens that two sessions share."""
    return blocks.num_common(blocks.pack(one), blocks.pack(other))


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A chunk is done; KV now covers `num_cached` of the context's tokens."""

    turn: Turn
    num_cached: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """The answer's token number `index`, with the text that it made certain."""

    turn: Turn
    index: int
    token: int
    text: str


@dataclass(frozen=True, slots=True)
class SnapshotCut:
    """A snapshot as plain bytes; or None, where the writer had no room, or cutting it failed.

    Where some layers have states that only the end of KV has, one that was cut later is without them.
    `state_lost` says that there was one, but no room for it.
    """

    turn: Turn
    span: Span
    tensors: tuple[Tensor, ...] | None
    state_lost: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn is over. Its session's KV stays on the device: `num_cached` tokens, `live_bytes` bytes."""

    turn: Turn
    num_cached: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class Faulted:
    """The turn failed on the device, and its session's KV is gone from there."""

    turn: Turn
    error: Exception


@dataclass(frozen=True, slots=True)
class Short:
    """The device lacks so many bytes, which idle sessions hold; the session `but` is not to be dropped.

    The event loop drops some, or all where they hold less, and answers with `Device.made_room`.
    """

    num_bytes: int
    but: SessionKey | None = None


@dataclass(frozen=True, slots=True)
class Starved:
    """No step fits, and no idle session is left: what waits for the disk is in the way."""


Event = Prefilled | Sampled | SnapshotCut | Finished | Faulted | Short | Starved


class NoRoomError(Exception):
    """A prompt's next piece would cross the memory limit, and nothing is left that could make room."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did, and how the device stands after it.

    `num_decoded` tokens were drawn for the `num_rows` answers that ran before it. `num_drafted` counts the
    tokens guessed since the start, `num_accepted` those that were right. `estimated_bytes` is what the step
    was thought to need besides weights and KV, `measured_bytes` what it did need.
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
