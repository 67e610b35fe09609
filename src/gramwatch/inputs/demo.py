"""The parts of the quickstart: small networks, their training on handwritten digits, and six outlier sets.

All data come with scikit-learn. Training takes seconds on a CPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.inputs import synthetic
from gramwatch.inputs.digits import Digits, digits, photograph_patches

__all__ = ["Digits", "digits", "outlier_sets", "photograph_patches", "small_convnet", "small_mlp", "train"]

OUTLIERS = 500
"""The number of examples in each set of noise, blobs or photograph patches."""


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
