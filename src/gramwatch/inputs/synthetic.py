"""Synthetic outliers, as in Hendrycks et al., "Deep Anomaly Detection with Outlier Exposure" (2019), App. A.

The functions return float32 of shape `(count, *shape)`, where `shape` is channels, height, width. The seed
determines the values. The authors generate the values in the space of the network's input. For networks that
take pixels in [0, 1] (SVHN), the values are pixels: Gaussian, Bernoulli, blobs. For networks that take
normalised pixels (CIFAR), they are normalised values in [-1, 1]: Gaussian, Rademacher, blobs.

As sets of images, normalised values are stored as pixels: `mean + std * value`, with the mean and the
standard deviation of the authors' CIFAR networks. A network with that normalisation (WRN-40-2) gets the same
values up to rounding. Other networks get nearly the same values.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, int, int]

OUTLIER_EXPOSURE = (125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)
"""Mean and standard deviation of the authors' CIFAR networks."""


def gaussian(count: int, shape: Shape, seed: int = 0) -> Tensor:
    """Independent normal pixels of mean 0.5 and standard deviation 0.5, clipped to [0, 1]."""
    noise = np.random.default_rng(seed).normal(0.5, 0.5, (count, *shape))
    return torch.from_numpy(noise.clip(0, 1).astype(np.float32))


def gaussian_normalised(count: int, shape: Shape, seed: int = 0) -> Tensor:
    """Independent normal values, mean 0, standard deviation 0.5, clipped to [-1, 1], in normalised space."""
    noise = np.random.default_rng(seed).normal(0, 0.5, (count, *shape))
    return torch.from_numpy(noise.clip(-1, 1).astype(np.float32))


def rademacher(count: int, shape: Shape, seed: int = 0) -> Tensor:
    """Independent values of -1 or 1, equally likely, in normalised space.

    To a network that takes pixels in [0, 1], half of them are darker than any natural pixel.
    """
    coins = np.random.default_rng(seed).integers(0, 2, (count, *shape))
    return torch.from_numpy((2 * coins - 1).astype(np.float32))


def bernoulli(count: int, shape: Shape, seed: int = 0) -> Tensor:
    """Independent pixels of 0 or 1, equally likely."""
    coins = np.random.default_rng(seed).integers(0, 2, (count, *shape))
    return torch.from_numpy(coins.astype(np.float32))


def blobs(count: int, shape: Shape, seed: int = 0, sigma: float = 1.5) -> Tensor:
    """Soft-edged shapes: pixels of 1 with probability 0.7, blurred, and all below 0.75 made 0.

    `sigma` is the blur's width in pixels, 1.5 for images of 28 or 32 pixels a side. As by its authors, the
    blur goes across channels too: shapes are white with coloured edges. Borders are reflected.
    """
    from scipy import ndimage

    dots = np.random.default_rng(seed).random((count, *shape)) < 0.7
    across = sigma if shape[0] > 1 else 0
    blurred = ndimage.gaussian_filter(dots.astype(np.float32), (0, across, sigma, sigma))
    blurred[blurred < 0.75] = 0
    return torch.from_numpy(blurred)


def blobs_normalised(count: int, shape: Shape, seed: int = 0) -> Tensor:
    """The blobs times 2, minus 1, in normalised space."""
    return 2 * blobs(count, shape, seed) - 1


def as_pixels(values: Tensor) -> Tensor:
    """Values of normalised space as pixels. Grey images use the average of the three channels."""
    mean, std = (torch.tensor(channels)[:, None, None] for channels in OUTLIER_EXPOSURE)
    if values.shape[1] == 1:
        mean, std = mean.mean(0, keepdim=True), std.mean(0, keepdim=True)
    return mean + std * values


MAKERS: dict[str, tuple[str, str, Callable[[int, Shape, int], Tensor]]] = {
    "gaussian": (
        "Gaussian noise",
        "normal, mean 0.5, deviation 0.5, clipped to [0, 1]; pixel space",
        gaussian,
    ),
    "gaussian_normalised": (
        "Gaussian noise (normalised)",
        "normal, mean 0, deviation 0.5, clipped to [-1, 1]; normalised space, as pixels mean + std * value",
        lambda *how: as_pixels(gaussian_normalised(*how)),
    ),
    "rademacher": (
        "Rademacher noise",
        "-1 or 1, equally likely; normalised space, as pixels mean + std * value",
        lambda *how: as_pixels(rademacher(*how)),
    ),
    "bernoulli": ("Bernoulli noise", "0 or 1, equally likely; pixel space", bernoulli),
    "blobs": ("blobs", "1 with probability 0.7, blurred by 1.5, all below 0.75 made 0; pixel space", blobs),
    "blobs_normalised": (
        "blobs (normalised)",
        "blobs, times 2 less 1; normalised space, as pixels mean + std * value",
        lambda *how: as_pixels(blobs_normalised(*how)),
    ),
}
"""The synthetic sets by name: the title, what the images are, and the function that makes them."""


def outliers(name: str, count: int = 10_000, size: int = 32, channels: int = 3, seed: int = 0) -> Tensor:
    """The images of a synthetic set, uint8."""
    values = MAKERS[name][2](count, (channels, size, size), seed)
    return (values * 255).round().to(torch.uint8)
