"""Reads, from a model's folder, the sampling options that the model's authors recommend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turnkeep_client.errors import InvalidMessageError
from turnkeep_client.messages import RECOMMENDED, Generate
from turnkeep_client.session import build

from .model_files import read_json

if TYPE_CHECKING:
    from pathlib import Path


def own_sampling(folder: Path) -> dict[str, float]:
    """Return the options in `generation_config.json` that a generate request can have.

    Empty if the file is missing or has none. `do_sample: false` becomes greedy sampling. Raises `ModelError`.
    """
    path = folder / "generation_config.json"
    config = read_json(path) if path.exists() else {}
    if config.get("do_sample") is False:
        config["temperature"] = 0.0
    return {name: config[name] for name in RECOMMENDED if _is_valid(name, config.get(name))}


def _is_valid(name: str, value: Any) -> bool:
    try:
        build(Generate, None, **{name: value})
    except InvalidMessageError:
        return False
    return value is not None
