"""Decodes image files that anybody may have made. Runs on any thread; takes up to a second.

Every broken, unknown, animated or huge file is an `ImageError`, found before memory is used for its pixels.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

#: The largest file, and the most pixels of a decoded image.
MOST_BYTES: Final = 20_000_000
MOST_PIXELS: Final = 32_000_000
#: How many times longer than wide an image may be: processors enlarge a short side to hundreds of pixels.
MOST_RATIO: Final = 100
#: The most scans of a progressive JPEG: each takes 30 ms or more, and has 50 bytes or more.
MOST_SCANS: Final = 50
_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_SCAN: Final = b"\xff\xda"


class ImageError(Exception):
    """An image cannot be read. The message is one line: what is wrong, and what would be right."""


def decode(data: bytes) -> Image:
    """Return an image file's pixels as RGB: the first picture of several, upright, transparency on white.

    Raises `ImageError`.
    """
    from PIL import Image, ImageOps

    if len(data) > MOST_BYTES:
        raise ImageError(f"the image has {len(data)} bytes; the most are {MOST_BYTES}")
    Image.MAX_IMAGE_PIXELS = None  # PIL would only warn below twice its own limit
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            _check(image, data)
            image.load()
            return _on_white(ImageOps.exif_transpose(image))
    except ImageError:
        raise
    except Exception as error:  # noqa: BLE001  # PIL raises anything for a broken file
        if data[:1] and not isinstance(error, MemoryError):
            raise ImageError(_broken(data)) from None
        raise ImageError("the image is empty or does not fit into memory; send a PNG, JPEG or WebP") from None


def _check(image: ImageFile, data: bytes) -> None:
    """Check what the file's header says, before memory is used for the pixels."""
    width, height = image.size
    if not 0 < width * height <= MOST_PIXELS:
        raise ImageError(f"the image has {width} x {height} pixels; the most are {MOST_PIXELS} in all")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise ImageError(
            f"the image has {width} x {height} pixels; a side may be {MOST_RATIO} times the other"
        )
    if image.format in ("JPEG", "MPO") and (num := data.count(_SCAN)) > MOST_SCANS:
        raise ImageError(f"the image is a JPEG of {num} scans; the most are {MOST_SCANS}")
    if image.format in ("PNG", "WEBP") and getattr(image, "is_animated", False):
        raise ImageError(f"the image is an animated {image.format}; send one frame of it")


def _broken(data: bytes) -> str:
    known = data.startswith((b"\x89PNG", b"\xff\xd8", b"GIF8")) or data[8:12] == b"WEBP"
    if known:
        return "the image file is broken or truncated; send the whole file"
    return "the image is of no known format; send a PNG, JPEG, WebP or GIF"


def _on_white(image: Image) -> Image:
    from PIL import Image as Images

    if image.mode.startswith(("I", "F")):  # 16 bits a pixel, which `convert` would clip
        grey = np.asarray(image).astype(np.int64) >> 8
        image = Images.fromarray(np.clip(grey, 0, 255).astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Images.new("RGBA", image.size, (255, 255, 255, 255))
    return Images.alpha_composite(white, image).convert("RGB")
