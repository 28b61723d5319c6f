"""Lists, downloads, serves and unloads the models of this machine, for the console. Any thread.

Requests to the worker are printed on standard output, which the `turnkeep serve` that runs the console reads.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import click
import msgspec

from turnkeep_client.errors import TurnkeepError
from worker.models import hub, known
from worker.models.blas import computes_on_linux_cpu
from worker.models.catalog import count_parameters, list_models, named, packaged_gguf
from worker.models.model_files import ModelError
from worker.process.children import PROGRAM
from worker.process.formatting import size
from worker.supervisor import Needs

from .talking import command_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worker.process.settings import Settings


class Shelf:
    """The models that a worker with these settings could serve."""

    def __init__(
        self,
        settings: Settings,
        worker: Sequence[str] | None = None,
        models: Mapping[str, Settings] | None = None,
        unloaded: str | None = None,
        draft_model: str | None = None,
    ) -> None:
        """Take `worker`, the options of the `turnkeep serve` that runs this console; None if none does.

        `models` are those of turnkeep.toml; without any, there is a single worker. `unloaded` is the model
        that this worker has unloaded, and `draft_model` its draft model.
        """
        self.unloaded = unloaded
        self._settings = settings
        self._worker = worker
        self._models = models or {}
        self._draft_model = draft_model
        #: Downloads by model name: bytes `done`, bytes in `total`, and the `error` of a failed one.
        self._pulls: dict[str, dict[str, Any]] = {}

    def listed(self) -> dict[str, Any]:
        """Return the models on this machine, recommended models, the running downloads, and the memory."""
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
        machine["can_serve"] = self._worker is not None and not self._models
        return machine | {"served": self._served(), "here": here, "good": good, "pulls": pulls}

    def _served(self) -> list[dict[str, Any]]:
        """Return the models to load or unload: those of turnkeep.toml, or the one that was unloaded."""
        if self._worker is None:
            return []
        if self.unloaded is not None:
            return [{"name": self.unloaded, "is_loaded": False}]
        return [
            {"name": name, "is_loaded": self._is_loaded(settings)} for name, settings in self._models.items()
        ]

    def _is_loaded(self, settings: Settings) -> bool:
        packaged = packaged_gguf()
        wanted = settings.model or (packaged.stem if packaged else "")
        with contextlib.suppress(ModelError, OSError):
            return named(wanted, self._settings.data_dir).in_use
        return False

    def serve(self, name: str) -> str:
        """Restart this console's worker with a model; return a message. Blocks; raises `ModelError`."""
        self._check()
        if self._models:
            raise ModelError("the models of turnkeep.toml are loaded by their requests; add this one there")
        if name == self.unloaded:
            click.echo("serve")
            return f"the worker starts with {name}"
        if all(one.name != name for one in list_models(self._settings.data_dir)):
            raise ModelError(f"there is no model {name} on this machine; download it first")
        draft_model = self._draft_model if self._draft_model != name else None
        if draft_model is not None and self._obstacle(name, draft_model):
            draft_model = None
        if draft_model is None and (obstacle := self._obstacle(name, "none")):
            raise ModelError(obstacle)
        is_undrafted = draft_model != self._draft_model
        click.echo(f"serve-undrafted {name}" if is_undrafted else f"serve {name}")
        without = ", without the draft model" if is_undrafted else ""
        return f"the worker restarts with {name}{without}; conversations go on with it"

    def _obstacle(self, name: str, draft_model: str) -> str:
        """Say why the worker cannot serve a model with a draft model, or with none; empty if it can."""
        chosen = ("--model", name, "--draft-model", draft_model)
        command = [*PROGRAM, "serve", *(self._worker or ()), *chosen, "--weigh"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        if done.returncode:
            return f"{name} cannot be served: {done.stderr.strip().rpartition('turnkeep: ')[2]}"
        needs = msgspec.json.decode(done.stdout, type=Needs)
        least, there = map(size, (needs.least_bytes, needs.memory_bytes))
        is_small = needs.least_bytes <= needs.memory_bytes
        return "" if is_small else f"{name} needs {least} of memory, and this machine has {there} for models"

    def unload(self, name: str) -> str:
        """Make the `turnkeep serve` that runs this console unload a model. Raises `ModelError`."""
        self._check()
        if self._models and name not in self._models:
            raise ModelError(f"{name} is none of the models of turnkeep.toml: {', '.join(self._models)}")
        if self.unloaded is not None:
            raise ModelError("no model is loaded")
        click.echo(f"unload {name}")
        then = "its next request loads it again" if self._models else "requests wait until one is served"
        return f"{name} is unloaded; {then}"

    def _check(self) -> None:
        if self._worker is None:
            raise ModelError("only a console of turnkeep serve --console can do this; restart the worker")

    def pull(self, name: str) -> str:
        """Start the download of a model, on a thread of its own. Raises `ModelError`."""
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
