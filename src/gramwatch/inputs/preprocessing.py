"""From an image to a network's input: resize, crop, scale, normalise. Also the comparison of two ways.

The steps are those of timm, torchvision and Hugging Face's image processors: Pillow resizes the image, the
middle is cut out, pixels become floats from 0 to 1, and each channel is normalised.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramwatch.errors import InputError
from gramwatch.files.artifact import check_types

FILTERS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
"""The filters of Pillow."""
MOST_PIXELS = 2**24
"""Pixels that resizing may compute. A thin image would become far larger: of it, only the part that is kept
is computed, and its pixels differ by roundings. Images of a side ratio up to 16 are resized whole."""
MOST_SIDE = 2**13
"""The largest side of an input that a file can ask for."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the input of a network."""

    size: tuple[int, int]
    """Height and width of the input."""
    shorter: int | None
    """The shorter side is resized to this length, and the middle of `size` is cut out. None: the image is
    resized to `size`, whatever its proportions."""
    resize: str
    """One of `FILTERS`."""
    mean: tuple[float, ...]
    """The mean of each channel. With one channel, images become grey."""
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.resize not in FILTERS:
            raise InputError(f"there is no filter '{self.resize}': choose from {', '.join(FILTERS)}")
        if len(self.mean) != len(self.std) or len(self.mean) not in (1, 3):
            raise InputError(
                f"mean and std need one or three numbers each, not {len(self.mean)} and {len(self.std)}"
            )
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise InputError(f"mean {self.mean} and std {self.std}: the numbers must be finite, std positive")
        if min(self.size) < 1 or (self.shorter is not None and self.shorter < 1):
            raise InputError(f"images cannot have the size {self.size[0]} x {self.size[1]}")

    @property
    def grey(self) -> bool:
        """Whether images are made grey."""
        return len(self.mean) == 1

    def resized_to(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of an image after resizing and before cropping."""
        if self.shorter is None:
            return self.size[1], self.size[0]
        short, long = sorted((width, height))
        longer = max(1, int(self.shorter * long / short))
        return (self.shorter, longer) if width <= height else (longer, self.shorter)

    def change_of(self, width: int, height: int) -> str:
        """What resizing does to an image: `"kept"`, `"reduced"` or `"enlarged"`."""
        new = self.resized_to(width, height)
        if new == (width, height):
            return "kept"
        return "reduced" if new[0] * new[1] < width * height else "enlarged"

    def __call__(self, image: Any) -> Tensor:
        """The input made from a Pillow image of mode RGB or L, float32 of shape C x H x W."""
        pixels = self.pixels(image).permute(2, 0, 1)
        mean, std = self._mean_and_std
        inputs = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return inputs.div_(255).sub_(mean).div_(std)

    @cached_property
    def _mean_and_std(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean)[:, None, None], torch.tensor(self.std)[:, None, None]

    def pixels(self, image: Any) -> Tensor:
        """The pixels of an image after resizing and cropping, uint8 of shape H x W x C."""
        image = _middle(self._resized(image), *self.size)
        pixels = torch.from_numpy(np.array(image))
        return pixels[:, :, None] if pixels.ndim == 2 else pixels

    def _resized(self, image: Any) -> Any:
        """An image after resizing. Of a thin image, only the part that `_middle` keeps."""
        from PIL import Image

        new, how = self.resized_to(*image.size), Image.Resampling[self.resize.upper()]
        if new == image.size:
            return image
        # Pillow resizes one axis, then the other. The image between them may be larger than both.
        most = max(old * after for old, after in zip(image.size, reversed(new), strict=True))
        if max(most, new[0] * new[1]) <= max(MOST_PIXELS, image.width * image.height, 16 * min(new) ** 2):
            return image.resize(new, how)
        for axis in sorted((0, 1), key=lambda axis: self.size[1 - axis] / image.size[axis]):
            image = _part_along(image, axis, new[axis], self.size[1 - axis], how)
        return image

    def changed(
        self,
        size: int | None = None,
        resize: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> "Preprocessing":
        """A copy with the given values. With `size`, the shorter side is resized to it."""
        return Preprocessing(
            self.size if size is None else (size, size),
            self.shorter if size is None else size,
            resize or self.resize,
            tuple(mean or self.mean),
            tuple(std or self.std),
        )

    def differences(self, other: "Preprocessing") -> list[str]:
        """Differences from another preprocessing, own values first: `"resize: bilinear, not nearest"`."""
        mine, theirs = asdict(self), asdict(other)
        return [
            f"{name}: {_shown(mine[name])}, not {_shown(theirs[name])}"
            for name in mine
            if mine[name] != theirs[name]
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Preprocessing":
        """The preprocessing from plain values, checked."""
        check_types(values, size=list[int], shorter=int | None, resize=str, mean=list[float], std=list[float])
        if len(values["size"]) != 2 or max(*values["size"], values["shorter"] or 0) > MOST_SIDE:
            raise InputError(f"the size of images cannot be {values['size']!r:.60}")
        height, width = values["size"]
        return Preprocessing(
            (height, width),
            values["shorter"],
            values["resize"],
            tuple(map(float, values["mean"])),
            tuple(map(float, values["std"])),
        )

    def __str__(self) -> str:
        height, width = self.size
        how = f"shorter side to {self.shorter}, middle" if self.shorter is not None else "resized to"
        how = f"{how} {height} x {width} ({self.resize})" + (", made grey" if self.grey else "")
        return f"{how}, mean {_shown(self.mean)}, std {_shown(self.std)}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(f"{number:g}" for number in value)
    return str(value)


def _part_along(image: Any, axis: int, new: int, kept: int, how: Any) -> Any:
    """The middle of an image that is resized to the length `new` along one axis."""
    length, start = image.size[axis], _before(new, kept)
    start, stop = max(0, start), min(new, start + kept)
    scale = length / new
    # Pillow holds the box in float32. Near the beginning of a small image that is exact enough.
    reach = 4 * max(1.0, scale)  # the widest filter, Lanczos, reaches 3
    first, last = max(0, int(start * scale - reach)), min(length, math.ceil(stop * scale + reach))
    part, box = [0, 0, *image.size], [0, 0, *image.size]
    part[axis], part[axis + 2] = first, last
    box[axis], box[axis + 2] = start * scale - first, min(stop * scale - first, last - first)
    size = list(image.size)
    size[axis] = stop - start
    # An axis that shrinks more than 128-fold is averaged first: the filter's weights would take memory.
    return image.crop(part).resize(size, how, box, reducing_gap=64.0)


def _before(length: int, kept: int) -> int:
    """How many pixels lie before the middle of a length."""
    return round((length - kept) / 2.0)


def _middle(image: Any, height: int, width: int) -> Any:
    """The middle of an image. An image that is smaller gets black borders."""
    if image.size == (width, height):
        return image
    left, top = _before(image.width, width), _before(image.height, height)
    return image.crop((left, top, left + width, top + height))
