"""CIFAR-10 and CIFAR-100 in their publisher's python and binary layouts, and a subset of CIFAR-100.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gramwatch.errors import DataError
from gramwatch.inputs.sets import Raw, Source, missing
from gramwatch_lab.datasets.arrays import array, image_array
from gramwatch_lab.datasets.download import Download
from gramwatch_lab.datasets.folder import first_present
from gramwatch_lab.datasets.pickles import read_pickle

BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
LARGEST = 2**29
"""The largest file that is read, in bytes. The largest batch of CIFAR has 155 million bytes."""


def _python(folder: Path, files: list[str], label_key: bytes, classes: int) -> Raw:
    batches = [_python_batch(folder / name, label_key, classes) for name in files]
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return Raw(images, labels)


def _python_batch(path: Path, label_key: bytes, classes: int) -> tuple[Tensor, Tensor]:
    """The images and labels of one file of the python layout, which is a pickle. None of its code is run."""
    content = _content(path)
    try:
        batch = read_pickle(content)
        images, labels = batch[b"data"], batch[label_key]
        if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (3072,):
            raise ValueError("its images are not rows of 3072 bytes")
        if not isinstance(labels, np.ndarray):
            labels = np.array([_whole(label) for label in labels], np.int64)
        if labels.shape != images.shape[:1]:
            raise ValueError(f"there are {len(images)} images and {labels.size} labels")
        if labels.size and not 0 <= labels.min() <= labels.max() < classes:
            raise ValueError(f"its labels are not below {classes}")
    except KeyError as error:
        raise DataError(f"{path} is not a batch of CIFAR images: it has no {error}") from None
    except Exception as error:  # a damaged file can raise nearly anything
        raise DataError(
            f"{path} is not a batch of CIFAR images in the python layout: {error!s:.200}"
        ) from None
    whole = labels.astype(np.int64)
    return torch.from_numpy(images.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(whole)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError("a label is not a whole number")
    return value


def _content(path: Path) -> bytes:
    if not path.is_file():
        raise missing(path)
    if path.stat().st_size > LARGEST:
        raise DataError(f"{path} has {path.stat().st_size:,} bytes: no batch of CIFAR images has so many")
    return path.read_bytes()


def _binary(folder: Path, files: list[str], label_bytes: int, classes: int) -> Raw:
    """The binary layout. An image is its labels, one byte each, the finest last; then R, G and B planes."""
    parts = []
    for name in files:
        path = folder / f"{name}.bin"
        content = np.frombuffer(_content(path), np.uint8)
        if not content.size or content.size % (label_bytes + 3072):
            raise DataError(f"{path} is cut short or not in the binary layout: {content.size} bytes")
        parts.append(content.reshape(-1, label_bytes + 3072))
        if parts[-1][:, label_bytes - 1].max() >= classes:
            raise DataError(f"{path} is damaged or not in the binary layout: a label is not below {classes}")
    rows = torch.from_numpy(np.concatenate(parts))
    images = rows[:, label_bytes:].reshape(-1, 3, 32, 32)
    return Raw(images, rows[:, label_bytes - 1].long())


def _cifar10(root: Path, split: str) -> Raw:
    folder = first_present([root / "cifar-10-batches-bin", root / "cifar-10-batches-py"])
    if folder.name.endswith("-bin"):
        return _binary(folder, BATCHES[split], 1, 10)
    return _python(folder, BATCHES[split], b"labels", 10)


def _cifar100(root: Path, split: str) -> Raw:
    folder = first_present([root / "cifar-100-binary", root / "cifar-100-python"])
    if folder.name.endswith("-binary"):
        return _binary(folder, [split], 2, 100)
    return _python(folder, [split], b"fine_labels", 100)


def _subset(root: Path, split: str) -> Raw:
    folder = root / "cifar100-subset"
    images, labels = image_array(folder / "images.npy"), array(folder / "labels.npy")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise DataError(
            f"{folder / 'labels.npy'} holds {labels.dtype} of shape {labels.shape}: "
            f"{len(images)} labels are needed"
        )
    return Raw(images, torch.from_numpy(labels.astype(np.int64)))


PARTS = {"train": (0, 40), "val": (40, 50), "test": (50, 60)}
"""Which images of each class a part has, of the 60 in a random order."""


def _part(root: Path, split: str) -> Raw:
    """One of three disjoint parts of the subset, each with equally many images of every class."""
    whole = _subset(root, split)
    assert isinstance(whole.images, Tensor)
    assert whole.labels is not None
    # The file may be sorted by the official split: a fixed random order mixes both into every part.
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    by_class = [order[whole.labels[order] == label] for label in whole.labels.unique()]
    first, end = PARTS[split]
    chosen = torch.cat([images[first:end] for images in by_class])
    return Raw(whole.images[chosen], whole.labels[chosen])


_HOME = "https://www.cs.toronto.edu/~kriz/"

CIFAR10 = Source(
    "CIFAR-10",
    "60,000 colour photographs of 32 x 32 pixels in 10 classes (Krizhevsky, 2009)",
    "cifar-10-batches-*",
    _cifar10,
    downloads=(
        Download(
            f"{_HOME}cifar-10-python.tar.gz",
            None,
            "Keras, datasets/cifar10.py",
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            size=170_498_071,
        ),
    ),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
)
CIFAR100 = Source(
    "CIFAR-100",
    "60,000 colour photographs of 32 x 32 pixels in 100 classes (Krizhevsky, 2009); fine labels",
    "cifar-100-*",
    _cifar100,
    downloads=(
        Download(
            f"{_HOME}cifar-100-python.tar.gz",
            None,
            "Keras, datasets/cifar100.py",
            sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            size=169_001_437,
        ),
    ),
)
CIFAR100_SUBSET = Source(
    "CIFAR-100 subset",
    "6,000 images of CIFAR-100, 60 of each fine class, the official split of each unknown: images.npy "
    "(6000 x 32 x 32 x 3, uint8) and labels.npy; not published anywhere in this form",
    "cifar100-subset/images.npy",
    _subset,
    ("test",),
)
CIFAR100_PARTS = Source(
    "CIFAR-100, 60 images a class",
    "the images of cifar100_subset in three disjoint parts, of each class 40 to train (detectors), 10 "
    "to validate and 10 to test; mostly of the official training split",
    "cifar100-subset/images.npy",
    _part,
    ("train", "val", "test"),
)
