"""Fetches a model's files from the Hugging Face hub into the hub's own cache. Must not import MLX."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .model_files import ModelError, one_line

if TYPE_CHECKING:
    from .model_files import Progress

#: The files of a repository that mlx-lm fetches.
_PATTERNS: Final = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)


def is_id(spec: str) -> bool:
    """Say whether `spec` can be the id of a model on the hub: org/name."""
    return spec.count("/") == 1 and not spec.startswith(("/", ".", "~")) and not spec.endswith(".gguf")


def cache_folder() -> Path:
    """Return the folder of the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def fetch(hub_id: str, progress: Progress | None) -> Path:
    """Return the folder of a model on the hub; fetches files that the cache lacks. Raises `ModelError`.

    If the hub cannot be reached, uses the files fetched before. `progress` counts bytes.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id, allow_patterns=list(_PATTERNS), tqdm_class=_bar(f"downloading {hub_id}", progress)
        )
    except HFValidationError as error:
        raise ModelError(f"{hub_id!r} is not a hub id: {one_line(error)}") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{hub_id} is not in the hub's cache and the hub cannot be reached; "
            "go online once, or give a model folder or a .gguf file"
        ) from None
    except HfHubHTTPError as error:
        raise ModelError(f"the hub refused {hub_id}: {one_line(error)}") from None
    except Exception as error:  # noqa: BLE001  # the HTTP library's errors share no base class with these
        raise ModelError(f"{hub_id} cannot be downloaded: {one_line(error)}") from None
    return Path(folder)


def _bar(what: str, progress: Progress | None) -> Any:
    """Make the class of the library's progress bars: they draw nothing, and report bytes to `progress`.

    The library has two such bars, for bytes received and for bytes on disk; either of them may not advance.
    """
    from huggingface_hub import utils

    tqdm: Any = utils.tqdm  # type: ignore[attr-defined]  # public, but not listed in __all__
    done: dict[int, int] = {}

    class Bar(tqdm):  # type: ignore[misc]  # the library's bars are not typed
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if progress is None or not self._counts_bytes:
                return
            done[id(self)] = done.get(id(self), 0) + int(n or 0)
            total = int(self.total or 0)
            progress(min(max(done.values()), total), total, what)

    return Bar
