"""NumPy files of images, for sets that nobody publishes in a layout of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramwatch.errors import DataError
from gramwatch.inputs.sets import missing


def array(path: Path) -> "np.ndarray[Any, np.dtype[Any]]":
    """A NumPy file of plain numbers, mapped: sizes are compared with the file before memory is taken."""
    if not path.is_file():
        raise missing(path)
    try:
        values = np.load(path, mmap_mode="r")
        if not isinstance(values, np.ndarray) or not values.ndim:
            raise ValueError("it holds no array")
    except Exception as error:  # a damaged file can raise nearly anything
        raise DataError(f"{path} is not a whole NumPy file of plain numbers: {error!s:.200}") from None
    return values


def image_array(path: Path) -> Tensor:
    """The images of a NumPy file, uint8 of shape N x 32 x 32 x 3, as N x 3 x 32 x 32."""
    images = array(path)
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise DataError(f"{path} holds {images.dtype} of shape {images.shape}, not images")
    return torch.from_numpy(images.copy()).permute(0, 3, 1, 2)
