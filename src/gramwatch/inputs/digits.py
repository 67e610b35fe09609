"""The 8 x 8 handwritten digits and the two photographs that come with scikit-learn. No network needed."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Digits(NamedTuple):
    """Digits of the known classes in three disjoint parts, and digits of the classes held out."""

    train: Tensor
    train_labels: Tensor
    validation: Tensor
    test: Tensor
    test_labels: Tensor
    held_out: Tensor


def digits(held_out: tuple[int, ...] = (8, 9), seed: int = 0) -> Digits:
    """scikit-learn's digits as `(N, 1, 8, 8)`, pixels in [0, 1].

    Half of the known digits are for training, a quarter for validation, a quarter for test.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.from_numpy(loaded.images.astype(np.float32) / 16)[:, None]
    labels = torch.from_numpy(loaded.target.astype(np.int64))
    outside = torch.isin(labels, torch.tensor(held_out))
    known = sorted(set(labels.tolist()) - set(held_out))
    renumbered = torch.full((10,), -1)
    renumbered[known] = torch.arange(len(known))
    inside = (~outside).nonzero().flatten()
    inside = inside[torch.randperm(len(inside), generator=torch.Generator().manual_seed(seed))]
    train, validation, test = inside.tensor_split([len(inside) // 2, 3 * len(inside) // 4])
    return Digits(
        images[train],
        renumbered[labels[train]],
        images[validation],
        images[test],
        renumbered[labels[test]],
        images[outside],
    )


def photograph_patches(count: int, size: int = 8, crop: int = 48, seed: int = 0) -> Tensor:
    """Random square crops of scikit-learn's two photographs, made grey and averaged to `size` x `size`."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(seed)
    photographs = [image.mean(2) / 255 for image in load_sample_images().images]
    patches = np.empty((count, 1, size, size), np.float32)
    step = crop // size
    for i in range(count):
        photograph = photographs[i % len(photographs)]
        top = rng.integers(photograph.shape[0] - crop)
        left = rng.integers(photograph.shape[1] - crop)
        square = photograph[top : top + crop, left : left + crop]
        patches[i, 0] = square.reshape(size, step, size, step).mean((1, 3))
    return torch.from_numpy(patches)
