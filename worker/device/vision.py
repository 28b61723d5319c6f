"""Gives turns the rows of their images: keeps rows, and runs the tower for missing ones. Device thread only.

A turn whose prompt has images without KV waits here until all their rows are known. The event loop reads and
processes their files (`ImageRequest`), one at a time for each turn. Between two steps of the other turns, one
layer of the tower runs, or a few short ones. Rows are kept by the images' fingerprints, the least recently
used ones are dropped first; a turn keeps its rows until its prompt is done.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import mlx.core as mx
import numpy as np
import structlog

from cache.kv.size import KvSize
from worker.batch.image_rows import ImageRows

from . import machine
from .memory import Estimator, shape_of
from .request import NoMemoryError
from .turn import ImageRequest, LostKvError, Starvation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from worker.models.vision.families import Family, View
    from worker.models.vision.vision_model import VisionModel

    from .idle_kv import IdleKv
    from .turn import DeviceTurn, Event, ImageViews

log = structlog.get_logger()

#: The most bytes of rows that are kept for later turns: some ten images of a large model.
ROWS_BYTES: Final = 64 * 2**20
#: How long an image waits for memory that no turn holds; snapshots that are being written may hold it.
PATIENCE_S: Final = 2.0


@dataclass(slots=True)
class _Image:
    """An image that the tower is at work on.

    `views` are left to do, the first of them by its `stages`; `rows` are those of earlier views.
    """

    views: deque[View]
    stages: deque[mx.array] = field(default_factory=deque)
    rows: list[mx.array] = field(default_factory=list)


class Vision:
    """The turns that wait for rows of images, and the rows that are kept."""

    def __init__(
        self, vision_model: VisionModel | str, idle_kv: IdleKv, emit: Callable[[Event], None]
    ) -> None:
        """A text as `vision_model` says why there is none; `emit` sends an event to the event loop."""
        self._vision_model = vision_model
        self._idle_kv = idle_kv
        self._emit = emit
        self._lacking: dict[
            DeviceTurn, list[bytes]
        ] = {}  # by turn: the fingerprints of rows that it waits for
        self._images: dict[bytes, _Image] = {}
        self._kept: dict[bytes, mx.array] = {}  # least recently used first
        self._patient_until_s: float | None = None

    def __contains__(self, turn: DeviceTurn) -> bool:
        """Whether a turn waits for rows."""
        return turn in self._lacking

    @property
    def is_pending(self) -> bool:
        """Whether the tower has something to run."""
        return bool(self._images)

    def discard(self, turn: DeviceTurn) -> None:
        """Forget a turn that has ended, its rows, and the images that no other turn waits for."""
        self._lacking.pop(turn, None)
        turn.rows.clear()
        wanted = {name for names in self._lacking.values() for name in names}
        self._images = {name: image for name, image in self._images.items() if name in wanted}

    def clear(self) -> None:
        """Drop all rows, since they are unknown after a failed evaluation."""
        self._images.clear()
        self._kept.clear()

    def forget(self, fingerprints: Collection[bytes]) -> None:
        """Drop the kept rows of images that are to be forgotten."""
        self._kept = {name: rows for name, rows in self._kept.items() if name not in fingerprints}

    def gives_rows(self, turn: DeviceTurn) -> bool:
        """Give a turn the rows of its images without KV; return False if it waits for some of them.

        Then the views of the first one are requested, and come by `show`. Raises `ValueError` if the model
        cannot see, or if it runs images as a whole and the session would end within one.
        """
        request = turn.request
        spans = [span for span in request.context.spans if turn.num_cached < span.end]
        # The token with an output may run in a pass of its own.
        whole = request.target - (request.draws or request.embedding is not None)
        if spans and self._seeing().tower.family.most_joint and spans[-1].end > whole:
            raise ValueError("the session ends within an image; add text behind the image")
        wanted = dict.fromkeys(span.fingerprint for span in spans if span.start < request.target)
        for name in wanted.keys() & self._kept.keys():
            turn.rows[name] = self._kept[name] = self._kept.pop(name)
        missing = [name for name in wanted if name not in turn.rows]
        if not missing:
            return True
        self._lacking[turn] = missing
        self._ask(turn)
        return False

    def show(self, turn: DeviceTurn, fingerprint: bytes, views: ImageViews) -> None:
        """Take the views of an image that a turn has requested, unless its rows are known or under way.

        Then requests the turn's next image. Raises `views` if it is an error.
        """
        if turn not in self._lacking:
            return
        if fingerprint in self._lacking[turn]:
            if isinstance(views, Exception):
                raise views
            self._images.setdefault(fingerprint, _Image(deque(views)))
        self._ask(turn)

    def step(self, most_s: float) -> tuple[list[DeviceTurn], dict[DeviceTurn, Exception], float]:
        """Run layers of the tower for one view: at least one, and more until `most_s` seconds passed.

        Call it only while `is_pending`. The image is that of the first turn by priority and place. Returns
        the turns that now have all their rows, the turns whose image failed, with the error, and how many
        seconds to wait before the next call: 0, unless the view has no room yet. Raises errors that lose KV
        (`machine.loses_kv`).
        """
        name = min(self._images, key=lambda name: min(map(_order, self._waiting(name))))
        image = self._images[name]
        until_s = time.monotonic() + most_s
        try:
            if not self._has_room(image.views[0].num_patches):
                return [], {}, 0.01
            image.stages = image.stages or deque(self._seeing().tower.stages(image.views[0]))
            while True:
                done = image.stages.popleft()
                mx.eval(done)
                if not image.stages or time.monotonic() >= until_s:
                    break
        except Exception as error:  # whatever MLX or a model raises
            if machine.loses_kv(error):
                raise
            log.exception("an image failed on the device")
            del self._images[name]
            return [], dict.fromkeys(self._waiting(name), error), 0.0
        if image.stages:
            return [], {}, 0.0
        image.rows.append(done)
        image.views.popleft()
        if image.views:
            return [], {}, 0.0
        del self._images[name]
        return self._give(name, mx.concatenate(image.rows)), {}, 0.0

    def rows(self, turn: DeviceTurn, start: int, end: int) -> ImageRows | None:
        """Return the rows for a piece `[start, end)` of a turn's prompt; None if the piece needs none.

        Raises `LostKvError`, so that the turn starts again, if it has lost KV of earlier images.
        """
        context, at, found = turn.request.context, list[int](), list[mx.array]()
        if not context.spans:
            return None
        image_token, family = self._seeing().processor.image_token, self._seeing().tower.family
        for span in context.spans:
            if span.start >= end or span.end <= start:
                continue
            if span.fingerprint not in turn.rows:
                raise LostKvError(RuntimeError("the KV of an image was dropped for want of memory"), weight=0)
            first, last = max(span.start, start), min(span.end, end)
            tokens = np.frombuffer(context.ids(span.start, last), np.uint32) == image_token
            num_before = int(tokens[: first - span.start].sum())
            places = np.flatnonzero(tokens[first - span.start :])
            at += (places + (first - start)).tolist()
            found.append(turn.rows[span.fingerprint][num_before : num_before + len(places)])
        joint = context.spans if family.most_joint else ()
        return ImageRows(at, mx.concatenate(found), joint, family.joins_everywhere) if at else None

    def _seeing(self) -> VisionModel:
        if isinstance(self._vision_model, str):
            raise ValueError(self._vision_model)  # noqa: TRY004  # no fault of a type
        return self._vision_model

    def _ask(self, turn: DeviceTurn) -> None:
        """Request the turn's next image that is not under way, unless its last one has not come yet."""
        name = next((name for name in self._lacking[turn] if name not in self._images), None)
        if name is not None:
            self._emit(ImageRequest(turn, name))

    def _waiting(self, name: bytes) -> list[DeviceTurn]:
        return [turn for turn, names in self._lacking.items() if name in names]

    def _give(self, name: bytes, rows: mx.array) -> list[DeviceTurn]:
        """Keep an image's rows and give them to all turns that wait for them; return the ready ones."""
        mx.eval(rows)
        self._kept[name] = rows
        while sum(kept.nbytes for kept in self._kept.values()) > ROWS_BYTES:
            del self._kept[next(iter(self._kept))]
        ready = []
        for turn in self._waiting(name):
            turn.rows[name] = rows
            self._lacking[turn].remove(name)
            if not self._lacking[turn]:
                del self._lacking[turn]
                ready.append(turn)
        return ready

    def _has_room(self, num_patches: int) -> bool:
        """Make room for a view by dropping idle KV; return False while there may be room soon.

        Raises `NoMemoryError` once there was none for `PATIENCE_S`.
        """
        size_bytes = view_bytes(self._seeing().tower.family, num_patches)
        if self._idle_kv.make_room(size_bytes):
            self._patient_until_s = None
            return True
        if self._patient_until_s is None:
            self._emit(Starvation())
            self._patient_until_s = time.monotonic() + PATIENCE_S
        if time.monotonic() < self._patient_until_s:
            return False
        self._patient_until_s = None
        limit_bytes = self._idle_kv.estimator.limit_bytes
        raise NoMemoryError(
            f"an image of {num_patches} patches takes {size_bytes} bytes beside the {mx.get_active_memory()}"
            f" in use, the limit of the device is {limit_bytes}; send a smaller image, or raise device_memory"
        )


def view_bytes(family: Family, num_patches: int) -> int:
    """Estimate the peak bytes of temporary arrays while a family's tower runs one view of `num_patches`.

    This is the larger of two: the layers that are evaluated together, with a mask of all pairs of patches
    (outputs of earlier layers are freed by then); and, before the first layer of Gemma 4, its comparison of
    each patch with each place, measured as 20 bytes a pair.
    """
    shape, device = shape_of(family.vision), machine.profile()
    fused, kept = shape.fuses(device.fused_head_dims), device.kept_layers
    step = Estimator(shape, 0, 0, KvSize(0), kept, fused, kept_layers=kept)
    layer_bytes = step.scratch_bytes(0, [(num_patches, num_patches)]) + 4 * 2 * num_patches**2
    return max(layer_bytes, 20 * num_patches * int(family.vision.get("position_embedding_size", 0)))


def reserved_bytes(family: Family, limit_bytes: int) -> int:
    """Return the bytes to set aside for the largest view and for rows; an eighth of the limit at most."""
    return min(view_bytes(family, family.most_patches) + ROWS_BYTES, limit_bytes // 8)


def _order(turn: DeviceTurn) -> tuple[int, float]:
    return -turn.request.priority, turn.place_s
