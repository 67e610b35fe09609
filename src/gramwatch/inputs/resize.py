"""Images reduced or enlarged by Pillow."""

from typing import Any

import numpy as np
from torch import Tensor

from gramwatch.errors import DataError
from gramwatch.inputs.images import as_arrays, as_batch, in_threads, pillow_image

FILTERS = {"nearest": "single pixels are taken", "antialiased": "bicubic"}
"""The ways of resizing. If an image is reduced, the bicubic filter averages all pixels that fall together."""


def resized(images: Tensor, side: int, how: str = "antialiased") -> Tensor:
    """Resize uint8 images `(N, C, H, W)` to `(N, C, side, side)`."""
    if how not in FILTERS:
        raise DataError(f"there is no way '{how}' to resize: choose from {', '.join(FILTERS)}")
    if tuple(images.shape[-2:]) == (side, side):
        return images
    pillow = pillow_image()
    method = pillow.Resampling.NEAREST if how == "nearest" else pillow.Resampling.BICUBIC
    array = as_arrays(images)

    def one(index: int) -> Any:
        return np.asarray(pillow.fromarray(array[index]).resize((side, side), method))

    return as_batch(in_threads(one, range(len(images))))


def through(images: Tensor, side: int, how: str = "antialiased") -> Tensor:
    """Reduce square images to `side`, and enlarge them to their own size by the same filter."""
    return resized(resized(images, side, how), images.shape[-1], how)
