"""Images reduced or enlarged by Pillow."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramwatch.datasets.images import _in_threads, _pillow
from gramwatch.errors import DataError

FILTERS = {"nearest": "single pixels are taken", "antialiased": "bicubic"}
"""The ways of resizing. If an image is reduced, the bicubic filter averages all pixels that fall together."""


def resized(images: Tensor, side: int, how: str = "antialiased") -> Tensor:
    """Resize uint8 images `(N, C, H, W)` to `(N, C, side, side)`."""
    if how not in FILTERS:
        raise DataError(f"there is no way '{how}' to resize: choose from {', '.join(FILTERS)}")
    if tuple(images.shape[-2:]) == (side, side):
        return images
    pillow = _pillow()
    method = pillow.Resampling.NEAREST if how == "nearest" else pillow.Resampling.BICUBIC
    array = images.permute(0, 2, 3, 1).numpy()
    array = array[..., 0] if array.shape[-1] == 1 else array  # Pillow's grey images have two axes

    def one(index: int) -> Any:
        return np.asarray(pillow.fromarray(array[index]).resize((side, side), method))

    stacked = torch.from_numpy(np.stack(_in_threads(one, range(len(images)))))
    return stacked[:, None] if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2).contiguous()


def through(images: Tensor, side: int, how: str = "antialiased") -> Tensor:
    """Reduce square images to `side`, and enlarge them to their own size by the same filter."""
    return resized(resized(images, side, how), images.shape[-1], how)
