"""CIFAR in its layouts, whole and damaged."""

import io
import pickle

import numpy as np
import pytest
import torch

from gramwatch import DataError
from gramwatch_lab import datasets
from gramwatch_lab.datasets import load
from tests.inputs.files import as_tensor, batch, photographs, planes


def cifar_batch(path, images, labels, key=b"labels"):
    """A batch as Python 2 and its numpy wrote it."""
    content = pickle.dumps({b"data": planes(images), key: list(labels)}, protocol=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def test_cifar10_is_the_same_in_both_layouts(tmp_path):
    images, labels = photographs(12, 32), np.arange(12) % 10
    for i in range(5):
        part = slice(2 * i, 2 * i + 2)
        cifar_batch(
            tmp_path / f"py/cifar-10-batches-py/data_batch_{i + 1}", images[part], labels[part].tolist()
        )
        folder = tmp_path / "bin" / "cifar-10-batches-bin"
        folder.mkdir(parents=True, exist_ok=True)
        rows = np.concatenate([labels[part, None].astype(np.uint8), planes(images[part])], axis=1)
        (folder / f"data_batch_{i + 1}.bin").write_bytes(rows.tobytes())
    for layout in ("py", "bin"):
        image_set = load("cifar10", tmp_path / layout, split="train")
        assert image_set.name == "CIFAR-10"
        assert torch.equal(image_set.images, as_tensor(images[:10]))
        assert image_set.labels.tolist() == labels[:10].tolist()


def test_cifar100_has_its_fine_labels_in_both_layouts(tmp_path):
    images, fine = photographs(3, 32), [7, 99, 0]
    cifar_batch(tmp_path / "py/cifar-100-python/test", images, fine, b"fine_labels")
    (tmp_path / "bin/cifar-100-binary").mkdir(parents=True)
    rows = np.concatenate([np.full((3, 1), 5, np.uint8), np.uint8(fine)[:, None], planes(images)], axis=1)
    (tmp_path / "bin/cifar-100-binary/test.bin").write_bytes(rows.tobytes())
    for layout in ("py", "bin"):
        image_set = load("cifar100", tmp_path / layout)
        assert torch.equal(image_set.images, as_tensor(images))
        assert image_set.labels.tolist() == fine


def test_a_batch_far_too_large_is_not_read(tmp_path):
    with batch(tmp_path, b"").open("wb") as file:
        file.truncate(6 * 2**30)
    with pytest.raises(DataError, match="6,442,450,944 bytes: no batch of CIFAR"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({b"data": planes(photographs(3, 32))}, "it has no b'labels'"),
        ({b"data": planes(photographs(3, 32)), b"labels": [1, 2]}, "3 images and 2 labels"),
        ({b"data": planes(photographs(3, 32)), b"labels": [1, 2, 10]}, "labels are not below 10"),
        ({b"data": planes(photographs(3, 32)), b"labels": [1, 2, -1]}, "labels are not below 10"),
        ({b"data": planes(photographs(3, 32)), b"labels": [1, 2, 0.5]}, "not a whole number"),
        ({b"data": np.zeros((3, 9), np.uint8), b"labels": [1, 2, 3]}, "not rows of 3072 bytes"),
        ({b"data": np.zeros((3, 3072), np.int64), b"labels": [1, 2, 3]}, "not rows of 3072 bytes"),
        ({b"data": np.zeros((3, 3072)), b"labels": [1, 2, 3]}, "not of plain whole numbers"),
    ],
)
def test_labels_and_images_that_do_not_fit_are_refused(content, says, tmp_path):
    path = batch(tmp_path, pickle.dumps(content, protocol=2))
    with pytest.raises(DataError, match=says) as raised:
        load("cifar10", tmp_path)
    assert str(path) in str(raised.value)


def test_a_file_cut_short_is_named(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(bytes(3073 + 100))
    with pytest.raises(DataError, match=r"test_batch\.bin is cut short.*3173 bytes"):
        load("cifar10", tmp_path)


def test_a_label_of_the_binary_layout_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(b"\x0b" + bytes(3072))
    with pytest.raises(DataError, match=r"test_batch\.bin is damaged.*a label is not below 10"):
        load("cifar10", tmp_path)


def test_numpy_files_that_are_cut_short_or_hold_something_else_are_refused(tmp_path):
    folder = tmp_path / "cifar100-subset"
    folder.mkdir()
    images, labels = np.zeros((3, 32, 32, 3), np.uint8), np.arange(3)

    def written(array):
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    good = written(images)
    huge = good.replace(b"(3, 32, 32, 3), }", b"(999999999, 3), }")
    assert huge != good
    for content, tags, wrong in [
        (good[:-1], written(labels), "images"),
        (good[:50], written(labels), "images"),
        (b"", written(labels), "images"),
        (huge, written(labels), "images"),
        (written(images.astype(np.float32)), written(labels), "images"),
        (written(images[:, :20]), written(labels), "images"),
        (good, written(labels[:2]), "labels"),
        (good, written(labels / 2), "labels"),
        (good, written(np.array([{}, [], 3], object)), "labels"),
        (good, pickle.dumps([1, 2, 3]), "labels"),
    ]:
        (folder / "images.npy").write_bytes(content)
        (folder / "labels.npy").write_bytes(tags)
        datasets._load.cache_clear()
        with pytest.raises(DataError) as raised:
            load("cifar100_subset", tmp_path)
        assert str(folder / f"{wrong}.npy") in str(raised.value)


def test_parts_of_cifar100_are_disjoint_and_have_every_class(tmp_path):
    """Each image holds its own number, and the labels are in no order."""
    (tmp_path / "cifar100-subset").mkdir()
    numbers = np.arange(120)
    images = np.broadcast_to(numbers.astype(np.uint8)[:, None, None, None], (120, 32, 32, 3))
    labels = np.random.default_rng(0).permutation(numbers % 2)
    np.save(tmp_path / "cifar100-subset" / "images.npy", images)
    np.save(tmp_path / "cifar100-subset" / "labels.npy", labels)
    parts = {split: load("cifar100_parts", tmp_path, split=split) for split in ("train", "val", "test")}
    for split, of_each_class in (("train", 40), ("val", 10), ("test", 10)):
        image_set = parts[split]
        assert image_set.labels.bincount().tolist() == [of_each_class, of_each_class]
        assert image_set.labels.tolist() == labels[image_set.images[:, 0, 0, 0].numpy()].tolist()
    pixels = torch.cat([image_set.images[:, 0, 0, 0] for image_set in parts.values()])
    assert sorted(pixels.tolist()) == numbers.tolist()
    # Not the last of the file, which might be of the official test split.
    assert sorted(parts["test"].images[:, 0, 0, 0].tolist()) != sorted(
        n for c in (0, 1) for n in numbers[labels == c][50:].tolist()
    )
