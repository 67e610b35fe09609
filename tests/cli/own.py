"""A person's own network and folders of images, small enough for tests."""

from pathlib import Path

import numpy as np
from PIL import Image

PACKAGE = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2),
    )


def failing():
    raise ValueError("no such table")


def segmenter():
    return nn.Conv2d(3, 2, 1)


def number():
    return 7
"""
PREPARED = ["--size", 16, "--resize", "bilinear", "--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25"]
"""The preprocessing, as options."""
QUICK = ["--workers", 0, "--device", "cpu"]


def picture(rng: np.random.Generator, bright: bool, side: int = 24) -> Image.Image:
    low, high = (120, 255) if bright else (0, 120)
    return Image.fromarray(rng.integers(low, high, (side, side, 3), dtype=np.uint8))


def write_classes(folder: Path, count: int, seed: int) -> None:
    """Folders of bright and of dark noise, `count` images each."""
    rng = np.random.default_rng(seed)
    for name in ("bright", "dark"):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            picture(rng, name == "bright").save(folder / name / f"{i:03d}.png")
