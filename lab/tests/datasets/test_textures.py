"""Textures, and folders with classes."""

import pytest
import torch

from gramwatch import DataError
from gramwatch_lab.datasets import load
from tests.inputs.files import photographs, save


def test_dtd_and_folders_have_classes_and_need_a_size(tmp_path):
    for number, name in enumerate(("zigzagged", "banded")):
        save(tmp_path / "dtd" / "images" / name, photographs(2, 40 + 10 * number, seed=number), "jpg")
    with pytest.raises(DataError, match=r"several sizes, from \(40, 40, 3\) to \(50, 50, 3\): give a size"):
        load("dtd", tmp_path)
    image_set = load("dtd", tmp_path, size=32)
    assert image_set.name == "DTD, anti-aliased"
    assert image_set.labels.tolist() == [0, 0, 1, 1]
    same = load(str(tmp_path / "dtd" / "images"), size=32)
    assert same.name == "images, anti-aliased"
    assert torch.equal(same.images, image_set.images)
    (tmp_path / "dtd" / "images" / "banded" / "0000.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0000\.jpg is not a readable image"):
        load("dtd", tmp_path, size=31)
