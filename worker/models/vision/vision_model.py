"""Finds out whether a model folder can see, and loads what it sees with.

Device thread only.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from worker.models.model_files import one_line, weight_files
from worker.models.partial_import import import_mlx_vlm

from .families import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from worker.models.tokenizer import Tokenizer

    from .image_processor import ImageProcessor
    from .tower import Tower

_SEEING: Final = "serve one that does, such as `turnkeep serve --model HuggingFaceTB/SmolVLM-256M-Instruct`"
_PACKAGES: Final = ("mlx_vlm", "PIL")


@dataclass(frozen=True, slots=True)
class VisionModel:
    """What a model sees with: `processor` for any thread, `tower` for the device thread."""

    processor: ImageProcessor
    tower: Tower

    def prepare(self, model: Any) -> None:
        """Let a language model use positions in a plane, and rows for several layers, if images have any."""
        if self.tower.family.axes:
            from . import language_parts  # imports MLX

            language_parts.patch(model, self.tower.family.axes, self.tower.family.num_deep)


def find_vision_model(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer, dtype: str
) -> VisionModel | str:
    """Return what a model sees with, or why it cannot see, in one line. Weights are not evaluated.

    A folder may lack the tower that its config.json describes: many conversions leave it out.
    """
    kind = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict):
        return f"the worker's model does not see images: {_SEEING}"
    if kind not in FAMILIES:
        return f"images are not supported yet for models of the family {kind}: {_SEEING}"
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        return f"images need {' and '.join(missing)}; pip install 'turnkeep[vision]' brings them"
    import_mlx_vlm()
    from . import tower
    from .image_processor import ImageProcessor, settings_of

    try:
        family = FAMILIES[kind](config, settings_of(folder))
        image_processor = ImageProcessor(family, tokenizer.encode)
        return VisionModel(image_processor, tower.load(weight_files(folder), family, config, dtype))
    except Exception as error:  # noqa: BLE001  # foreign code, which raises anything for files that do not fit
        why = f"{type(error).__name__}: {one_line(error)}"[:240]
        return f"the worker's model cannot see images with its files ({why}); get the whole model again"
