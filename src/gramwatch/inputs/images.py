"""Images as tensors and as Pillow has them, and the formats of files that are read.

Images are uint8 of shape N x C x H x W.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramwatch.errors import DataError, MissingExtraError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "PPM", "TIFF")
"""The formats of image files that are read, whatever their names. Pillow's other readers never run."""


def check_image(path: Path) -> None:
    """Make sure that a file is an image, by Pillow's `verify`, which does not decode all of it."""
    try:
        with pillow_image().open(path, formats=FORMATS) as image:
            image.verify()
    except MissingExtraError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise DataError(f"{path.name} is not a readable image: {error}") from None


def as_arrays(images: Tensor) -> "np.ndarray[Any, np.dtype[Any]]":
    """Images `(N, C, H, W)` as Pillow has them: channels last, and no channel axis if they are grey."""
    array = images.permute(0, 2, 3, 1).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array


def as_batch(arrays: "Sequence[np.ndarray[Any, np.dtype[Any]]]") -> Tensor:
    """Images of one size as Pillow has them, as one tensor `(N, C, H, W)`."""
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked[:, None] if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2).contiguous()


def pillow_image() -> Any:
    """Pillow's module `Image`, or an error that names the extra."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise MissingExtraError(
            "reading and reducing images needs Pillow: install it with pip install 'gramwatch[plot]'"
        ) from None
    return Image


def in_threads(work: Callable[[int], Any], items: Sequence[int]) -> list[Any]:
    """The results of `work` for all items, by threads: Pillow releases Python's lock while it works."""
    from tqdm.auto import tqdm

    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        return list(tqdm(pool.map(work, items), "images", len(items), leave=False, disable=None))


def made_grey(images: Tensor) -> Tensor:
    """Grey images from colour images by ITU-R 601: 0.299 R + 0.587 G + 0.114 B, rounded."""
    weights = torch.tensor([299, 587, 114], device=images.device)[:, None, None]
    return ((images.int() * weights).sum(1, keepdim=True).add(500) // 1000).to(torch.uint8)
