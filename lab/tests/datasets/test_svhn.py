"""SVHN in its layout, whole and damaged."""

import numpy as np
import pytest
import torch

from gramwatch import DataError
from gramwatch_lab import datasets
from gramwatch_lab.datasets import load
from tests.inputs.files import as_tensor, photographs


def test_svhn_has_images_last_and_calls_zero_ten(tmp_path):
    from scipy.io import savemat

    images = photographs(4, 32)
    (tmp_path / "svhn").mkdir()
    content = {"X": images.transpose(1, 2, 3, 0), "y": np.uint8([[10], [1], [9], [10]])}
    savemat(tmp_path / "svhn" / "test_32x32.mat", content)
    image_set = load("svhn", tmp_path)
    assert torch.equal(image_set.images, as_tensor(images))
    assert image_set.labels.tolist() == [0, 1, 9, 0]
    (tmp_path / "svhn" / "train_32x32.mat").write_bytes(b"not a matrix at all")
    with pytest.raises(DataError, match=r"train_32x32\.mat is not SVHN's"):
        load("svhn", tmp_path, split="train")


def test_svhn_labels_and_images_that_do_not_fit_are_refused(tmp_path):
    from scipy.io import savemat

    (tmp_path / "svhn").mkdir()
    images = photographs(3, 32).transpose(1, 2, 3, 0)
    for content, says in [
        ({"X": images, "y": np.uint8([[1], [2]])}, "3 images, and labels of shape"),
        ({"X": images, "y": np.uint8([[1], [2], [11]])}, "not from 1 to 10"),
        ({"X": images}, "'y'"),
        ({"X": images.astype(float), "y": np.uint8([[1], [2], [3]])}, "its images are double"),
        ({"X": images[:9], "y": np.uint8([[1], [2], [3]])}, "its images are uint8 of shape"),
    ]:
        savemat(tmp_path / "svhn" / "test_32x32.mat", content)
        datasets._load.cache_clear()
        with pytest.raises(DataError, match=rf"test_32x32\.mat.*{says}"):
            load("svhn", tmp_path)


def test_the_part_of_svhn_has_images_alone(tmp_path):
    (tmp_path / "svhn-subset").mkdir()
    images = photographs(3, 32)
    np.save(tmp_path / "svhn-subset" / "images.npy", images)
    image_set = load("svhn_subset", tmp_path)
    assert image_set.name == "SVHN, first 1,083 training images"
    assert image_set.labels is None
    assert torch.equal(image_set.images, torch.from_numpy(images).permute(0, 3, 1, 2))
    with pytest.raises(DataError, match="no split 'train'"):
        load("svhn_subset", tmp_path, split="train")
