"""Images of a set in one size: reading, reducing, enlarging and padding.

Images are uint8 of shape N x C x H x W.

Pillow reduces them. `nearest` takes single pixels, as in the archives of ODIN. `antialiased` is bicubic over
all pixels that a new pixel covers. `crop` cuts out a random square and leaves its pixels unchanged.
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
from gramwatch.inputs.decoding import FORMATS, as_arrays, pillow_image

REDUCE = {"nearest": "nearest", "antialiased": "anti-aliased", "crop": "crops"}
"""The ways of reducing, and their names in the titles of sets."""
FILTERS = {"nearest": "single pixels are taken", "antialiased": "bicubic"}
"""The ways of resizing. If an image is reduced, the bicubic filter averages all pixels that fall together."""


def pixels(
    images: Tensor | Sequence[Path], chosen: Sequence[int], size: int | None, reduce: str, seed: int
) -> tuple[Tensor, set[str]]:
    """The chosen images in one size, and the changes that were needed: `"reduced"`, `"padded"`.

    Images larger than `size` are reduced. Smaller images are padded with black.
    """
    if isinstance(images, Tensor):
        if size is None or max(images.shape[-2:]) <= size:
            done = {"padded"} if size is not None and min(images.shape[-2:]) < size else set()
            whole = isinstance(chosen, range) and len(chosen) == len(images)
            return padded(images if whole else images[torch.as_tensor(chosen)], size), done
        array = as_arrays(images)

        def read(index: int) -> Any:
            return pillow_image().fromarray(array[index])
    else:
        files = images

        def read(index: int) -> Any:
            try:
                with pillow_image().open(files[index], formats=FORMATS) as image:
                    return image.convert("RGB")
            except Exception as error:  # a damaged file can raise nearly anything
                raise DataError(f"{files[index]} is not a readable image: {error}") from None

    pillow_image()
    results = in_threads(lambda index: _resized(read(index), size, reduce, (seed, index)), chosen)
    arrays = [array for array, _ in results]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise DataError(
            f"the images have several sizes, from {shapes[0]} to {shapes[-1]}: give a size, such as size=32"
        )
    return as_batch(arrays), {done for _, done in results} - {""}


def _resized(image: Any, size: int | None, reduce: str, seed: tuple[int, int]) -> tuple[Any, str]:
    """One image as an array, of `size` x `size` if a size is given, and the change that was needed."""
    if size is None or image.size == (size, size):
        return np.asarray(image), ""
    width, height = image.size
    if reduce == "crop" and min(width, height) >= size:
        rng = np.random.default_rng(seed)  # one for each image: order and number of images do not matter
        left, top = (int(rng.integers(length - size + 1)) for length in (width, height))
        return np.asarray(image.crop((left, top, left + size, top + size))), "reduced"
    Image = pillow_image()  # noqa: N806
    if max(width, height) > size:
        # If the image is not square, its middle square is used.
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        method = Image.Resampling.NEAREST if reduce == "nearest" else Image.Resampling.BICUBIC
        square = image.crop((left, top, left + side, top + side))
        return np.asarray(square.resize((size, size), method)), "reduced"
    onto = Image.new(image.mode, (size, size))
    onto.paste(image, ((size - width) // 2, (size - height) // 2))
    return np.asarray(onto), "padded"


def padded(images: Tensor, size: int | None) -> Tensor:
    """The images in the middle of black squares of `size` x `size`."""
    if size is None or tuple(images.shape[-2:]) == (size, size):
        return images
    spare_height, spare_width = (size - length for length in images.shape[-2:])
    top, left = spare_height // 2, spare_width // 2
    return torch.nn.functional.pad(images, (left, spare_width - left, top, spare_height - top))


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


def in_threads(work: Callable[[int], Any], items: Sequence[int]) -> list[Any]:
    """The results of `work` for all items, by threads: Pillow releases Python's lock while it works."""
    from tqdm.auto import tqdm

    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        return list(tqdm(pool.map(work, items), "images", len(items), leave=False, disable=None))


def made_grey(images: Tensor) -> Tensor:
    """Grey images from colour images by ITU-R 601: 0.299 R + 0.587 G + 0.114 B, rounded."""
    weights = torch.tensor([299, 587, 114], device=images.device)[:, None, None]
    return ((images.int() * weights).sum(1, keepdim=True).add(500) // 1000).to(torch.uint8)


def as_batch(arrays: "Sequence[np.ndarray[Any, np.dtype[Any]]]") -> Tensor:
    """Images of one size as Pillow has them, as one tensor `(N, C, H, W)`."""
    stacked = torch.from_numpy(np.stack(arrays))
    return stacked[:, None] if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2).contiguous()


def check_image(path: Path) -> None:
    """Make sure that a file is an image, by Pillow's `verify`, which does not decode all of it."""
    try:
        with pillow_image().open(path, formats=FORMATS) as image:
            image.verify()
    except MissingExtraError:
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        raise DataError(f"{path.name} is not a readable image: {error}") from None
