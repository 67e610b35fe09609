"""CIFAR-10 and CIFAR-100 in their publisher's python and binary layouts, and a subset of CIFAR-100.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009).
"""

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gramwatch.datasets.source import Download, Raw, Source, first_present, missing
from gramwatch.errors import DataError

BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}

# All that the python layout needs: how numpy writes an array, and how Python 2 wrote bytes.
_RECONSTRUCT = np.zeros(1).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _ArraysOnly(pickle.Unpickler):
    """Reads a pickle of dictionaries, lists, bytes and arrays, and refuses everything else.

    The python layout of CIFAR is a pickle, and a pickle may name any function to call. This one finds the few
    harmless names above; with any other the file is refused before anything of it is run.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def _unpickled(path: Path) -> dict[bytes, Any]:
    if not path.is_file():
        raise missing(path)
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        if not isinstance(content, dict) or b"data" not in content:
            raise ValueError("no images in it")
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise DataError(f"{path} is not a batch of CIFAR images in the python layout: {error}") from None
    return content


def _python(folder: Path, files: list[str], label_key: bytes) -> Raw:
    batches = [_unpickled(folder / name) for name in files]
    images = np.concatenate([np.asarray(batch[b"data"], np.uint8) for batch in batches])
    labels = np.concatenate([np.asarray(batch[label_key], np.int64) for batch in batches])
    return Raw(torch.from_numpy(images.reshape(-1, 3, 32, 32)), torch.from_numpy(labels))


def _binary(folder: Path, files: list[str], label_bytes: int) -> Raw:
    """Each image: its labels, a byte each, of which the last is the finest; then R, G and B planes."""
    parts = []
    for name in files:
        path = folder / f"{name}.bin"
        if not path.is_file():
            raise missing(path)
        content = np.fromfile(path, np.uint8)
        if not content.size or content.size % (label_bytes + 3072):
            raise DataError(f"{path} is cut short or not in the binary layout: {content.size} bytes")
        parts.append(content.reshape(-1, label_bytes + 3072))
    rows = torch.from_numpy(np.concatenate(parts))
    images = rows[:, label_bytes:].reshape(-1, 3, 32, 32)
    return Raw(images, rows[:, label_bytes - 1].long())


def _cifar10(root: Path, split: str) -> Raw:
    folder = first_present([root / "cifar-10-batches-bin", root / "cifar-10-batches-py"])
    if folder.name.endswith("-bin"):
        return _binary(folder, BATCHES[split], 1)
    return _python(folder, BATCHES[split], b"labels")


def _cifar100(root: Path, split: str) -> Raw:
    folder = first_present([root / "cifar-100-binary", root / "cifar-100-python"])
    if folder.name.endswith("-binary"):
        return _binary(folder, [split], 2)
    return _python(folder, [split], b"fine_labels")


def _subset(root: Path, split: str) -> Raw:
    arrays = []
    for name in ("images.npy", "labels.npy"):
        path = root / "cifar100-subset" / name
        if not path.is_file():
            raise missing(path)
        arrays.append(torch.from_numpy(np.load(path, allow_pickle=False)))
    return Raw(arrays[0].permute(0, 3, 1, 2), arrays[1].long())


_HOME = "https://www.cs.toronto.edu/~kriz/"
_CITED = "torchvision, datasets/cifar.py"

CIFAR10 = Source(
    "CIFAR-10",
    "60,000 colour photographs of 32 x 32 pixels in 10 classes (Krizhevsky, 2009)",
    "cifar-10-batches-*",
    _cifar10,
    downloads=(Download(f"{_HOME}cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", _CITED),),
)
CIFAR100 = Source(
    "CIFAR-100",
    "60,000 colour photographs of 32 x 32 pixels in 100 classes (Krizhevsky, 2009); fine labels",
    "cifar-100-*",
    _cifar100,
    downloads=(Download(f"{_HOME}cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", _CITED),),
)
CIFAR100_SUBSET = Source(
    "CIFAR-100 subset",
    "6,000 images of CIFAR-100, 60 of each fine class, the official split of each unknown: images.npy "
    "(6000 x 32 x 32 x 3, uint8) and labels.npy; not published anywhere in this form",
    "cifar100-subset/images.npy",
    _subset,
    ("test",),
)
