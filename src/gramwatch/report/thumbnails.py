"""Small pictures inside a page, as data URIs."""

import base64
import io
from collections.abc import Callable
from typing import Any

import numpy as np

from gramwatch.datasets import CATALOGUE, decoding
from gramwatch.errors import DataError, GramwatchError
from gramwatch.readers import NamedSet

SIDE = 192
"""The longer side of a thumbnail, in pixels."""


def opener() -> Callable[[str], Any]:
    """A function that opens an image by its path, or by its key in a named set. None if it cannot be read."""
    sets: dict[str, NamedSet | None] = {}

    def opened(key: str) -> Any:
        try:
            return decoding.opened(key)[0]
        except DataError:
            named = _named_set(key, sets)
            return None if named is None else named.open(key)[0]

    return opened


def _named_set(key: str, sets: dict[str, NamedSet | None]) -> NamedSet | None:
    """The set of a key such as `cifar10/test/00012`."""
    name, _, rest = key.partition("/")
    split, _, number = rest.partition("/")
    if name not in CATALOGUE or not number.isdecimal():
        return None
    if name + split not in sets:
        try:
            sets[name + split] = NamedSet.load(name, split)
        except GramwatchError:
            sets[name + split] = None
    found = sets[name + split]
    return found if found is not None and int(number) < len(found.keys) else None


def thumbnail(image: Any, side: int = SIDE) -> str:
    """A picture as a data URI. Small pictures are enlarged without smoothing."""
    from PIL import Image

    width, height = image.size
    scale = side / max(width, height)
    if scale > 2:
        shown = image.resize(_size(width, height, int(scale)), Image.Resampling.NEAREST)
    elif scale < 1:
        shown = image.resize(_size(width, height, scale), Image.Resampling.LANCZOS)
    else:
        shown = image
    file = io.BytesIO()
    shown.convert("RGB").save(file, "WEBP", quality=80, method=4)
    return "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()


def _size(width: int, height: int, scale: float) -> tuple[int, int]:
    return max(1, round(width * scale)), max(1, round(height * scale))


def over(image: Any, heat: Any) -> Any:
    """A map over the grey image: the redder, the larger. `heat` is `(H, W)`, not negative."""
    from PIL import Image

    grey = np.asarray(image.convert("L"), dtype=np.float64)[:, :, None].repeat(3, 2)
    values = np.asarray(heat, dtype=np.float64)
    values = values / values.max() if values.max() > 0 else values
    wide = Image.fromarray((255 * values).astype(np.uint8)).resize(image.size, Image.Resampling.BILINEAR)
    share = np.sqrt(np.asarray(wide, dtype=np.float64) / 255)[:, :, None]
    red = np.array([214.0, 39.0, 20.0])
    return Image.fromarray(((1 - 0.85 * share) * (40 + 0.75 * grey) + 0.85 * share * red).astype(np.uint8))
