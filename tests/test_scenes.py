"""Photographs as in-distribution: the set with its classes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gramwatch import DataError, MissingDataError
from gramwatch.datasets import load, miniplaces
from gramwatch.datasets.scenes import CLASSES


def write_scenes(root: Path, each: int = 2, side: int = 128, split: str = "test") -> None:
    """Plain images, of which the red channel is ten times the class and the green one the number."""
    for label, name in enumerate(CLASSES):
        folder = root / "scenes" / split / name
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(each):
            image = np.full((side, side, 3), (10 * label, number, 200), np.uint8)
            Image.fromarray(image).save(folder / f"{number}.webp", lossless=True)


def test_scenes_have_labels_and_names_of_classes(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    found = load("scenes", tmp_path)
    assert found.images.dtype == torch.uint8
    assert found.images.shape == (12, 3, 128, 128)
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert torch.equal(found.images[:, 0, 0, 0], (10 * found.labels).byte())
    assert found.classes == CLASSES
    with pytest.raises(MissingDataError, match="scenes/train"):
        load("scenes", tmp_path, split="train")


def test_classes_are_chosen_and_renumbered(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    found = load("scenes", tmp_path, classes=("sea", "forest"))
    assert found.labels is not None
    assert found.classes == ("sea", "forest")
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.images[:, 0, 0, 0].tolist() == [40, 40, 10, 10]
    assert "only sea, forest" in found.description
    drawn = load("scenes", tmp_path, classes=["glacier"], count=1)
    assert drawn.images[:, 0, 0, 0].tolist() == [20]


def test_classes_of_numbers_in_memory_are_chosen_too() -> None:
    from gramwatch.datasets.source import Raw

    raw = Raw(torch.arange(5).reshape(5, 1, 1, 1), torch.tensor([2, 0, 1, 2, 0]))
    chosen = raw.of_classes([2, 0])
    assert isinstance(chosen.images, torch.Tensor)
    assert chosen.images.flatten().tolist() == [0, 3, 1, 4]
    assert chosen.labels is not None
    assert chosen.labels.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("classes", [("tundra",), (), ("sea", "sea")])
def test_classes_that_cannot_be_chosen_are_named(classes: tuple[str, ...], tmp_path: Path) -> None:
    write_scenes(tmp_path)
    with pytest.raises(DataError, match=r"choose, each once, from buildings, forest, glacier"):
        load("scenes", tmp_path, classes=classes)


def test_sets_without_names_of_classes_say_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no names of classes"):
        load("cifar10", tmp_path, classes=("cat",))
    with pytest.raises(DataError, match="made up"):
        load("gaussian", tmp_path, classes=("cat",))


def test_folders_that_are_not_the_classes_are_refused(tmp_path: Path) -> None:
    write_scenes(tmp_path)
    (tmp_path / "scenes" / "test" / "sea").rename(tmp_path / "scenes" / "test" / "ocean")
    with pytest.raises(DataError, match=r"mountain, ocean, street, not buildings"):
        load("scenes", tmp_path)


# --- MiniPlaces without scenes -------------------------------------------------------------------------


def test_the_list_of_removed_images_names_each_once() -> None:
    names = miniplaces.SCENES.read_text(encoding="utf-8").split()
    assert len(names) == len(set(names)) == 1298
    numbers = [int(name.removesuffix(".jpg")) for name in names]
    assert numbers == sorted(numbers)
    assert 1 <= numbers[0] <= numbers[-1] <= miniplaces.LOOKED_AT


def test_images_that_show_scenes_or_were_not_looked_at_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "miniplaces" / "val"
    folder.mkdir(parents=True)
    # The first shows a church, the third a person; the last was not looked at.
    for number, value in ((1, 10), (3, 30), (3001, 60)):
        Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(folder / f"{number:08d}.jpg", quality=100)
    found = load("miniplaces_without_scenes", tmp_path)
    assert found.images[:, 0, 0, 0].tolist() == [30]
    (folder / "church.jpg").write_bytes((folder / "00000001.jpg").read_bytes())
    with pytest.raises(DataError, match=r"church\.jpg is not an image of MiniPlaces"):
        load("miniplaces_without_scenes", tmp_path, seed=1)


def test_the_real_images_are_1702(shared_data: Path) -> None:
    import tarfile

    removed = set(miniplaces.SCENES.read_text(encoding="utf-8").split())
    with tarfile.open(shared_data / "miniplaces_val" / "images.tar") as tar:
        names = {Path(name).name for name in tar.getnames() if name.endswith(".jpg")}
    assert removed <= names
    assert len(names - removed) == 1702
