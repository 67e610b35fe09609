"""Synthetic outliers, as in Hendrycks et al., "Deep Anomaly Detection with Outlier Exposure" (2019).

All are made in pixel space, before any normalising; a natural pixel lies in [0, 1]. Each function returns
float32 of shape `(count, *shape)` with `shape` = channels, height, width, and is fixed by its seed.
"""

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, int, int]


def gaussian(count: int, shape: Shape, seed: int = 0) -> Tensor:
    """Independent normal pixels of mean 0.5 and standard deviation 0.5, clipped to [0, 1]."""
    noise = np.random.default_rng(seed).normal(0.5, 0.5, (count, *shape))
    return torch.from_numpy(noise.clip(0, 1).astype(np.float32))


def rademacher(count: int, shape: Shape, seed: int = 0) -> Tensor:
    """Independent pixels of -1 or 1, equally likely: half of them darker than any natural pixel."""
    coins = np.random.default_rng(seed).integers(0, 2, (count, *shape))
    return torch.from_numpy((2 * coins - 1).astype(np.float32))


def bernoulli(count: int, shape: Shape, seed: int = 0) -> Tensor:
    """Independent pixels of 0 or 1, equally likely."""
    coins = np.random.default_rng(seed).integers(0, 2, (count, *shape))
    return torch.from_numpy(coins.astype(np.float32))


def blobs(count: int, shape: Shape, seed: int = 0, sigma: float = 1.5) -> Tensor:
    """Soft-edged shapes: pixels of 1 with probability 0.7, blurred, and all below 0.75 made 0.

    `sigma` is the blur's width in pixels, 1.5 for images of 28 or 32 pixels a side.
    """
    from scipy import ndimage

    dots = np.random.default_rng(seed).random((count, *shape)) < 0.7
    blurred = ndimage.gaussian_filter(dots.astype(np.float32), (0, 0, sigma, sigma))
    blurred[blurred < 0.75] = 0
    return torch.from_numpy(blurred)
