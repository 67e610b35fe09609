"""MNIST and its like in IDX files, whole and damaged."""

import gzip

import numpy as np
import pytest
import torch

from gramwatch import DataError
from gramwatch_lab import datasets
from gramwatch_lab.datasets import load
from tests.inputs.files import as_tensor, photographs


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


def test_idx_files_gzipped_or_not_and_damaged(tmp_path):
    images, labels = photographs(5, 28)[..., 0], np.arange(5, dtype=np.uint8)
    folder = tmp_path / "KMNIST" / "raw"
    folder.mkdir(parents=True)
    (folder / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    image_set = load("kmnist", tmp_path)
    assert torch.equal(image_set.images[:, 0], torch.from_numpy(images.copy()))
    assert image_set.labels.tolist() == [0, 1, 2, 3, 4]
    for damaged in (gzip.compress(idx(images)[:-1]), gzip.compress(idx(images))[:-20], b""):
        (folder / "t10k-images-idx3-ubyte.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz is not a whole IDX file"):
            load("kmnist", tmp_path, count=len(damaged) + 1)  # another count: not the set read before


def test_real_mnist_padded_as_cifar_networks_take_it(shared_data):
    from tests import real_data

    image_set = load("mnist", shared_data, size=32, grey=False)
    assert image_set.images.shape == (10_000, 3, 32, 32)
    expected = real_data.padded_grey(shared_data / "MNIST" / "raw" / "t10k-images-idx3-ubyte.gz", 200)
    assert torch.equal(image_set.images[:200], as_tensor(expected))
    assert image_set.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert "put on black of 32 x 32" in image_set.description
    assert "repeated to three channels" in image_set.description


def test_idx_files_that_do_not_fit_or_unpack_to_too_much_are_refused(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    images, labels = folder / "t10k-images-idx3-ubyte.gz", folder / "t10k-labels-idx1-ubyte.gz"
    good = idx(photographs(3, 28)[..., 0])
    huge = bytes([0, 0, 8, 3]) + (10**6).to_bytes(4, "big") * 3
    for content, tags, wrong, says in [
        (good, np.arange(2, dtype=np.uint8), labels, "does not hold 3 labels below 10"),
        (good, np.uint8([1, 2, 10]), labels, "does not hold 3 labels below 10"),
        (idx(photographs(3, 20)[..., 0]), np.arange(3, dtype=np.uint8), images, "not images of 28 x 28"),
        (
            huge + bytes(2**20),
            np.arange(3, dtype=np.uint8),
            images,
            "asks for 1,000,000,000,000,000,000 bytes",
        ),
    ]:
        images.write_bytes(gzip.compress(content))
        labels.write_bytes(gzip.compress(idx(tags)))
        datasets._load.cache_clear()
        with pytest.raises(DataError, match=says) as raised:
            load("mnist", tmp_path)
        assert str(wrong) in str(raised.value)
