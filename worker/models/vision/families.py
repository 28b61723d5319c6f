"""The families of models that see: how each processes an image, and which tokens stand for it in a prompt.

One class for each way; `FAMILIES` has the class of each `model_type`. A family that is not here cannot see.
Processors come from transformers, as far as it has them without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    import numpy as np
    from PIL.Image import Image

    #: What the number and the order of an image's tokens depend on.
    Grid: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """A part of an image that the tower runs at once."""

    #: By the tower's argument names.
    arrays: dict[str, np.ndarray[Any, Any]]
    #: How many rows of input embeddings the tower returns.
    num_rows: int
    #: From how many patches it computes them.
    num_patches: int


class Family:
    """How a family processes images. `image` is the token for each row; all have an id in the vocabulary."""

    image: str = "<image>"
    #: What the chat template writes for an image, if that is not `image`.
    placeholder: str = ""
    #: What stands before and behind an image's text; the tokenizer may join it with the text beside it.
    around: str = ""
    #: The module of transformers' processors, and the class.
    processor_class: tuple[str, str]
    #: The last layer of the tower that is used, counted from the end.
    last_layer: int = -1
    #: For each rotary frequency, the position that turns it: time 0, height 1, width 2; see `language_parts`.
    axes: Sequence[int] = ()
    #: How many layers of the language model get further rows of an image (DeepStack).
    num_deep: int = 0
    #: The most tokens of an image that attend to each other in both directions; 0 if none do.
    most_joint: int = 0
    #: Whether they do so in all layers, not only in those with windows.
    joins_everywhere: bool = True
    #: By which the language model multiplies input embeddings, while the tower's rows are not divided by it.
    embedding_scale: float = 1.0
    #: Whether later layers of the language model use the tokens, too.
    uses_tokens: bool = False

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Take a model's config.json and its processor's settings; raises anything if they do not fit."""
        self.config, self.settings = config, settings
        #: The package of mlx-vlm that has the tower.
        self.module = str(config["model_type"]).replace("-", "_")
        self.vision = config["vision_config"]
        self.patch = int(self.vision["patch_size"])
        module, name = self.processor_class
        self.processor = self.make(getattr(import_module(module), name))

    @property
    def is_plane(self) -> bool:
        """Whether the tokens of an image have positions in a plane, of `grid[-1]` columns."""
        return bool(self.axes)

    def make(self, processor: Any) -> Any:
        """Make a processor of the class `processor`, with the settings."""
        return processor(**self.settings)

    def views(self, image: Image) -> tuple[Grid, list[View]]:
        """Process an RGB image; return its grid, and its views in the order of their rows.

        The grid has the numbers that `text` needs, such as rows and columns; each family has its own.
        """
        raise NotImplementedError

    def text(self, grid: Sequence[int]) -> str:
        """Return the text of the tokens of an image with this grid, which replace its placeholder."""
        raise NotImplementedError

    @property
    def most_patches(self) -> int:
        """The most patches of a view."""
        raise NotImplementedError


class SplitFamily(Family):
    """Idefics3, SmolVLM: a grid of views of one size, then the whole image as one more view."""

    processor_class = (
        "transformers.models.idefics3.image_processing_pil_idefics3",
        "Idefics3ImageProcessorPil",
    )

    @property
    def most_patches(self) -> int:  # noqa: D102
        return (int(self.processor.max_image_size["longest_edge"]) // self.patch) ** 2

    @property
    def _num_rows(self) -> int:
        return self.most_patches // int(self.config.get("scale_factor", 2)) ** 2

    def views(self, image: Image) -> tuple[Grid, list[View]]:  # noqa: D102
        found = self.processor.preprocess([[image]], return_row_col_info=True, return_tensors="np")
        names = ("pixel_values", "pixel_attention_mask")
        num = found["pixel_values"].shape[1]
        arrays = [{name: found[name][:, i : i + 1] for name in names} for i in range(num)]
        grid = int(found["rows"][0][0]), int(found["cols"][0][0])
        return grid, [View(each, self._num_rows, self.most_patches) for each in arrays]

    def text(self, grid: Sequence[int]) -> str:  # noqa: D102
        rows, columns = grid
        run, around = self.image * self._num_rows, "<fake_token_around_image>"
        parts = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{run}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(parts) + ("\n" if rows else "") + f"{around}<global-img>{run}{around}"


class SmolFamily(SplitFamily):
    """SmolVLM, whose processor is a class of its own."""

    processor_class = ("transformers.models.smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil")


class OneSizeFamily(Family):
    """One view of one size, whatever the image."""

    @property
    def most_patches(self) -> int:  # noqa: D102
        return (int(self.vision["image_size"]) // self.patch) ** 2

    @property
    def _num_rows(self) -> int:
        raise NotImplementedError

    def views(self, image: Image) -> tuple[Grid, list[View]]:  # noqa: D102
        found = self.processor.preprocess([image], return_tensors="np")
        return (), [View({"pixel_values": found["pixel_values"]}, self._num_rows, self.most_patches)]


class LlavaFamily(OneSizeFamily):
    """LLaVA 1.5."""

    processor_class = ("transformers.models.clip.image_processing_pil_clip", "CLIPImageProcessorPil")

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        used = config.get("vision_feature_layer", -2)
        self.last_layer = used if isinstance(used, int) and used < 0 else -1

    @property
    def _num_rows(self) -> int:
        has_class = self.vision.get("model_type") == "clip_vision_model"
        is_without = self.config.get("vision_feature_select_strategy", "default") == "default"
        return self.most_patches + int(has_class) - int(is_without)

    def text(self, grid: Sequence[int]) -> str:  # noqa: ARG002, D102
        return self.image * self._num_rows


class PixtralFamily(Family):
    """Pixtral, Mistral 3: one view in the image's own shape, a token after each of its rows."""

    image = "[IMG]"
    processor_class = ("transformers.models.pixtral.image_processing_pil_pixtral", "PixtralImageProcessorPil")

    @property
    def _merged(self) -> int:
        return 1

    def make(self, processor: Any) -> Any:
        """Make the processor, which rounds sizes to whole tokens."""
        return processor(**{**self.settings, "patch_size": self.patch * self._merged})

    @property
    def most_patches(self) -> int:  # noqa: D102
        size = self.processor.size
        sides = [size["longest_edge"]] * 2 if size.get("longest_edge") else [size["height"], size["width"]]
        return int(sides[0] // self.patch + self._merged) * int(sides[1] // self.patch + self._merged)

    def views(self, image: Image) -> tuple[Grid, list[View]]:  # noqa: D102
        found = self.processor.preprocess([image], return_tensors="np")
        height, width = (int(side) for side in found["image_sizes"][0])
        grid = height // self.patch // self._merged, width // self.patch // self._merged
        arrays = {name: found[name] for name in ("pixel_values", "image_sizes")}
        return grid, [View(arrays, grid[0] * grid[1], grid[0] * grid[1] * self._merged**2)]

    def text(self, grid: Sequence[int]) -> str:  # noqa: D102
        rows, columns = grid
        return "[IMG_BREAK]".join([self.image * columns] * rows) + "[IMG_END]"


class Mistral3Family(PixtralFamily):
    """Mistral 3, which merges neighbouring patches into one token."""

    @property
    def _merged(self) -> int:
        return int(self.config.get("spatial_merge_size", 2))


class Lfm2Family(Family):
    """LFM2-VL: one view in about the image's shape; a large image as tiles, and a small copy of it."""

    processor_class = ("mlx_vlm.models.lfm2_vl.processing_lfm2_vl", "Lfm2VlNumpyImageProcessor")
    _names: ClassVar = ("pixel_values", "pixel_attention_mask", "spatial_shapes")

    def make(self, processor: Any) -> Any:
        """Make the processor with the settings in config.json, which those of the processor override."""
        given = {key: self.config[key] for key in _LFM2_SETTINGS if key in self.config}
        return processor(**{**given, **self.settings})

    @property
    def most_patches(self) -> int:  # noqa: D102
        return int(self.processor.max_num_patches)

    def _rows_of(self, height: int, width: int) -> int:
        factor = int(self.processor.downsample_factor)
        return -(-height // factor) * -(-width // factor)

    def views(self, image: Image) -> tuple[Grid, list[View]]:  # noqa: D102
        found = self.processor.preprocess([image])
        shapes = [(int(height), int(width)) for height, width in found["spatial_shapes"]]
        arrays = [{name: found[name][i : i + 1] for name in self._names} for i in range(len(shapes))]
        views = [
            View(each, self._rows_of(*shape), self.most_patches)
            for each, shape in zip(arrays, shapes, strict=True)
        ]
        sides = [int(side) // int(self.processor.encoder_patch_size) for side in found["image_sizes"][0]]
        return (int(found["image_rows"][0]), int(found["image_cols"][0]), *sides), views

    def text(self, grid: Sequence[int]) -> str:  # noqa: D102
        rows, columns, height, width = grid
        side = int(self.processor.tile_size) // int(self.processor.encoder_patch_size)
        tile, marked = (
            self.image * self._rows_of(side, side),
            bool(self.config.get("use_image_special_tokens", True)),
        )
        found = self.image * self._rows_of(height, width)
        if rows * columns > 1:
            small = found if self.processor.use_thumbnail else ""
            if small and marked:
                small = f"<|img_thumbnail|>{small}"
            places = [(row + 1, column + 1) for row in range(rows) for column in range(columns)]
            tiles = ((f"<|img_row_{row}_col_{column}|>" if marked else "") + tile for row, column in places)
            found = "".join(tiles) + small
        return f"<|image_start|>{found}<|image_end|>" if marked else found


class Qwen2Family(Family):
    """Qwen2-VL, Qwen2.5-VL: one view in about the image's shape; its tokens have positions in a plane."""

    image = "<|image_pad|>"
    processor_class = (
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
        "Qwen2VLImageProcessorPil",
    )

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        text = config.get("text_config", config)
        rotary = text.get("rope_parameters") or text["rope_scaling"]
        self.axes = [axis for axis, size in enumerate(rotary["mrope_section"]) for _ in range(size)]

    @property
    def most_patches(self) -> int:  # noqa: D102
        return int(self.processor.size["longest_edge"]) // self.patch**2

    def views(self, image: Image) -> tuple[Grid, list[View]]:  # noqa: D102
        found = self.processor.preprocess([image], return_tensors="np")
        merged = int(self.processor.merge_size)
        _, height, width = (int(side) for side in found["image_grid_thw"][0])
        grid = height // merged, width // merged
        arrays = {name: found[name] for name in ("pixel_values", "image_grid_thw")}
        return grid, [View(arrays, grid[0] * grid[1], height * width)]

    def text(self, grid: Sequence[int]) -> str:  # noqa: D102
        return self.image * (grid[0] * grid[1])


class Qwen3Family(Qwen2Family):
    """Qwen3-VL, Qwen3.5: sections of frequencies take turns; of Qwen3-VL the first layers get rows too."""

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        _, height, width = (self.axes.count(axis) for axis in range(3))
        turns = ((i, i % 3) for i in range(len(self.axes)))
        self.axes = [axis if i < 3 * (0, height, width)[axis] else 0 for i, axis in turns]
        self.num_deep = len(self.vision.get("deepstack_visual_indexes") or ())


class Gemma3Family(OneSizeFamily):
    """Gemma 3, whose tokens of an image attend to each other."""

    image = "<image_soft_token>"
    placeholder = "<start_of_image>"
    around = "\n\n"
    processor_class = (
        "transformers.models.gemma3.image_processing_pil_gemma3",
        "Gemma3ImageProcessorPil",
    )

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self.most_joint = self._num_rows

    def make(self, processor: Any) -> Any:
        """Make the processor, which adds no parts of the image as further images."""
        return processor(**{**self.settings, "do_pan_and_scan": False})

    @property
    def _num_rows(self) -> int:
        return int(self.config["text_config"].get("mm_tokens_per_image", 256))

    def text(self, grid: Sequence[int]) -> str:  # noqa: ARG002, D102
        return f"{self.placeholder}{self.image * self._num_rows}<end_of_image>"


class Gemma4Family(Family):
    """Gemma 4: one view in about the image's shape; in large models, its tokens attend to each other."""

    image = "<|image|>"
    joins_everywhere = False
    processor_class = ("mlx_vlm.models.gemma4.processing_gemma4", "Gemma4ImageProcessor")

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        text = config["text_config"]
        is_joint = text.get("use_bidirectional_attention") == "vision"
        self.most_joint = int(self.processor.max_soft_tokens) if is_joint else 0
        self.embedding_scale = text["hidden_size"] ** 0.5
        self.uses_tokens = bool(text.get("hidden_size_per_layer_input", 256))

    @property
    def _pooled(self) -> int:
        return int(self.processor.pooling_kernel_size)

    @property
    def most_patches(self) -> int:  # noqa: D102
        return int(self.processor.max_soft_tokens) * self._pooled**2

    def views(self, image: Image) -> tuple[Grid, list[View]]:  # noqa: D102
        found, _ = self.processor.preprocess([image])
        rows, columns = (side // self.patch // self._pooled for side in found["pixel_values"].shape[-2:])
        return (rows, columns), [View(found, rows * columns, rows * columns * self._pooled**2)]

    def text(self, grid: Sequence[int]) -> str:  # noqa: D102
        return f"<|image>{self.image * (grid[0] * grid[1])}<image|>"


_LFM2_SETTINGS: Final = (
    *("downsample_factor", "encoder_patch_size", "min_image_tokens", "max_image_tokens", "tile_size"),
    *("max_pixels_tolerance", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail"),
)

#: By `model_type` in config.json.
FAMILIES: Final[dict[str, type[Family]]] = {
    "idefics3": SplitFamily,
    "smolvlm": SmolFamily,
    "llava": LlavaFamily,
    "pixtral": PixtralFamily,
    "mistral3": Mistral3Family,
    "lfm2_vl": Lfm2Family,
    "lfm2-vl": Lfm2Family,
    "qwen2_vl": Qwen2Family,
    "qwen2_5_vl": Qwen2Family,
    "qwen3_vl": Qwen3Family,
    "gemma3": Gemma3Family,
    "gemma4": Gemma4Family,
    "qwen3_5": Qwen3Family,
    "qwen3_5_moe": Qwen3Family,
}
