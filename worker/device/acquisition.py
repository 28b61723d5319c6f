"""Gives each turn the KV that it starts from: its session's own, a restored snapshot, or another session's.

Device thread only. Another session's KV is copied: a turn waits here while a running turn prefills the prefix
that both share. The `runner` runs the steps and ends turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from cache.kv import layers
from cache.names.tokens import as_tokens

from .sharing import Sharing
from .turn import ResidentKv

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.names.policy import Policy
    from worker.batch.batch import Batch
    from worker.models.model import LoadedModel

    from .room import Room
    from .turn import Turn

log = structlog.get_logger()


class Acquisition:
    """Gives turns the caches that they start from. The runner calls it."""

    def __init__(
        self,
        loaded: LoadedModel,
        batch: Batch,
        room: Room,
        make: Callable[[Policy], list[Any]],
        *,
        trimmable: bool,
    ) -> None:
        """`make` makes empty caches for a policy; `trimmable`: caches can be truncated at any token."""
        self._make = make
        self._vocab_size = loaded.vocab_size
        self._batch = batch
        self._room = room
        self._trimmable = trimmable
        self._sharing = Sharing()

    def add(self, turn: Turn) -> bool:
        """Add a turn; return False if it must wait until another turn has prefilled their common prefix."""
        # An append does not run its last token: the next turn runs it to draw an answer. If it ran twice,
        # its KV could have other bits in memory than on disk.
        turn.target = max(len(turn.context) - (turn.answer is None), 0)
        turn.asks = bool(turn.draws and turn.policy.recall and turn.policy.visible_from(turn.target))
        turn.resident = self._room.pop(turn.key)
        # An abandoned turn of this session may have left KV of other tokens since the event loop looked.
        held = turn.resident.tokens if turn.resident is not None else as_tokens()
        turn.num_kept = min(turn.num_kept, held.num_common(turn.context))
        if not self._trimmable:
            turn.source = None
        return not self._sharing.add(turn)

    def ready(self) -> list[Turn]:
        """Remove and return the turns that no longer wait for another turn."""
        return self._sharing.ready()

    def stop_waiting(self, turn: Turn) -> bool:
        """Stop a turn from waiting; return False if it was not waiting.

        The turn then uses only KV of its own session.
        """
        waited = self._sharing.stop_waiting(turn)
        if waited:
            turn.source = None
        return waited

    def remove(self, turn: Turn) -> None:
        """Remove an ended turn; turns that wait for its prefill stop waiting."""
        self._sharing.remove(turn)

    def acquire(self, turn: Turn) -> None:
        """Set the caches that a turn starts from, trimmed to the tokens whose KV it can reuse.

        Raises ValueError for a token id outside of the vocabulary.
        """
        usable, source = turn.num_kept, self._source(turn)
        kv = self._room.estimator.kv.under(turn.policy)
        copy_bytes = kv.held(len(source.tokens)) if source is not None else 0
        if source is not None and not self._room.make(copy_bytes, but=turn.source):
            source = None
        resident, turn.resident = turn.resident, None
        restored = self._rebuilt(turn)
        if restored is not None:
            resident, usable = restored, len(restored.tokens)
        elif source is not None:
            caches = layers.fork(source.caches, self._new(turn), len(source.tokens))
            resident, usable = ResidentKv(caches, source.tokens), len(source.tokens)
        # For an id outside of the embedding table MLX reads beyond it, and the process crashes.
        if any(not 0 <= token < self._vocab_size for token in turn.context[usable:]):
            raise ValueError(f"a token id is outside of the model's vocabulary of {self._vocab_size}")
        # An answer is drawn from the last token's logits, so that token always has to be run.
        self._trimmed(turn, resident, min(usable, len(turn.reusable), max(len(turn.context) - 1, 0)))
        turn.num_reused = turn.num_cached

    def drop_resident(self) -> bool:
        """Drop the KV of one waiting turn's session; return False if no waiting turn's session has any."""
        for turn in self._sharing.following:
            if turn.resident is not None:
                turn.resident = None
                return True
        return False

    def begin_anew(self, turn: Turn) -> None:
        """Drop a turn's KV, so that its prompt is prefilled from the start."""
        turn.caches = self._new(turn)
        turn.num_cached = turn.num_reused = turn.num_prefilled = 0

    def _source(self, turn: Turn) -> ResidentKv | None:
        """Return another session's KV of the tokens with which the turn's context begins.

        None if the turn has KV from disk, or as much KV of its own, or if the other KV cannot be trimmed.
        """
        if turn.source is None or turn.restored is not None:
            return None
        other = self._sharing.source(turn)
        resident = self._room.get(turn.source) if other is None else self._under_way(other)
        num_tokens = resident.tokens.num_common(turn.reusable) if resident is not None else 0
        if resident is None or num_tokens <= turn.num_kept or not _reaches(resident, num_tokens):
            return None
        return ResidentKv(resident.caches, turn.context[:num_tokens])

    def _under_way(self, turn: Turn) -> ResidentKv:
        """Return the current KV of a running turn; it is valid until the next step."""
        if turn.row is not None:
            return ResidentKv(self._batch.caches(turn.row), turn.tokens(turn.num_cached))
        return ResidentKv(turn.caches or [], turn.context[: turn.num_cached])

    def _rebuilt(self, turn: Turn) -> ResidentKv | None:
        """Build caches from restored tensors; None if there are none, or they do not fit the model."""
        tensors, turn.restored = turn.restored, None
        if tensors is None:
            return None
        try:
            caches = layers.rebuild(tensors, self._new(turn), turn.num_restored)
        except ValueError:
            log.exception("a snapshot does not fit the model", session=str(turn.key))
            return None
        return ResidentKv(caches, turn.context[: turn.num_restored])

    def _trimmed(self, turn: Turn, kv: ResidentKv | None, num_tokens: int) -> None:
        """Set a turn's caches to `kv`, trimmed to `num_tokens`; to empty ones if `kv` cannot be trimmed."""
        if kv is None or num_tokens == 0 or not _reaches(kv, num_tokens):
            turn.caches, turn.num_cached = self._new(turn), 0
            return
        if len(kv.tokens) != num_tokens:
            layers.trim(kv.caches, num_tokens)
        turn.caches, turn.num_cached = kv.caches, num_tokens

    def _new(self, turn: Turn) -> list[Any]:
        return self._make(turn.policy)


def _reaches(kv: ResidentKv, num_tokens: int) -> bool:
    """Say whether KV can be trimmed to its first `num_tokens` tokens."""
    earliest = layers.earliest(kv.caches)
    return num_tokens == len(kv.tokens) or (earliest is not None and earliest <= num_tokens)
