"""Finds the gateway's models with their workers' metrics, and chooses the model for a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from turnkeep_client.errors import NoWorkerError
from turnkeep_client.messages import UNLOADED, Metrics

from .turn import Fault, decoded, refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from turnkeep_client.messages import Made

    from .connections import Connections


class _Named(Struct):
    """The model's name in a request of any dialect: `model`, or `name` in some of Ollama's requests."""

    model: str | None = None
    name: str | None = None


_NAMED: Final = msgspec.json.Decoder(_Named)
#: Ollama's clients add this to the name of a model.
_LATEST: Final = ":latest"


class GatewayModel(Struct, frozen=True):
    """A model of this gateway."""

    name: str
    #: The latest metrics of the model's worker; None if no worker answers.
    worker: Metrics | None

    @property
    def context_tokens(self) -> int | None:
        """The longest context; None if unknown."""
        return None if self.worker is None else self.worker.context_tokens

    @property
    def is_loaded(self) -> bool:
        """Whether a worker answers and has loaded the model."""
        return self.worker is not None and self.worker.device != UNLOADED

    @property
    def makes(self) -> tuple[Made, ...]:
        """What the model can be asked for; `answers` if that is unknown."""
        return ("answers",) if self.worker is None else self.worker.makes

    @property
    def can_see(self) -> bool:
        """Whether the model sees images."""
        return self.worker is not None and self.worker.vision

    @property
    def changed_s(self) -> float:
        """When the model's files were written, in seconds since 1970; 0 if unknown."""
        return 0.0 if self.worker is None else self.worker.model_changed_s

    @property
    def can_reason(self) -> bool:
        """Whether the model marks reasoning in its answers."""
        return self.worker is not None and self.worker.reasoning


class Models:
    """The models behind one gateway."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.names = connections.models

    @property
    def are_several(self) -> bool:
        """Whether there are several models, so that requests must name one."""
        return len(self.names) > 1

    def chosen(self, body: bytes) -> str:
        """Return the model that a request names; a single model is chosen by any name. Raises `Fault`."""
        if not self.are_several:
            return self.names[0]
        named = wanted(body)
        if not named:
            raise refused(f"model must be one of {_listed(self.names)}", "model")
        for one in (named, named.removesuffix(_LATEST)):
            if one in self.names:
                return one
        raise _no_model(named, self.names)

    async def one(self, tenant: str, name: str) -> GatewayModel:
        """Return the model `name`; a single model has any name. Raises `Fault` (404), `NoWorkerError`."""
        found = await self.all(tenant)
        if not self.are_several:  # a request may give the one model any name, which its answer repeats
            return GatewayModel(name, found[0].worker)
        for one in found:
            if one.name in (name, name.removesuffix(_LATEST)):
                return one
        raise _no_model(name, [one.name for one in found])

    async def all(self, tenant: str, *, now: bool = False) -> list[GatewayModel]:
        """Return all models. If there are several, one whose worker does not answer has no metrics.

        Workers' metrics are up to a second old, unless `now`. Raises `NoWorkerError` if no worker answers.
        """
        found = await asyncio.gather(*(self._looked_at(tenant, name, now=now) for name in self.names))
        if not any(found):
            raise NoWorkerError("no worker serves any of the models")
        return [
            GatewayModel(name or (worker.model if worker else ""), worker)
            for name, worker in zip(self.names, found, strict=True)
        ]

    async def _looked_at(self, tenant: str, model: str, *, now: bool) -> Metrics | None:
        try:
            return await (await self._connections.of(tenant, model)).latest.worker(now=now)
        except NoWorkerError:
            if self.are_several:
                return None
            raise


def wanted(body: bytes) -> str:
    """Return the model's name in a request's body; empty if it has none. Raises `Fault`."""
    named = decoded(_NAMED, body)
    return named.model or named.name or ""


def _no_model(wanted: str, names: Sequence[str]) -> Fault:
    message = f"there is no model {wanted!r}: this gateway has {_listed(names)}"
    return Fault(404, message, param="model", code="model_not_found")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
