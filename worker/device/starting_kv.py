"""Gives each turn the KV that it starts from: its session's own, a restored snapshot, or another session's.

Device thread only. Another session's KV is copied: a turn waits here while a running turn prefills the prefix
that both share. The `runner` runs the steps and ends turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from cache.kv import layers

from .turn import ResidentKv

if TYPE_CHECKING:
    from turnkeep_client.subjects import SessionKey

    from .idle_kv import IdleKv
    from .served_model import ServedModel
    from .turn import DeviceTurn

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Following:
    turn: DeviceTurn
    leader: DeviceTurn
    num_tokens: int


class TurnSharing:
    """The submitted turns, by session, and which of them wait for another turn's KV. No MLX.

    Lets one turn prefill a prefix that several turns share, while the other turns wait.
    """

    def __init__(self) -> None:
        self._active: dict[SessionKey, DeviceTurn] = {}
        self._following: list[_Following] = []

    @property
    def following(self) -> list[DeviceTurn]:
        """The turns that wait for another turn's KV."""
        return [one.turn for one in self._following]

    def add(self, turn: DeviceTurn) -> bool:
        """Add a turn; return True if it must wait for another turn that prefills the same beginning.

        It waits until the other one has prefilled the common prefix, without the other prompt's last
        token, which may have to wait for a batch row. No turn waits for a turn of lower priority, which other
        turns may delay.
        """
        self._active[turn.request.key] = turn
        leader = self.source(turn)
        if leader is None or turn.restored is not None or leader.request.priority < turn.request.priority:
            return False
        num_tokens = min(leader.request.context.num_common(turn.request.reusable), leader.request.target - 1)
        if num_tokens <= max(leader.num_cached, turn.num_kept):
            return False
        self._following.append(_Following(turn, leader, num_tokens))
        return True

    def remove(self, turn: DeviceTurn) -> None:
        """Remove an ended turn, whether it was waiting or not; turns that wait for it become ready."""
        if self._active.get(turn.request.key) is turn:
            del self._active[turn.request.key]
        self.stop_waiting(turn)

    def stop_waiting(self, turn: DeviceTurn) -> bool:
        """Let a turn wait no more and use only its own KV; return False if it was not waiting."""
        if turn not in self.following:
            return False
        self._following = [one for one in self._following if one.turn is not turn]
        turn.source = None
        return True

    def source(self, turn: DeviceTurn) -> DeviceTurn | None:
        """Return the running turn of the session from which `turn` copies KV; None if none is running."""
        return self._active.get(turn.source) if turn.source is not None else None

    def ready(self) -> list[DeviceTurn]:
        """Remove and return the turns whose wait is over.

        The turn for which they waited has prefilled the common prefix, or has ended.
        """
        ready = [
            one
            for one in self._following
            if one.leader.num_cached >= one.num_tokens
            or self._active.get(one.leader.request.key) is not one.leader
        ]
        self._following = [one for one in self._following if one not in ready]
        return [one.turn for one in ready]


class StartingKv:
    """Gives turns the caches that they start from."""

    def __init__(self, served: ServedModel, idle_kv: IdleKv, sharing: TurnSharing) -> None:
        self._served = served
        self._idle_kv = idle_kv
        self._sharing = sharing

    def add(self, turn: DeviceTurn) -> bool:
        """Add a turn; return False if it must wait until another turn has prefilled their common prefix."""
        turn.resident = self._idle_kv.pop(turn.request.key)
        # An abandoned turn of this session may have left KV of other tokens since the event loop looked.
        num_usable = turn.resident.num_usable(turn.request) if turn.resident is not None else 0
        turn.num_kept = min(turn.plan.num_kept, num_usable)
        if not self._served.trimmable:
            turn.source = None
        return not self._sharing.add(turn)

    def acquire(self, turn: DeviceTurn) -> None:
        """Set the caches that a turn starts from, trimmed to the tokens whose KV it can reuse.

        Raises ValueError for a token id outside of the vocabulary.
        """
        usable, source = turn.num_kept, self._source(turn)
        kv = self._idle_kv.estimator.kv.under(turn.request.policy)
        copy_bytes = kv.held(len(source.tokens)) if source is not None else 0
        if source is not None and not self._idle_kv.make_room(copy_bytes, but=turn.source):
            source = None
        resident, turn.resident = turn.resident, None
        restored = self._rebuilt(turn)
        if restored is not None:
            resident, usable = restored, len(restored.tokens)
        elif source is not None:
            caches = layers.fork(source.caches, self._new(turn), len(source.tokens))
            resident, usable = replace(source, caches=caches), len(source.tokens)
        # For an id outside of the embedding table MLX reads beyond it, and the process crashes.
        vocab_size = self._served.vocab_size
        if any(not 0 <= token < vocab_size for token in turn.request.context[usable:]):
            raise ValueError(f"a token id is outside of the model's vocabulary of {vocab_size}")
        # An answer is drawn from the last token's logits, so that token always has to be run.
        most = min(len(turn.request.reusable), max(len(turn.request.context) - 1, 0))
        self._trimmed(turn, resident, min(usable, most))
        turn.num_reused = turn.num_cached

    def drop_resident(self) -> bool:
        """Drop the KV of one waiting turn's session; return False if no waiting turn's session has any."""
        for turn in self._sharing.following:
            if turn.resident is not None:
                turn.resident = None
                return True
        return False

    def begin_anew(self, turn: DeviceTurn) -> None:
        """Drop a turn's KV, so that its prompt is prefilled from the start."""
        turn.caches = self._new(turn)
        turn.num_cached = turn.num_reused = turn.num_prefilled = 0

    def _source(self, turn: DeviceTurn) -> ResidentKv | None:
        """Return another session's KV of the tokens with which the turn's context begins.

        None if the turn has KV from disk, or as much KV of its own, or if the other KV cannot be trimmed or
        is of another policy.
        """
        if turn.source is None or turn.restored is not None:
            return None
        resident, other = self._idle_kv.get(turn.source), self._sharing.source(turn)
        if other is not None:
            tokens = other.request.tokens(other.num_cached)
            resident = ResidentKv(other.current_caches(self._served.batch), tokens, other.request.policy)
        num_tokens = resident.num_usable(turn.request) if resident is not None else 0
        if resident is None or num_tokens <= turn.num_kept or not _reaches(resident, num_tokens):
            return None
        return replace(resident, tokens=turn.request.context[:num_tokens])

    def _rebuilt(self, turn: DeviceTurn) -> ResidentKv | None:
        """Build caches from restored tensors; None if there are none, or they do not fit the model."""
        tensors, turn.restored = turn.restored, None
        if tensors is None:
            return None
        try:
            caches = layers.rebuild(tensors, self._new(turn), turn.plan.num_restored)
        except ValueError:
            log.exception("a snapshot does not fit the model", session=str(turn.request.key))
            return None
        return ResidentKv(caches, turn.request.context[: turn.plan.num_restored], turn.request.policy)

    def _trimmed(self, turn: DeviceTurn, kv: ResidentKv | None, num_tokens: int) -> None:
        """Set a turn's caches to `kv`, trimmed to `num_tokens`; to empty ones if `kv` cannot be trimmed."""
        if kv is None or num_tokens == 0 or not _reaches(kv, num_tokens):
            turn.caches, turn.num_cached = self._new(turn), 0
            return
        if len(kv.tokens) != num_tokens:
            layers.trim(kv.caches, num_tokens)
        turn.caches, turn.num_cached = kv.caches, num_tokens

    def _new(self, turn: DeviceTurn) -> list[Any]:
        return self._served.make_caches(turn.request.policy)


def _reaches(kv: ResidentKv, num_tokens: int) -> bool:
    """Say whether KV can be trimmed to its first `num_tokens` tokens."""
    earliest = layers.earliest(kv.caches)
    return num_tokens == len(kv.tokens) or (earliest is not None and earliest <= num_tokens)
