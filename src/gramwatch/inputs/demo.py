"""The parts of the quickstart: handwritten digits, small networks, their training, and six outlier sets.

All data come with scikit-learn. Training takes seconds on a CPU.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.inputs import synthetic

OUTLIERS = 500
"""The number of examples in each set of noise, blobs or photograph patches."""


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


def small_convnet(classes: int = 8) -> nn.Module:
    """Three convolutions for 8 x 8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def small_mlp(classes: int = 8) -> nn.Module:
    """One hidden layer for 8 x 8 images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, classes))


def outlier_sets(data: Digits) -> dict[str, Tensor]:
    """Six sets that the networks were not trained on, from near to far."""
    shape = (1, 8, 8)
    return {
        "digits 8 and 9, held out": data.held_out,
        "photograph patches": photograph_patches(OUTLIERS),
        "blobs": synthetic.blobs(OUTLIERS, shape, sigma=1.0),
        "Bernoulli noise": synthetic.bernoulli(OUTLIERS, shape),
        "Gaussian noise": synthetic.gaussian(OUTLIERS, shape),
        "Rademacher noise": synthetic.rademacher(OUTLIERS, shape),
    }


def train(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    epochs: int = 40,
    *,
    batch_size: int = 64,
    learning_rate: float = 3e-3,
    weight_decay: float = 1e-4,
    cosine: bool = True,
    seed: int = 0,
    progress: bool = False,
) -> None:
    """Train with cross-entropy and Adam. The learning rate falls to zero along a cosine, or is constant."""
    from tqdm.auto import tqdm

    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    network.train()
    for _ in tqdm(range(epochs), desc="training", unit="epoch", disable=None if progress else True):
        for batch in torch.randperm(len(images), generator=generator).split(batch_size):
            optimiser.zero_grad()
            F.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimiser.step()
        if cosine:
            schedule.step()
    network.eval()
