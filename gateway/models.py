"""Lists and describes the gateway's models as other servers do, and chooses the model for a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from turnkeep_client.errors import NoWorkerError

from .turn import Fault, decoded, refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from turnkeep_client.messages import Metrics

    from .conversations import Conversations


class _Named(Struct):
    """The model's name in a request of any dialect: `model`, or `name` in some of Ollama's requests."""

    model: str | None = None
    name: str | None = None


_NAMED: Final = msgspec.json.Decoder(_Named)
#: Ollama's clients add this to the name of a model.
_LATEST: Final = ":latest"
#: The fields in which several other servers give a model's context length.
_CONTEXT: Final = ("context_window", "max_model_len", "max_input_tokens")


class Models:
    """The models behind one gateway."""

    def __init__(self, of: Callable[[str, str], Awaitable[Conversations]], names: Sequence[str]) -> None:
        """`of` returns the `Conversations` of a tenant with a model; a single model may be named ''."""
        self._of = of
        self.names = tuple(names)

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

    async def one(self, tenant: str, name: str) -> dict[str, Any]:
        """Describe one model. Raises `Fault`."""
        found = await self.described(tenant)
        if not self.are_several:  # a request may give the one model any name, which its answer repeats
            return found[0] | {"id": name, "display_name": name}
        for one in found:
            if one["id"] in (name, name.removesuffix(_LATEST)):
                return one
        raise _no_model(name, [one["id"] for one in found])

    async def described(self, tenant: str, *, now: bool = False) -> list[dict[str, Any]]:
        """Describe all models. If there are several, one whose worker does not answer gets no context length.

        Workers' metrics are up to a second old, unless `now`. Raises `NoWorkerError` if no worker answers.
        """
        found = await asyncio.gather(*(self._looked_at(tenant, name, now=now) for name in self.names))
        if not any(found):
            raise NoWorkerError("no worker serves any of the models")
        return [_model(name, worker) for name, worker in zip(self.names, found, strict=True)]

    async def _looked_at(self, tenant: str, model: str, *, now: bool) -> Metrics | None:
        try:
            return await (await self._of(tenant, model)).presence.worker(now=now)
        except NoWorkerError:
            if self.are_several:
                return None
            raise


def wanted(body: bytes) -> str:
    """Return the model's name in a request's body; empty if it has none. Raises `Fault`."""
    named = decoded(_NAMED, body)
    return named.model or named.name or ""


def page(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a list of models in the format of OpenAI and Anthropic."""
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return {"object": "list", "data": models, "has_more": False, **ends}


def page_v0(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a list of models in the format of LM Studio."""
    return {"object": "list", "data": [_model_v0(one) for one in models]}


def _model(name: str, worker: Metrics | None) -> dict[str, Any]:
    """Describe a model in fields of OpenAI, Anthropic and, for the context length, other servers."""
    name = name or (worker.model if worker else "")
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "turnkeep",
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": "1970-01-01T00:00:00Z",
        **({} if worker is None else dict.fromkeys(_CONTEXT, worker.context_tokens)),
    }


def _model_v0(model: dict[str, Any]) -> dict[str, Any]:
    context = model.get("max_model_len")
    loaded = {} if context is None else {"max_context_length": context, "loaded_context_length": context}
    kind = {"object": "model", "type": "llm", "publisher": "turnkeep", "arch": "", "quantization": ""}
    state = "not-loaded" if context is None else "loaded"
    return {"id": model["id"], **kind, "compatibility_type": "mlx", "state": state, **loaded}


def _no_model(wanted: str, names: Sequence[str]) -> Fault:
    message = f"there is no model {wanted!r}: this gateway has {_listed(names)}"
    return Fault(404, message, param="model", code="model_not_found")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
