"""Small pictures inside a page, as data URIs."""

import base64
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramwatch.errors import DataError, GramwatchError
from gramwatch.inputs import decoding
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.inputs.sets import CATALOGUE, NamedSet

SIDE = 192
"""The longer side of a thumbnail, in pixels."""
MOST_OF_A_MAP = 0.99
"""Values of a map above this quantile are all drawn in full red."""
RED = np.array([214.0, 39.0, 20.0])


class Finder:
    """Opens an image by its path, or by its key in a named set: `cifar10/test/00012`."""

    def __init__(self) -> None:
        self._sets: dict[str, NamedSet | None] = {}

    def __call__(self, key: str, grey: bool = False) -> tuple[Any, str]:
        """The image, and a note of what was changed. An error says why it cannot be read."""
        try:
            return decoding.opened(key, grey)
        except DataError:
            named = self._named_set(key)
            if named is None:
                raise
            return named.open(key, grey)

    def _named_set(self, key: str) -> NamedSet | None:
        name, _, rest = key.partition("/")
        split, _, number = rest.partition("/")
        if name not in CATALOGUE or not number.isdecimal():
            return None
        place = f"{name}/{split}"
        if place not in self._sets:
            try:
                self._sets[place] = NamedSet.load(name, split)
            except GramwatchError:
                self._sets[place] = None
        named_set = self._sets[place]
        return named_set if named_set is not None and key in named_set.keys else None


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


def network_input(inputs: Tensor, preprocessing: Preprocessing) -> Any:
    """The input of a network as a picture, to show beside its map."""
    from PIL import Image

    pixels = (255 * pixels_of(inputs, preprocessing)).round().clamp(0, 255).byte()
    return Image.fromarray(pixels.permute(1, 2, 0).expand(-1, -1, 3).contiguous().numpy())


def pixels_of(inputs: Tensor, preprocessing: Preprocessing) -> Tensor:
    """The pixels behind the inputs of a network, `(..., C, H, W)`, from 0 to 1."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    return inputs.cpu() * std + mean


def _size(width: int, height: int, scale: float) -> tuple[int, int]:
    return max(1, round(width * scale)), max(1, round(height * scale))


def over(image: Any, heat: Any) -> Any:
    """A map over the grey image: the redder, the larger. `heat` is `(H, W)`, not negative."""
    from PIL import Image

    grey = np.asarray(image.convert("L"), dtype=np.float64)[:, :, None].repeat(3, 2)
    values = np.asarray(heat, dtype=np.float64)
    most = np.quantile(values, MOST_OF_A_MAP)
    share = np.clip(values / most, 0, 1) if most > 0 else values
    wide = Image.fromarray((255 * share).astype(np.uint8)).resize(image.size, Image.Resampling.BILINEAR)
    red = 0.85 * np.asarray(wide, dtype=np.float64)[:, :, None] / 255
    return Image.fromarray(((1 - red) * (40 + 0.75 * grey) + red * RED).astype(np.uint8))
