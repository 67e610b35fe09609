"""Opening any image file as RGB or grey, with a note of what was changed. Errors are one clear line.

Fitting and scoring open images in this one way. Only the formats of `FORMATS` are read.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from os import PathLike
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
from torch import Tensor

from gramwatch.errors import DataError, MissingExtraError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""The formats of image files that are read, whatever their names. Pillow's other readers never run."""
NO_MEMORY = "there is not enough memory to decode it"
MOST_PIXELS = 178_956_970
"""An image with more pixels is not decoded. Pillow has the same limit."""
MOST_WORK = 2 * 10**10
"""An image that takes more `work` is not decoded. Only a JPEG of very many scans does."""
SLOW = 100
"""How many times as long a pixel takes that Python decodes, not C."""
SCANS = 10
"""How many scans of a JPEG take as long again as its first."""


def opened(
    path: str | PathLike[str] | BytesIO,
    grey: bool = False,
    most_pixels: int | None = None,
    most_work: int = MOST_WORK,
) -> tuple[Any, str]:
    """A Pillow image of mode RGB, or L if `grey`, and a note of what was changed; empty if nothing was.

    `path` may also hold the bytes of a file.
    """
    try:
        with begun(path, most_pixels) as image, _in_one_line(path):
            if (cost := work(image)) > most_work:
                raise DataError(f"too slow to decode: it takes as long as {cost:,} pixels")
            notes = _noted(image)
            return decoded(image, grey), "; ".join(notes)
    except MemoryError:
        raise DataError(NO_MEMORY) from None


def begun(path: str | PathLike[str] | BytesIO, most_pixels: int | None = None) -> Any:
    """A Pillow image of which only the beginning is read. It has a size, and no pixels yet."""
    Image = pillow_image()  # noqa: N806
    most = MOST_PIXELS if most_pixels is None else min(most_pixels, MOST_PIXELS)
    with _in_one_line(path, most), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        if not isinstance(path, BytesIO) and not S_ISREG(Path(path).stat().st_mode):
            raise DataError("not a regular file")  # to open a FIFO would wait for a writer
        image = Image.open(path, formats=FORMATS)
        if max(image.width * image.height, _tile(image)) > most:
            image.close()
            raise Image.DecompressionBombError
        return image


def _tile(image: Any) -> int:
    """The pixels of a tile of a TIFF. It may be far larger than the image."""
    tags = getattr(image, "tag_v2", {})
    return int(tags.get(322, 0) * tags.get(323, 0))


def work(image: Any) -> int:
    """How long an image takes to decode that was `begun`, in pixels of a common image."""
    pixels = (image.width + 7) * image.height  # a row has costs of its own
    codec = image.tile[0][0] if image.tile else ""
    if codec in pillow_image().DECODERS:
        return int(pixels * SLOW)
    if codec == "jpeg" or image.info.get("compression") == "jpeg":  # in a TIFF
        return int(pixels * (SCANS + _scans(image.fp)) // SCANS)
    return int(pixels)


def _scans(file: Any) -> int:
    """The scans of a JPEG. Each goes over all pixels, and may take a few bytes."""
    place, count, last = file.tell(), 0, b""
    file.seek(0)
    while piece := file.read(2**20):
        count += (last + piece).count(b"\xff\xda")
        last = piece[-1:]
    file.seek(place)
    return count


def decoded(image: Any, grey: bool) -> Any:
    """An image that was `begun`, with its pixels, of mode RGB or L. No copy is made that is not needed."""
    from PIL import ImageOps

    with _in_one_line():
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _converted(image, "L" if grey else "RGB")


@contextmanager
def _in_one_line(
    path: str | PathLike[str] | BytesIO | None = None, most_pixels: int = MOST_PIXELS
) -> Iterator[None]:
    """Whatever a damaged file raises becomes a `DataError` of one line."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except Image.DecompressionBombError:
        raise DataError(f"too large: it has more than {most_pixels:,} pixels") from None
    except UnidentifiedImageError:
        raise DataError(_why_unidentified(path)) from None
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(" ".join(f"cannot be read: {reason}".split())) from None


def _noted(image: Any) -> list[str]:
    """What the conversion changes, for a person who wonders about a verdict."""
    notes = []
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        notes.append(f"first of {frames} frames")
    if image.getexif().get(0x0112, 1) not in (0, 1):
        notes.append("turned as EXIF says")
    if image.mode.startswith("I"):
        notes.append("16 bits reduced to 8")
    elif image.mode == "CMYK":
        notes.append("CMYK made RGB")
    return notes


def _converted(image: Any, mode: str) -> Any:
    from PIL import Image

    if image.mode == "F":
        raise DataError("cannot be read: its pixels are floats, whose range is unknown")
    if image.mode.startswith("I"):  # Pillow's own conversion would make every pixel above 255 white
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() > 65_535:
            raise DataError("cannot be read: its pixels have more than 16 bits")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _why_unidentified(path: str | PathLike[str] | BytesIO | None) -> str:
    size = path.getbuffer().nbytes if isinstance(path, BytesIO) else Path(path or "").stat().st_size
    if size == 0:
        return "the file is empty"
    return f"not an image of a known format ({', '.join(FORMATS)})"


def pillow_image() -> Any:
    """Pillow's module `Image`, or an error that names the extra."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingExtraError(
            "reading and reducing images needs Pillow: install it with pip install 'gramwatch[plot]'"
        ) from None
    return Image


def as_arrays(images: Tensor) -> "np.ndarray[Any, np.dtype[Any]]":
    """Images `(N, C, H, W)` as Pillow has them: channels last, and no channel axis if they are grey."""
    array = images.permute(0, 2, 3, 1).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array
