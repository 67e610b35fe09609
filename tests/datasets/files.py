"""Images and files in publishers' layouts."""

import numpy as np
import torch
from PIL import Image

from gramwatch import datasets


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
