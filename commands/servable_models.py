"""Lists and downloads the models of this machine, for the console. Any thread."""

from __future__ import annotations

import contextlib
import shlex
import threading
from typing import TYPE_CHECKING, Any

from turnkeep_client.errors import TurnkeepError
from worker.models import hub, known
from worker.models.blas import computes_on_linux_cpu
from worker.models.catalog import count_parameters, list_models, named, packaged_gguf
from worker.models.model_files import ModelError

from .nats_connection import command_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from worker.process.settings import Settings


class ServableModels:
    """The models that a worker with these settings could serve."""

    def __init__(self, settings: Settings, models: Mapping[str, Settings] | None = None) -> None:
        """`models` are those of turnkeep.toml; without any, there is a single worker."""
        self._settings = settings
        self._models = models or {}
        #: Downloads by model name: bytes `done`, bytes in `total`, and the `error` of a failed one.
        self._pulls: dict[str, dict[str, Any]] = {}

    def listed(self) -> dict[str, Any]:
        """Return this machine's models (`here`), recommended ones (`good`), downloads and memory. Blocks."""
        serve = command_line(self._settings, "serve")
        here = []
        for entry in list_models(self._settings.data_dir):
            needed = known.needed_bytes(entry.size_bytes, count_parameters(entry))
            here.append(
                {
                    "name": entry.name,
                    "dtype": entry.dtype,
                    "size_bytes": entry.size_bytes,
                    "context_tokens": entry.context_tokens if entry.is_bounded else None,
                    "in_use": entry.in_use,
                    "needed_bytes": needed,
                    "fits": known.fits(needed) and entry.instead is None,
                    "serve": f"{serve} --model {shlex.quote(entry.name)}",
                }
            )
        names = {one["name"] for one in here}
        others = [one for one in known.known() if one.id not in names]
        good = [
            {
                "name": one.id,
                "memory_gb": one.memory_gb,
                "size_bytes": int(one.weights_gb * 1e9),
                "needed_bytes": (needed := known.needed_bytes(one.weights_gb * 1e9, one.parameters_b * 1e9)),
                "fits": known.fits(needed),
                "use": one.use,
                "sources": one.sources,
            }
            for one in others
        ]
        pulls = {name: dict(pull) for name, pull in list(self._pulls.items())}
        machine = {"memory_bytes": known.memory_bytes(), "on_cpu": computes_on_linux_cpu()}
        machine["can_serve"] = not self._models
        return machine | {"served": self._served(), "here": here, "good": good, "pulls": pulls}

    def _served(self) -> list[dict[str, Any]]:
        """Return the models of turnkeep.toml."""
        return [
            {"name": name, "is_loaded": self._is_loaded(settings)} for name, settings in self._models.items()
        ]

    def _is_loaded(self, settings: Settings) -> bool:
        packaged = packaged_gguf()
        wanted = settings.model or (packaged.stem if packaged else "")
        with contextlib.suppress(ModelError, OSError):
            return named(wanted, self._settings.data_dir).in_use
        return False

    def pull(self, name: str) -> str:
        """Start the download of a model on its own thread, unless it runs; return a message for the user.

        Raises `ModelError` for a name that is no id of the hub. `listed` shows a later failure.
        """
        if not hub.is_id(name):
            raise ModelError(f"{name} is no id of the hub; give org/name, or org/name:Q4_K_M for a GGUF file")
        if (pull := self._pulls.get(name)) and not pull.get("error"):
            return f"{name} is being downloaded already"
        self._pulls[name] = {"done": 0, "total": 0}
        # A daemon thread: the console must not wait for it at its end. The next download continues this one.
        threading.Thread(target=self._fetch, args=(name,), daemon=True).start()
        return f"downloading {name}"

    def _fetch(self, name: str) -> None:
        def tell(done: int, total: int, _: str) -> None:
            self._pulls[name] = {"done": done, "total": total}

        try:
            hub.fetch(name, tell, "float32" if computes_on_linux_cpu() else "keep")
        except (TurnkeepError, OSError) as error:
            self._pulls[name] = {**self._pulls[name], "error": str(error)}
        else:
            del self._pulls[name]
