"""Image files: what is decoded, and what is refused in a sentence, whoever made the file."""

from __future__ import annotations

import contextlib
import io
import random
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from worker.models.model import load
from worker.models.vision import image_file
from worker.models.vision.image_file import MOST_BYTES, ImageError, decode
from worker.models.vision.image_processor import ImageProcessor

RED, BLUE = (250, 5, 5), (5, 5, 250)


def saved(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def halves(mode: str = "RGB", size: tuple[int, int] = (16, 8)) -> Image.Image:
    """Return an image that is red on the left and blue on the right."""
    image = Image.new("RGB", size, BLUE)
    image.paste(RED, (0, 0, size[0] // 2, size[1]))
    return image.convert(mode)


def png(width: int, height: int, *, kind: int = 2, data: bytes | None = None) -> bytes:
    """Return a PNG file that its header says to be of this size; its pixels may be missing."""

    def chunk(name: bytes, content: bytes) -> bytes:
        whole = name + content
        return struct.pack(">I", len(content)) + whole + struct.pack(">I", zlib.crc32(whole))

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    pixels = zlib.compress(b"\0" * (1 + 3 * width) if data is None else data)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def chunked(whole: bytes, name: bytes, content: bytes) -> bytes:
    """Return a PNG file with one more chunk, behind its header."""
    chunk = name + content
    end = 33
    return (
        whole[:end]
        + struct.pack(">I", len(content))
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + whole[end:]
    )


def slow_jpeg(num_scans: int) -> bytes:
    """Return a progressive JPEG that repeats its last scan."""
    whole = saved(halves(size=(64, 64)), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:last] + whole[last:-2] * num_scans + whole[-2:]


def near(image: Image.Image, at: tuple[int, int], shade: tuple[int, int, int]) -> bool:
    found: Any = image.getpixel(at)
    return bool(np.abs(np.array(found) - shade).max() < 40)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF"])
def test_images_in_each_of_the_four_supported_formats_are_decoded(form: str) -> None:
    image = decode(saved(halves(size=(32, 16)), form))
    assert (image.mode, image.size) == ("RGB", (32, 16))
    assert near(image, (4, 4), RED)
    assert near(image, (28, 12), BLUE)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_images_of_every_pixel_mode_are_converted_to_rgb(mode: str) -> None:
    if mode == "I;16":
        grey = np.full((8, 16), 200 << 8, np.uint16)
        assert near(decode(saved(Image.fromarray(grey))), (3, 3), (200, 200, 200))
        return
    image = halves("RGBA" if mode == "LA" else "RGB").convert(mode)
    assert decode(saved(image, "JPEG" if mode == "CMYK" else "PNG")).mode == "RGB"


def test_transparent_pixels_of_an_image_become_white() -> None:
    image = halves("RGBA")
    image.putpixel((1, 1), (0, 0, 0, 0))
    image.putpixel((2, 2), (0, 0, 0, 128))
    found = decode(saved(image))
    assert found.getpixel((1, 1)) == (255, 255, 255)
    assert near(found, (2, 2), (127, 127, 127))
    palette = halves().quantize(4)
    found = decode(saved(palette, transparency=palette.getpixel((0, 0))))
    assert found.getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["GIF", "MPO"])
def test_of_a_gif_the_first_frame_and_of_a_camera_file_the_main_image_is_decoded(form: str) -> None:
    """Many phones write the picture and a small or brighter one into one JPEG file: an MPO."""
    assert near(decode(_animated(form)), (3, 3), RED)


def _camera(orientation: int, form: str, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(halves(size=(64, 32)), form, exif=exif.tobytes(), **options)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_an_image_is_turned_upright_for_every_orientation_tag_in_every_format(form: str) -> None:
    for orientation in range(10):
        image = decode(_camera(orientation, form))
        assert image.size == ((32, 64) if orientation in (5, 6, 7, 8) else (64, 32))
        is_turned = orientation in (2, 3, 7, 8)
        assert near(image, (4, 4), BLUE if is_turned else RED), orientation


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_jpeg_image_with_corrupt_exif_data_is_decoded() -> None:
    for exif in (b"Exif\0\0" + b"\xff" * 40, b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\xff" * 40):
        assert near(decode(saved(halves(size=(64, 32)), "JPEG", exif=exif)), (4, 4), RED)


def test_image_colours_of_16_bits_are_reduced_to_their_high_8_bits() -> None:
    deep = b"\xc8\x00\x10\xff\x20\x80"
    for kind, row in ((2, deep * 4), (6, (deep + b"\xff\xff") * 4), (6, (deep + b"\0\0") * 4)):
        whole = bytearray(png(4, 4, kind=kind, data=(b"\0" + row) * 4))
        whole[24] = 16
        whole[29:33] = struct.pack(">I", zlib.crc32(whole[12:29]))
        shade = (255, 255, 255) if row.endswith(b"\0\0") else (200, 16, 32)
        assert decode(bytes(whole)).getpixel((3, 3)) == shade


def _animated(form: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), shade) for shade in (RED, BLUE)]
    return saved(frames[0], form, save_all=True, append_images=frames[1:])


def _resized_jpeg(width: int, height: int) -> bytes:
    """Return a JPEG file that its header says to be of this size."""
    whole = bytearray(saved(halves(), "JPEG"))
    at = whole.index(b"\xff\xc0") + 5
    whole[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(whole)


BROKEN: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "one byte": lambda: b"\x89",
    "text": lambda: b"no image at all",
    "HTML": lambda: b"<html><body>404 Not Found</body></html>",
    "SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>',
    "PDF": lambda: b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    "BMP": lambda: saved(halves(), "BMP"),
    "TIFF": lambda: saved(halves(), "TIFF"),
    "ICO": lambda: saved(halves(size=(16, 16)), "ICO"),
    "EPS": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "a PNG's first bytes": lambda: saved(halves())[:20],
    "half a PNG": lambda: saved(Image.effect_noise((64, 64), 90))[:2000],
    "half a JPEG": lambda: saved(Image.effect_noise((64, 64), 90), "JPEG")[:900],
    "half a WebP": lambda: saved(Image.effect_noise((64, 64), 90), "WEBP")[:900],
    "half a GIF": lambda: saved(Image.effect_noise((64, 64), 90), "GIF")[:1200],
    "a PNG of no pixels": lambda: png(0, 0),
    "a PNG of no width": lambda: png(0, 9),
    "a PNG whose pixels are no deflate": lambda: png(8, 8).replace(b"IDAT", b"IDAT\xff\xff", 1),
    "a PNG of a colour that there is not": lambda: png(8, 8, kind=5),
    "a bomb of 100,000 x 100,000": lambda: png(100_000, 100_000, data=b"\0" * 1_000_000),
    "a line of 32,000 pixels": lambda: saved(Image.new("L", (32_000, 1))),
    "a column of 900 pixels": lambda: saved(Image.new("L", (8, 900))),
    "33 megapixels": lambda: png(33_000, 1000, data=b"\0" * 1_000_000),
    "a GIF of 60,000 x 60,000": lambda: b"GIF89a" + struct.pack("<HH", 60_000, 60_000) + b"\0\0\0;",
    "a WebP of 16,383 x 16,383": lambda: (
        b"RIFF\x20\0\0\0WEBPVP8X\x0a\0\0\0\x10\0\0\0" + b"\xfe\x3f\0\xfe\x3f\0" + b"\0" * 8
    ),
    "a PNG without its last pixels": lambda: saved(Image.effect_noise((64, 64), 90))[:-40],
    "a PNG with another checksum": lambda: saved(halves()).replace(b"IDAT", b"IDAU"),
    "a PNG whose text unpacks to 200 MB": lambda: chunked(
        saved(halves()), b"zTXt", b"a\0\0" + zlib.compress(b"a" * 200_000_000)
    ),
    "a PNG whose profile unpacks to 200 MB": lambda: chunked(
        saved(halves()), b"iCCP", b"a\0\0" + zlib.compress(b"a" * 200_000_000)
    ),
    "a JPEG of two bytes": lambda: b"\xff\xd8",
    "a JPEG's first bytes": lambda: saved(halves(), "JPEG")[:200],
    "a JPEG without its end": lambda: saved(Image.effect_noise((64, 64), 90), "JPEG")[:-40],
    "half a progressive JPEG": lambda: saved(Image.effect_noise((64, 64), 90), "JPEG", progressive=True)[
        :2000
    ],
    "a lossless JPEG": lambda: saved(halves(), "JPEG").replace(b"\xff\xc0", b"\xff\xc3"),
    "a JPEG of 65,500 x 65,500": lambda: _resized_jpeg(65_500, 65_500),
    "a JPEG of no height": lambda: _resized_jpeg(9, 0),
    "a JPEG of 1,000 scans": lambda: slow_jpeg(1000),
    "a WebP without its last byte": lambda: saved(Image.effect_noise((64, 64), 90), "WEBP")[:-1],
    "half a lossless WebP": lambda: saved(Image.effect_noise((64, 64), 90), "WEBP", lossless=True)[:2000],
    "a WebP's first bytes": lambda: saved(halves(), "WEBP")[:16],
    "a GIF without frames": lambda: b"GIF89a\x0a\0\x0a\0\0\0\0;",
    "a GIF with a frame beyond its edges": lambda: (
        b"GIF89a\x0a\0\x0a\0\0\0\0,\0\0\0\0" + struct.pack("<HH", 60_000, 60_000) + b"\0\x02\x02\x4c\x01\0;"
    ),
    "a GIF with a frame of no pixels": lambda: (
        b"GIF89a\x0a\0\x0a\0\0\0\0,\0\0\0\0\0\0\0\0\0\x02\x02\x4c\x01\0;"
    ),
    "an animated PNG": lambda: _animated("PNG"),
    "an animated WebP": lambda: _animated("WEBP"),
    "21 MB": lambda: saved(halves()) + b"\0" * MOST_BYTES,
}


@pytest.fixture(scope="module")
def image_processor(taught_model: Path) -> ImageProcessor:
    """What a model reads images with."""
    vision_model = load(taught_model, dtype="float32").vision_model
    assert not isinstance(vision_model, str), vision_model
    vision_model.processor.read(saved(halves(size=(64, 64))))
    return vision_model.processor


@pytest.mark.parametrize("name", BROKEN)
def test_a_truncated_or_malformed_image_file_is_refused_in_one_sentence_using_under_64_mib_of_memory(
    name: str, image_processor: ImageProcessor
) -> None:
    data = BROKEN[name]()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImageError, match=r"^the image .*; ") as raised:
        image_processor.read(data)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 160
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


def test_an_image_file_with_random_changed_bytes_is_decoded_or_refused_with_an_image_error() -> None:
    rng = random.Random(7)
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = saved(halves(size=(32, 32)), form)
        for _ in range(100):
            data = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            with contextlib.suppress(ImageError):
                assert decode(bytes(data)).mode == "RGB"


def test_an_image_at_the_pixel_limit_is_decoded_and_a_larger_one_is_refused_with_the_limit(
    monkeypatch,
) -> None:
    monkeypatch.setattr(image_file, "MOST_PIXELS", 16 * 8)
    assert decode(saved(halves())).size == (16, 8)
    with pytest.raises(ImageError, match="17 x 8 pixels; the most are 128 in all"):
        decode(saved(halves(size=(17, 8))))
