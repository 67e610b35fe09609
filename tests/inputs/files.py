"""Images and files in publishers' layouts."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from gramwatch_lab import datasets
from gramwatch_lab.datasets.scenes import CLASSES


def photographs(count, size, seed=0):
    """Random colour images N x H x W x 3."""
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def save(folder, images, end="png", **settings):
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:04d}.{end}", **settings)


def planes(images):
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def as_tensor(images):
    return torch.from_numpy(images.copy()).permute(0, 3, 1, 2)


def batch(tmp_path, content):
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    datasets._load.cache_clear()
    return path


def smooth(count: int = 4, side: int = 64, seed: int = 0) -> torch.Tensor:
    """Images with soft shapes, like photographs: values from 60 to 190."""
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return (60 + 130 * nn.functional.interpolate(coarse, side, mode="bilinear")).round().byte()


def write_scenes(root: Path, count: int = 2, side: int = 128, split: str = "test") -> None:
    """Plain images. Red is ten times the label, green is the number of the image in its class."""
    for label, name in enumerate(CLASSES):
        folder = root / "scenes" / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            image = np.full((side, side, 3), (10 * label, number, 200), np.uint8)
            Image.fromarray(image).save(folder / f"{number}.webp", lossless=True)
