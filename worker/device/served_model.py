"""Finds out what a loaded model supports on this device: shared passes of rows, caches, and cache policies.

Test runs (trials) at the model's load decide; a file stores their results. Device thread only, except
`refusal`.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import structlog
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from cache.kv import layers
from cache.kv.ring import RingCache
from cache.kv.sketches import ASKED
from cache.kv.states import leaves
from cache.names.policy import FULL, Policy
from cache.names.snapshot import ModelLayout
from worker.batch.batch_kinds import batch_for
from worker.batch.cpu import on_cpu
from worker.batch.drafter import Lookup
from worker.batch.image_rows import takes_rows
from worker.batch.row_sampler import RowSampler, RowSampling
from worker.batch.rows import PrefillPiece, Row, UnsoundError
from worker.batch.trials import SHIPPED, Trials
from worker.models.code import code_digest, package_digest
from worker.models.model_files import ModelError
from worker.models.quantised import unpacked_bytes
from worker.process.formatting import size

from . import drafting, machine, vision
from .memory import Estimator, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from worker.batch.batch import Batch
    from worker.batch.drafter import Drafter
    from worker.models.model import LoadedModel
    from worker.models.vision.vision_model import VisionModel

log = structlog.get_logger()

#: On a CPU, MLX waits in a launch until all but about 100 operations have run. So steps of larger models are
#: not launched ahead there: the previous step's tokens would be read a step later, and nothing be faster.
_SMALL_BYTES: Final = 64 * 2**20
#: How many evaluations in a row may report one failure: command buffers in flight report it again.
_MOST_REPORTS: Final = 8


def trial_key(loaded: LoadedModel, caches: str) -> str:
    """Return a digest of all that decides a test run's result, except Turnkeep's code and weights' values.

    `caches` describes the model's own caches (`layers.describe`).
    """
    model: Any = loaded.model  # mlx has no annotations here
    parameters: Any = tree_flatten(model.parameters())
    parts = (
        json.dumps(loaded.config, sort_keys=True, default=str),
        sorted({str(array.dtype) for _, array in parameters}),
        caches,
        code_digest(model),
        importlib.metadata.version("mlx"),
        machine.kernels(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _trials(loaded: LoadedModel, path: Path | None) -> Trials:
    """Return a model's `Trials`, whose results are stored in the file `path`."""
    own = make_prompt_cache(loaded.model)
    model: Any = loaded.model
    model(mx.array([[0]]), cache=own)  # creates the caches' arrays; not evaluated
    key = trial_key(loaded, layers.describe(own))
    return Trials(path, f"{key} {package_digest('worker.batch')}", SHIPPED.get(key))


def estimator(
    loaded: LoadedModel,
    caches: list[Any],
    limit_bytes: int,
    sketched: Collection[int],
    reserved_bytes: int = 0,
) -> Estimator:
    """Make the estimator of a model. `caches` are caches of the model that have run one token.

    For `sketched`, see `cache.kv.layers.make`. `reserved_bytes` is the memory of a draft model and of images.
    """
    unpacked, shape, device = unpacked_bytes(caches), shape_of(loaded.config), machine.profile()
    return Estimator(
        shape=shape,
        limit_bytes=limit_bytes,
        weight_bytes=loaded.weight_bytes + reserved_bytes,
        kv=layers.sizes(caches, sketched),
        num_layers=len(caches),
        # There is no fused kernel for attention to quantised KV.
        fused=shape.fuses(device.fused_head_dims) and not unpacked,
        kept_layers=device.kept_layers,
        unpacked_bytes=unpacked if on_cpu() else 0,
        # A layer's keys, its scores and their softmax; on a CPU numpy compares them, in little memory.
        asked_bytes=0 if on_cpu() else 4 * shape.num_heads * (shape.head_dim + 2 * ASKED),
    )


def _no_window(model: Any, batch: Batch) -> str | None:
    """Return why sessions of a model cannot use a policy with sinks and a window; None if they can."""
    try:
        caches = layers.make(model, Policy(4, 1024))
    except ValueError as error:
        return str(error)
    if not any(type(cache) is RingCache for _, cache in leaves(caches)):
        return "no layer of this model keeps all tokens; use the policy full"
    if not batch.has_rings:
        return "this model's attention cannot be told how far away a token is; use the policy full"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """How the device serves its model."""

    block_tokens: int
    #: The most answers in a batch.
    max_batch: int
    #: The most seconds of a step with prompts while answers run.
    stall_s: float
    #: The most answers of one tenant in a batch; None: `max_batch`.
    max_tenant_rows: int | None = None
    #: The most memory that MLX allocates, and the most tokens of a draft; None: the device's default.
    limit_bytes: int | None = None
    max_draft: int | None = 0
    #: Loads the draft model.
    load_draft: Callable[[], LoadedModel] | None = None
    #: The file with the results of the test runs at the model's first load.
    trials: Path | None = None


class ServedModel:
    """A loaded model, the batch that runs it, and the sizes and snapshot layout of its KV."""

    def __init__(self, loaded: LoadedModel, has_room: Callable[[int], bool], options: DeviceOptions) -> None:
        """`has_room(n)` says whether `n` more bytes fit on the device; it is called only while steps run.

        Raises `ModelError` if the draft model cannot draft for this one.
        """
        drafters: tuple[Drafter, ...] = (Lookup(),)
        draft = options.load_draft() if options.load_draft is not None else None
        self.vocab_size = loaded.vocab_size
        self._draft = draft  # keeps the draft model's folder in use
        self._reserved_bytes = 0
        if draft is not None:
            drafters = (*drafters, drafting.draft_model(loaded, draft, _trials(draft, options.trials)))
            self._reserved_bytes = drafting.reserved_bytes(draft)
        self.batch = self._choose_batch(loaded, has_room, drafters, options)
        if draft is not None and not self.batch.speculation.has_drafters:
            raise ModelError(f"{loaded.name} cannot undo a draft; leave draft_model out")
        #: What the model sees with, or why it cannot see.
        self.vision_model: VisionModel | str = loaded.vision_model
        family = None if isinstance(self.vision_model, str) else self.vision_model.tower.family
        if family is not None and not takes_rows(loaded.model, uses_tokens=family.uses_tokens):
            family = None
            self.vision_model = (
                "the worker's language model takes no input embeddings, so it cannot see images"
            )
        #: The most tokens of an image that attend to each other in both directions, so that no pass cuts it.
        self.most_joint = family.most_joint if family is not None else 0
        self.make_caches = self._try_caches(loaded, options)
        self._no_window = _no_window(loaded.model, self.batch)
        if self.most_joint:
            self._no_window = "this model sees images as a whole; use the policy full"

    def _choose_batch(
        self,
        loaded: LoadedModel,
        has_room: Callable[[int], bool],
        drafters: Sequence[Drafter],
        options: DeviceOptions,
    ) -> Batch:
        """Choose by test runs how the model's rows are batched."""
        device = machine.profile()
        return batch_for(
            loaded.model,
            has_room,
            max_draft=device.max_draft if options.max_draft is None else options.max_draft,
            drafters=drafters,
            pooled_rows=device.pooled_rows,
            merged_rows=device.merged_rows,
            runs_ahead=not on_cpu() or loaded.weight_bytes < _SMALL_BYTES,
            trials=_trials(loaded, options.trials),
        )

    def _try_caches(self, loaded: LoadedModel, options: DeviceOptions) -> Callable[[Policy], list[Any]]:
        """Run one token, and set the attributes that describe the model's KV (classes, sizes, layout).

        Returns a function that makes empty caches for a policy.
        """
        make = partial(
            layers.make,
            loaded.model,
            rings=self.batch.windows_are_rings,
            sketched=self.batch.sketched,
            block_tokens=options.block_tokens,
            most_joint=self.most_joint,
            grid=0 if self.most_joint else None,  # no image lies on both sides of its multiples
        )
        caches = make()
        if not self._works(caches):
            raise ModelError(
                f"{loaded.folder} is broken: {UnsoundError()}; get its weights again, or try --dtype float32"
            )
        #: The cache class that has no snapshots, or the layout of snapshots; the classes of all layers;
        #: whether KV can be truncated at any token.
        self.unsupported_cache = layers.unsupported(caches)
        self.layout = ModelLayout(())
        if self.unsupported_cache is None:
            self.layout = layers.layout(caches, make, self.batch.sketched)
        self.caches = layers.describe(caches)
        self.trimmable = layers.trimmable(caches)
        limit_bytes = options.limit_bytes
        if not limit_bytes:
            limit_bytes, why = machine.default_limit()
            log.info("chose device_memory", size=size(limit_bytes), why=why)
        machine.limit_active(limit_bytes)
        if not isinstance(self.vision_model, str):
            self._reserved_bytes += vision.reserved_bytes(self.vision_model.tower.family, limit_bytes)
        self.estimator = estimator(loaded, caches, limit_bytes, self.batch.sketched, self._reserved_bytes)
        return make

    def _works(self, caches: list[Any]) -> bool:
        """Run one token with empty `caches`; say whether its logits are finite. No step may be in flight."""
        row = Row(caches, array("I", [0]), RowSampler(RowSampling()), num_cached=1, num_left=1)
        self.batch.step([PrefillPiece(caches, 0, [0], row)])
        self.batch.remove(row)
        return row.is_sound

    def recovers(self) -> bool:
        """Say whether the device can run a token, once it has reported all earlier failures."""
        for _ in range(_MOST_REPORTS):
            with contextlib.suppress(RuntimeError):
                mx.synchronize()
                return self._works(self.make_caches(FULL))
        return False

    def warm_up(self, num_tokens: int) -> None:
        """Run two prompts of `num_tokens` tokens and a token of each answer, and measure nothing."""
        pieces = []
        for _ in range(2):
            caches = self.make_caches(FULL)
            row = Row(caches, array("I", [0]), RowSampler(RowSampling()), num_cached=num_tokens, num_left=2)
            pieces.append(PrefillPiece(caches, 0, [0] * num_tokens, row))
        self.batch.step(pieces)
        self.batch.step([PrefillPiece(self.make_caches(FULL), 0, [0])])  # alone, answers would be timed
        self.batch.clear()

    def refusal(self, policy: Policy, *, has_disk: bool) -> str | None:
        """Return why sessions cannot use a cache policy; None if they can. Any thread may call this.

        `has_disk` says that KV is stored on disk.
        """
        if policy.recall and not has_disk:
            return f"this worker stores no KV on disk, which {policy.name} needs; use another policy"
        if policy.recall and not (self.batch.windows_are_rings and self.layout.sketches):
            return "this model's keys cannot be sketched, or its rows not share a pass; use another policy"
        return None if policy.window is None else self._no_window
