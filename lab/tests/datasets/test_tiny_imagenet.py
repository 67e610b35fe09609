"""Tiny ImageNet and its lists of labels."""

import pytest
import torch

from gramwatch import DataError
from gramwatch_lab import datasets
from gramwatch_lab.datasets import load
from tests.inputs.files import as_tensor, photographs, save


def test_tiny_imagenet_has_labels_where_its_lists_are(tmp_path):
    images = photographs(4, 64)
    folder = tmp_path / "tiny-imagenet-200"
    save(folder / "val" / "images", images)
    save(folder / "test" / "images", images[:2])
    for name in ("n02", "n01"):
        save(folder / "train" / name / "images", images[:1])
    assert load("tiny_imagenet", tmp_path, split="val").labels is None
    (folder / "wnids.txt").write_text("n02\nn01\n")
    lines = [f"{i:04d}.png\t{('n01', 'n02')[i % 2]}\t0\t0\t1\t1\n" for i in range(4)]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    image_set = load("tiny_imagenet", tmp_path, split="val", seed=1)  # another seed: not the set read before
    assert torch.equal(image_set.images, as_tensor(images))
    assert image_set.labels.tolist() == [0, 1, 0, 1]
    assert load("tiny_imagenet", tmp_path, split="train").labels.tolist() == [0, 1]
    assert load("tiny_imagenet", tmp_path).labels is None


def test_lists_of_tiny_imagenet_that_are_damaged_are_named(tmp_path):
    folder = tmp_path / "tiny-imagenet-200"
    save(folder / "val" / "images", photographs(1, 64))
    listed, classes = folder / "val" / "val_annotations.txt", folder / "wnids.txt"
    for line, names in ((b"0000.png\tn09\n", b"n01\n"), (b"0000.png", b"n01"), (b"\xff\xfe", b"n01")):
        listed.write_bytes(line)
        classes.write_bytes(names)
        datasets._load.cache_clear()
        with pytest.raises(DataError, match=r"val_annotations\.txt"):
            load("tiny_imagenet", tmp_path, split="val")
