"""Faults of the camera and of the pipeline, applied to good images.

A fault of the camera is a function of uint8 images `(N, 3, H, W)`, a strength and a seed. It returns images
of the same shape and type. A fault of the normalisation is another mean and another standard deviation. They
give the network the same numbers as the fault.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.inputs.decoding import as_arrays, pillow_image
from gramwatch_lab.datasets.images import as_batch, in_threads, through

Channels = tuple[float, ...]
GAMMA = 2.2
"""A pixel is proportional to the light to the power of 1 / `GAMMA`."""


@dataclass(frozen=True)
class Fault:
    """A fault with the strengths of the study."""

    title: str
    """The title in tables. `{}` in it is replaced by the strength."""
    apply: Callable[[Tensor, float, int], Tensor]
    """Takes images, a strength and a seed, and returns the images with the fault."""
    strengths: tuple[float, ...] = (0,)
    """The mildest strength is first. `(0,)`: the fault has no strength."""


def sensor_noise(images: Tensor, sigma: float, seed: int = 0) -> Tensor:
    """Independent normal noise on every value. The unit of `sigma` is 1/255 of white."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(seed))
    return _pixels(images + sigma * noise)


def blur(images: Tensor, sigma: float, seed: int = 0) -> Tensor:
    """A lens out of focus: a Gaussian filter of `sigma` pixels. Borders are mirrored."""
    from scipy import ndimage

    blurred = ndimage.gaussian_filter(images.numpy().astype(np.float32), (0, 0, sigma, sigma))
    return _pixels(torch.from_numpy(blurred))


def motion_blur(images: Tensor, length: float, seed: int = 0) -> Tensor:
    """A camera that moves: the mean over a line of `length` pixels. Each image has a random direction."""
    angles = torch.rand(len(images), generator=torch.Generator().manual_seed(seed)) * torch.pi
    kernels = torch.stack([_line(length, float(angle)) for angle in angles])
    channels, margin = images.shape[1], kernels.shape[-1] // 2
    edges = [(0, 0), (0, 0), (margin, margin), (margin, margin)]
    padded = torch.from_numpy(np.pad(images.numpy(), edges, "symmetric")).float()
    weights = kernels.repeat_interleave(channels, 0)[:, None]
    moved = F.conv2d(padded.flatten(0, 1)[None], weights, groups=len(weights))
    return _pixels(moved.reshape(images.shape))


def _line(length: float, angle: float) -> Tensor:
    """A kernel with a line through its centre. Its weights sum to one. Four pixels share each point."""
    margin = int(length) // 2 + 1
    steps = torch.linspace(-(length - 1) / 2, (length - 1) / 2, 16 * int(length))
    direction = torch.tensor([np.sin(angle), np.cos(angle)], dtype=torch.float32)
    places = margin + steps[:, None] * direction
    offsets = torch.arange(2 * margin + 1)
    down, across = ((1 - (offsets[:, None] - place).abs()).clamp_min(0) for place in places.T)
    kernel: Tensor = down @ across.T
    return kernel / kernel.sum()


def jpeg(images: Tensor, quality: float, seed: int = 0) -> Tensor:
    """Compress the images by Pillow as JPEG of this quality, and read them again."""
    pillow = pillow_image()
    array = as_arrays(images)

    def one(index: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
        file = io.BytesIO()
        pillow.fromarray(array[index]).save(file, "JPEG", quality=int(quality))
        return np.asarray(pillow.open(file, formats=("JPEG",)))

    return as_batch(in_threads(one, range(len(images))))


def overexposed(images: Tensor, stops: float, seed: int = 0) -> Tensor:
    """Light times 2 to the power of `stops`. Values above white become white."""
    return _pixels(images * 2 ** (stops / GAMMA))


def underexposed(images: Tensor, stops: float, seed: int = 0) -> Tensor:
    """Light divided by 2 to the power of `stops`."""
    return overexposed(images, -stops)


def dead_rows(images: Tensor, share: float, seed: int = 0) -> Tensor:
    """A share of the rows is black. Each image has random rows of its own."""
    rows = images.shape[2]
    places = torch.rand(len(images), rows, generator=torch.Generator().manual_seed(seed)).argsort(1)
    dead = places < round(share * rows)
    return images.masked_fill(dead[:, None, :, None], 0)


def occlusion(images: Tensor, share: float, seed: int = 0) -> Tensor:
    """A black square that covers this share of the image. Each image has a random place of its own."""
    generator = torch.Generator().manual_seed(seed)
    height, width = images.shape[2:]
    side = round((share * height * width) ** 0.5)
    covered = []
    for length in (height, width):
        first = torch.randint(0, length - side + 1, (len(images), 1), generator=generator)
        place = torch.arange(length)
        covered.append((place >= first) & (place < first + side))
    return images.masked_fill((covered[0][:, :, None] & covered[1][:, None, :])[:, None], 0)


def channels_swapped(images: Tensor, strength: float = 0, seed: int = 0) -> Tensor:
    """Red and blue exchanged."""
    return images.flip(1)


def inverted(images: Tensor, strength: float = 0, seed: int = 0) -> Tensor:
    """255 less every value: a negative."""
    return 255 - images


def resized_by_nearest(images: Tensor, side: float, seed: int = 0) -> Tensor:
    """Reduce the images to `side` pixels and enlarge them again, by the nearest pixel."""
    return through(images, int(side), "nearest")


def _pixels(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


FAULTS: Mapping[str, Fault] = {
    "sensor_noise": Fault("sensor noise, sigma {:g}", sensor_noise, (10, 20, 40)),
    "blur": Fault("blur, sigma {:g} pixels", blur, (1, 2, 4)),
    "motion_blur": Fault("motion blur, {:g} pixels", motion_blur, (5, 9, 17)),
    "jpeg": Fault("JPEG, quality {:g}", jpeg, (30, 15, 7)),
    "overexposed": Fault("overexposed, stops: {:g}", overexposed, (1, 2, 3)),
    "underexposed": Fault("underexposed, stops: {:g}", underexposed, (1, 2, 3)),
    "dead_rows": Fault("dead rows, {:.2%}", dead_rows, (1 / 64, 1 / 16, 1 / 4)),
    "occlusion": Fault("occlusion, {:.2%}", occlusion, (1 / 16, 1 / 8, 1 / 4)),
    "nearest": Fault("resized by nearest, through {:g} pixels", resized_by_nearest, (112, 96, 64)),
    "channels_swapped": Fault("red and blue swapped", channels_swapped),
    "inverted": Fault("inverted", inverted),
}
"""The faults that act on images."""


def normalisation_left_out(mean: Channels, std: Channels) -> tuple[Channels, Channels]:
    """The network gets pixels from 0 to 1, not normalised."""
    return (0.0,) * len(mean), (1.0,) * len(std)


def normalisation_done_twice(mean: Channels, std: Channels) -> tuple[Channels, Channels]:
    """`((x - mean) / std - mean) / std` as one normalisation."""
    again = tuple(m * (1 + s) for m, s in zip(mean, std, strict=True))
    return again, tuple(s * s for s in std)


NORMALISATIONS: Mapping[str, tuple[str, Callable[[Channels, Channels], tuple[Channels, Channels]]]] = {
    "normalisation_left_out": ("normalisation left out", normalisation_left_out),
    "normalisation_done_twice": ("normalisation done twice", normalisation_done_twice),
}
"""The faults of the normalisation: the title in tables, and the change of mean and standard deviation."""
