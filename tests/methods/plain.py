"""A plain network of three classes with a linear head, and labelled images for it, as small as any can be."""

import torch
from torch import Tensor, nn


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 12), nn.ReLU(), nn.Linear(12, 3)
    )


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 3, (300,), generator=generator)
