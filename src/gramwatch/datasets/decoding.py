"""Opening any image file as RGB or grey, with a note of what was changed. Errors are one clear line.

Fitting and scoring open images in this one way. Only the formats of `images.FORMATS` are read.
"""

import warnings
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from gramwatch.datasets.images import FORMATS, pillow_image
from gramwatch.errors import DataError

MOST_PIXELS = 178_956_970
"""An image with more pixels is not decoded. Pillow has the same limit."""


def opened(
    path: str | PathLike[str] | BytesIO, grey: bool = False, most_pixels: int | None = None
) -> tuple[Any, str]:
    """A Pillow image of mode RGB, or L if `grey`, and a note of what was changed; empty if nothing was.

    `path` may also hold the bytes of a file.
    """
    Image = pillow_image()  # noqa: N806
    from PIL import ImageOps, UnidentifiedImageError

    most = MOST_PIXELS if most_pixels is None else min(most_pixels, MOST_PIXELS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                if image.width * image.height > most:
                    raise Image.DecompressionBombError
                notes = _noted(image)
                upright = ImageOps.exif_transpose(image)
                return _converted(upright, "L" if grey else "RGB"), "; ".join(notes)
    except Image.DecompressionBombError:
        raise DataError(f"too large: it has more than {most:,} pixels") from None
    except UnidentifiedImageError:
        raise DataError(_why_unidentified(path)) from None
    except DataError:
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
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65_535:
            raise DataError("cannot be read: its pixels have more than 16 bits")
        image = Image.fromarray((pixels >> 8).astype(np.uint8))
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert(mode)


def _why_unidentified(path: str | PathLike[str] | BytesIO) -> str:
    size = path.getbuffer().nbytes if isinstance(path, BytesIO) else Path(path).stat().st_size
    if size == 0:
        return "the file is empty"
    return f"not an image of a known format ({', '.join(FORMATS)})"
