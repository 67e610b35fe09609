"""MiniPlaces without the images that show scenes."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gramwatch import DataError
from gramwatch_lab.datasets import load, miniplaces


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
    image_set = load("miniplaces_without_scenes", tmp_path)
    assert image_set.images[:, 0, 0, 0].tolist() == [30]
    (folder / "church.jpg").write_bytes((folder / "00000001.jpg").read_bytes())
    with pytest.raises(DataError, match=r"church\.jpg is not an image of MiniPlaces"):
        load("miniplaces_without_scenes", tmp_path, seed=1)


def test_the_real_images_are_1702(shared_data: Path) -> None:
    removed = set(miniplaces.SCENES.read_text(encoding="utf-8").split())
    with tarfile.open(shared_data / "miniplaces_val" / "images.tar") as tar:
        names = {Path(name).name for name in tar.getnames() if name.endswith(".jpg")}
    assert removed <= names
    assert len(names - removed) == 1702
