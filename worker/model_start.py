"""Loads the worker's model on the device thread, and computes the limits of context and of KV memory.

Refuses settings that do not fit the model. `App` calls `ModelStart.load`, and then reads the fields.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from cache.names.identity import folder_identity, hash_weights, model_digest
from turnkeep_client.errors import TurnkeepError
from turnkeep_client.messages import Model
from worker.device.machine import check_memory
from worker.models import model
from worker.models.blas import preload
from worker.models.code import code_digest
from worker.models.partial_import import import_mlx_lm
from worker.sessions.limits import misfit

from .process.concurrency import in_thread, shielded, step_in_thread
from .process.formatting import size

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack
    from pathlib import Path

    from anyio import TaskHandle
    from anyio.abc import TaskGroup

    from cache.names.identity import Identity
    from worker.device.device import Device
    from worker.models.model import LoadedModel
    from worker.models.model_files import Progress

    from .process.constants import Constants
    from .process.datadir import DataDir
    from .process.settings import Settings

log = structlog.get_logger()


class WorkerError(TurnkeepError):
    """The worker cannot continue; the message is one line."""


class ModelStart:
    """Loads a worker's model. Its fields are set, and constant, once `is_loaded`. Event loop only."""

    device: Device
    loaded: LoadedModel
    #: The dtype of the weights, or `keep`.
    dtype: str
    #: The most tokens that a session may hold, and the most bytes of device memory for KV.
    context_tokens: int
    kv_bytes: int
    #: What metrics messages say of the model, by field.
    described: dict[str, Any]

    def __init__(
        self,
        settings: Settings,
        constants: Constants,
        tasks: TaskGroup,
        *,
        progress: Progress,
        weights_loaded: Callable[[], None],
    ) -> None:
        """Take the task group `tasks`, which runs blocking steps; a cancelled start waits for them."""
        self.is_loaded = False
        self._settings = settings
        self._constants = constants
        self._tasks = tasks
        self._progress = progress
        self._weights_loaded = weights_loaded
        self._hashed: TaskHandle[None]
        self._memo: Path

    async def load(
        self, directory: DataDir, stack: AsyncExitStack, died: Callable[[BaseException], None]
    ) -> None:
        """Load the model on a new device thread, which calls `died` if it ends by itself.

        The exit of `stack` stops the thread. Raises `ModelError` and `WorkerError`.
        """
        settings, models = self._settings, directory.models
        blas = preload()
        if blas.advice:
            log.warning(blas.advice)
        self.dtype = settings.dtype
        if settings.dtype == "auto":
            self.dtype = await step_in_thread(self._tasks, model.default_dtype)
        await step_in_thread(self._tasks, check_memory, settings)
        read = partial(model.load, dtype=self.dtype, progress=self._progress, store=models)
        folder = await self._resolved(settings.model, directory)
        load, load_draft = partial(read, folder, kv_bits=settings.kv_bits), None
        if settings.draft_model is not None:
            load_draft = partial(read, await self._resolved(settings.draft_model, directory))
        # Hash the weights, for the names of snapshots, while the model is loaded; only a first start does it.
        self._memo = models / "digests.json"
        self._hashed = self._tasks.start_soon(partial(in_thread, hash_weights, folder, self._memo))
        self.device = self._make_device(load, died, load_draft, models / "trials.json")
        loaded = await step_in_thread(self._tasks, self.device.start)
        stack.push_async_callback(shielded, partial(in_thread, self.device.stop))
        self._weights_loaded()
        vision_model = self.device.served.vision_model
        loaded = self.loaded = replace(loaded, vision_model=vision_model)
        if not isinstance(vision_model, str):
            loaded.tokenizer.image_processor = vision_model.processor
        self._log(loaded)
        self.context_tokens = min(settings.max_context or loaded.context_tokens, loaded.context_tokens)
        self.kv_bytes = self._kv_limit()
        self.described = loaded.described()
        self._check_policy()
        self.is_loaded = True

    async def _resolved(self, name: str | None, directory: DataDir) -> Path:
        resolve = partial(model.resolve, name, directory.path, dtype=self.dtype, progress=self._progress)
        return await step_in_thread(self._tasks, resolve)

    def _make_device(
        self,
        load: Callable[[], LoadedModel],
        died: Callable[[BaseException], None],
        load_draft: Callable[[], LoadedModel] | None,
        trials: Path,
    ) -> Device:
        settings, constants = self._settings, self._constants
        # Not earlier: importing mlx-lm takes time, and a user's mistakes should show before.
        import_mlx_lm()
        from worker.device.device import Device
        from worker.device.served_model import DeviceOptions

        options = DeviceOptions(
            block_tokens=constants.block_tokens,
            max_batch=settings.max_batch,
            max_tenant_rows=settings.tenants.rows,
            stall_s=constants.max_stall_s,
            limit_bytes=settings.device_memory,
            max_draft=constants.max_draft,
            load_draft=load_draft,
            trials=trials,
        )
        return Device(load, died, options)

    def _log(self, loaded: LoadedModel) -> None:
        settings, kv = self._settings, self.device.served.estimator.kv
        log.info(
            "loaded the model",
            model=loaded.name,
            folder=str(loaded.folder),
            context=loaded.context_tokens,
            kv_bits=settings.kv_bits or "full",
            cache_policy=str(settings.cache_policy),
            kv_bytes_per_token=kv.bytes_per_token,
            kv_bounded_bytes=kv.bounded_bytes,
            caches=self.device.served.caches,
            **({"draft_model": settings.draft_model} if settings.draft_model else {}),
            vision=loaded.tokenizer.image_processor is not None,
        )
        if settings.kv_bits is not None and " " in self.device.served.caches:
            log.warning("kv_bits holds in some layers only", caches=self.device.served.caches)

    async def name(self) -> Model:
        """Return the model's name and digests, for results."""
        await self._hashed
        digest = partial(model_digest, self.loaded.folder, self._memo)
        tokenizer = await step_in_thread(self._tasks, getattr, self.loaded.tokenizer, "fingerprint")
        return Model(
            name=self.loaded.name,
            weights=await step_in_thread(self._tasks, digest),
            tokenizer=tokenizer.hex(),
            vision=image_processor.processor.hex()
            if (image_processor := self.loaded.tokenizer.image_processor)
            else "",
        )

    async def identity(self) -> Identity:
        """Return the model's identity: a snapshot can be used only by a model with an equal identity."""
        await self._hashed
        return await step_in_thread(
            self._tasks,
            folder_identity,
            self.loaded.folder,
            kv_dtype=self.dtype,
            block_tokens=self._constants.block_tokens,
            code=await step_in_thread(self._tasks, code_digest, self.loaded.model),
            caches=self.device.served.caches,
            memo=self._memo,
        )

    def _kv_limit(self) -> int:
        """Return the limit of device memory for KV, in bytes.

        Raises `WorkerError` if not even one block of KV fits.
        """
        settings, estimator = self._settings, self.device.served.estimator
        block = self._constants.block_tokens
        sizes = (settings.max_batch, block, self.context_tokens)
        room = estimator.kv_limit(*sizes, settings.cache_policy)
        if room < estimator.kv.held(block, ahead=block):
            raise WorkerError(
                f"the weights take {size(estimator.weight_bytes)}, which leaves no room for KV in"
                f" {size(estimator.limit_bytes)}: raise device_memory, or take a smaller model"
            )
        return min(self._constants.kv_bytes or room, room)

    def _check_policy(self) -> None:
        """Raise `WorkerError` if the worker cannot serve sessions under its default cache policy."""
        policy, blocks = self._settings.cache_policy, self._constants.block_tokens
        why = misfit(policy, block_tokens=blocks, context_tokens=self.context_tokens)
        if why := why or self.device.served.refusal(policy, has_disk=self._settings.snapshots != "off"):
            raise WorkerError(f"cache_policy cannot be the default here: {why}")
