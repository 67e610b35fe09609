"""A small made-up MNIST, a network that has learnt it a little, and the options of an experiment on both."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gramwatch.inputs import demo, networks
from gramwatch.inputs.demo import digits
from gramwatch_lab.paper import experiment


def write_idx(path: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def enlarged(images: Tensor) -> np.ndarray:
    large = F.interpolate(images, 28, mode="bilinear").clamp(0, 1)
    return (255 * large[:, 0]).round().byte().numpy()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits 0 to 7 in the layout of MNIST, 8 and 9 in that of KMNIST. The rest is absent."""
    root = tmp_path_factory.mktemp("data")
    result = digits()
    for part, images, labels in (
        ("train", result.train, result.train_labels),
        ("t10k", result.test, result.test_labels),
    ):
        write_idx(root / "MNIST/raw" / f"{part}-images-idx3-ubyte.gz", enlarged(images))
        write_idx(root / "MNIST/raw" / f"{part}-labels-idx1-ubyte.gz", labels.numpy())
    write_idx(root / "KMNIST/raw/t10k-images-idx3-ubyte.gz", enlarged(result.held_out))
    write_idx(root / "KMNIST/raw/t10k-labels-idx1-ubyte.gz", np.zeros(len(result.held_out)))
    return root


@pytest.fixture(scope="session")
def weights(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that has learnt those digits a little."""
    torch.manual_seed(0)
    network = networks.build("mnist_convnet")
    result = digits()
    images = F.interpolate(result.train, 28, mode="bilinear").clamp(0, 1)
    demo.train(network, images, result.train_labels, epochs=3)
    path = tmp_path_factory.mktemp("weights") / "convnet.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture
def options(data: Path, weights: Path, tmp_path: Path) -> experiment.Options:
    return experiment.Options(
        tmp_path / "out",
        network="mnist_convnet",
        weights={"convnet": weights},
        data=data,
        subset=60,
        say=lambda text: None,
    )
