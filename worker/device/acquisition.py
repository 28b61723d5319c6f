"""Where a turn's KV comes from: what its session has, trimmed; snapshots, rebuilt; another session's, copied.

Device thread only. Has a turn wait while another one reads what both begin with, or until there is room for a
copy; what runs when, and how turns end, is the runner's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog
from mlx_lm.models.cache import make_prompt_cache

from cache.kv import layers

from .sharing import Sharing
from .turn import ResidentKv, num_common

if TYPE_CHECKING:
    from worker.batch.batch import Batch
    from worker.models.model import LoadedModel

    from .room import Room
    from .turn import Turn

log = structlog.get_logger()


class Acquisition:
    """Gives turns their caches."""

    def __init__(self, loaded: LoadedModel, batch: Batch, room: Room, *, trimmable: bool) -> None:
        """`trimmable` says that KV can be cut at any token."""
        self._model = loaded.model
        self._vocab_size = loaded.vocab_size
        self._batch = batch
        self._room = room
        self._trimmable = trimmable
        self._sharing = Sharing()
        self._short: list[Turn] = []  # whose copy of another session's KV waits for room

    @property
    def is_short(self) -> bool:
        """Whether a turn waits for room."""
        return bool(self._short)

    def add(self, turn: Turn) -> bool:
        """Take in a turn; False where another one is about to read the tokens that both begin with."""
        # An append leaves its last token to the answer that is drawn from its logits: run twice, it could
        # have other bits in memory than on disk.
        turn.target = max(len(turn.context) - (turn.answer is None), 0)
        turn.resident = self._room.pop(turn.key)
        if not self._trimmable:
            turn.source = None
        return not self._sharing.add(turn)

    def ready(self) -> list[Turn]:
        """Let go the turns that need not wait any more, for another one or for room."""
        short: list[Turn] = []
        if not self._room.awaits_drops:
            short, self._short = self._short, []
        return short + self._sharing.ready()

    def stop_waiting(self, turn: Turn) -> bool:
        """Let a turn wait no more, for it to keep what its session had; False if it did not wait."""
        waited = self._sharing.stop_waiting(turn) or turn in self._short
        if waited:
            self._short = [one for one in self._short if one is not turn]
            turn.source = None
        return waited

    def remove(self, turn: Turn) -> None:
        """Forget a turn that is over."""
        self._sharing.remove(turn)

    def acquire(self, turn: Turn) -> bool:
        """Find a turn's KV and trim it to what is of use.

        False where a copy of another session's KV will have room once idle sessions have left.
        """
        usable, source = turn.num_kept, self._source(turn)
        copy_bytes = self._room.estimator.kv.held(len(source.tokens)) if source is not None else 0
        if source is not None and not self._room.has(copy_bytes):
            if self._room.ask_for(copy_bytes, but=turn.source):
                self._short.append(turn)
                return False
            source = None
        resident, turn.resident = turn.resident, None
        restored = self._rebuilt(turn)
        if restored is not None:
            resident, usable = restored, len(restored.tokens)
        elif source is not None:
            caches = layers.fork(source.caches, make_prompt_cache(self._model), len(source.tokens))
            resident, usable = ResidentKv(caches, source.tokens), len(source.tokens)
        # MLX reads beyond its table for an id that is not in it, and the process ends.
        if any(not 0 <= token < self._vocab_size for token in turn.context[usable:]):
            raise ValueError(f"a token id is outside of the model's vocabulary of {self._vocab_size}")
        # An answer is drawn from the last token's logits, so that token has to be run, whatever is cached.
        turn.caches, turn.num_cached = self._trimmed(resident, min(usable, max(len(turn.context) - 1, 0)))
        turn.num_reused = turn.num_cached
        return True

    def drop_resident(self) -> bool:
        """Have a turn that waits lose what its session had; False where none has any."""
        for turn in (*self._sharing.following, *self._short):
            if turn.resident is not None:
                turn.resident = None
                return True
        return False

    def begin_anew(self, turn: Turn) -> None:
        """Have a turn lose its KV."""
        turn.caches = make_prompt_cache(self._model)
        turn.num_cached = turn.num_reused = turn.num_prefilled = 0

    def _source(self, turn: Turn) -> ResidentKv | None:
        """Show what another session's KV has of the context, if that is more than the turn's own."""
        if turn.source is None or turn.restored is not None:
            return None
        other = self._sharing.source(turn)
        resident = self._room.get(turn.source) if other is None else self._under_way(other)
        num_tokens = num_common(resident.tokens, turn.context) if resident is not None else 0
        if resident is None or num_tokens <= turn.num_kept:
            return None
        return ResidentKv(resident.caches, turn.context[:num_tokens])

    def _under_way(self, turn: Turn) -> ResidentKv:
        """Show the KV that a turn has so far, to be read before the next step."""
        if turn.row is not None:
            return ResidentKv(self._batch.caches(turn.row), turn.tokens(turn.num_cached))
        return ResidentKv(turn.caches or [], turn.context[: turn.num_cached])

    def _rebuilt(self, turn: Turn) -> ResidentKv | None:
        """Make caches of what was restored; None where there is nothing, or nothing that fits the model."""
        tensors, turn.restored = turn.restored, None
        if tensors is None:
            return None
        try:
            caches = layers.rebuild(tensors, make_prompt_cache(self._model), turn.num_restored)
        except ValueError:
            log.exception("a snapshot does not fit the model", session=str(turn.key))
            return None
        return ResidentKv(caches, turn.context[: turn.num_restored])

    def _trimmed(self, resident: ResidentKv | None, num_tokens: int) -> tuple[list[Any], int]:
        """Cut caches down to `num_tokens`, or start anew where that is not possible."""
        if (
            resident is None
            or num_tokens == 0
            or (len(resident.tokens) != num_tokens and not self._trimmable)
        ):
            return make_prompt_cache(self._model), 0
        if len(resident.tokens) != num_tokens:
            layers.trim(resident.caches, num_tokens)
        return resident.caches, num_tokens
