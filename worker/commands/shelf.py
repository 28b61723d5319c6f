"""The models of this machine for the console: lists them, and downloads others. Any thread."""

from __future__ import annotations

import shlex
import threading
from typing import TYPE_CHECKING, Any

from turnkeep_client.errors import TurnkeepError
from worker.models import hub, known
from worker.models.blas import computes_on_linux_cpu
from worker.models.catalog import count_parameters, list_models
from worker.models.model_files import ModelError

from .talking import command_line

if TYPE_CHECKING:
    from worker.process.settings import Settings


class Shelf:
    """The models that a worker with these settings could serve."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        #: What is downloaded, with bytes that are there, and bytes in all; an `error` if it has failed.
        self._pulls: dict[str, dict[str, Any]] = {}

    def listed(self) -> dict[str, Any]:
        """Return the models that are here, those that are known to be good, and the downloads."""
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
        return machine | {"here": here, "good": good, "pulls": pulls}

    def pull(self, name: str) -> str:
        """Begin to download a model, on a thread of its own. Raises `ModelError`."""
        if not hub.is_id(name):
            raise ModelError(f"{name} is no id of the hub; give org/name, or org/name:Q4_K_M for a GGUF file")
        if (pull := self._pulls.get(name)) and not pull.get("error"):
            return f"{name} is being downloaded already"
        self._pulls[name] = {"done": 0, "total": 0}
        # A daemon: the console's end must not wait for it. The next download goes on where it was.
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
