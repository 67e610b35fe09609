"""Photographs of scenes, with their classes."""

from pathlib import Path

import pytest
import torch

from gramwatch import DataError, MissingDataError
from gramwatch_lab.datasets import load
from gramwatch_lab.datasets.scenes import CLASSES
from tests.inputs.files import write_scenes


def test_scenes_have_labels_and_names_of_classes(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    image_set = load("scenes", tmp_path)
    assert image_set.images.dtype == torch.uint8
    assert image_set.images.shape == (12, 3, 128, 128)
    assert image_set.labels is not None
    assert image_set.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert torch.equal(image_set.images[:, 0, 0, 0], (10 * image_set.labels).byte())
    assert image_set.classes == CLASSES
    with pytest.raises(MissingDataError, match="scenes/train"):
        load("scenes", tmp_path, split="train")


def test_classes_are_chosen_and_renumbered(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    image_set = load("scenes", tmp_path, classes=("sea", "forest"))
    assert image_set.labels is not None
    assert image_set.classes == ("sea", "forest")
    assert image_set.labels.tolist() == [0, 0, 1, 1]
    assert image_set.images[:, 0, 0, 0].tolist() == [40, 40, 10, 10]
    assert "only sea, forest" in image_set.description
    drawn = load("scenes", tmp_path, classes=["glacier"], count=1)
    assert drawn.images[:, 0, 0, 0].tolist() == [20]


@pytest.mark.parametrize("classes", [("tundra",), (), ("sea", "sea")])
def test_classes_that_cannot_be_chosen_are_named(classes: tuple[str, ...], tmp_path: Path) -> None:
    write_scenes(tmp_path)
    with pytest.raises(DataError, match=r"choose, each once, from buildings, forest, glacier"):
        load("scenes", tmp_path, classes=classes)


def test_sets_without_names_of_classes_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no names of classes"):
        load("cifar100", tmp_path, classes=("cat",))
    with pytest.raises(DataError, match="made up"):
        load("gaussian", tmp_path, classes=("cat",))


def test_folders_that_are_not_the_classes_are_refused(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    (tmp_path / "scenes" / "test" / "sea").rename(tmp_path / "scenes" / "test" / "ocean")
    with pytest.raises(DataError, match=r"mountain, ocean, street, not buildings"):
        load("scenes", tmp_path)
