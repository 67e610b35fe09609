"""Named sets: their images by key, whether they lie in memory or in files."""

from pathlib import Path

import numpy as np
import torch

from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.inputs.readers import Images
from gramwatch.inputs.sets import CATALOGUE, NamedSet, Raw, Source
from tests.inputs.files import photographs, save

PREPARE = Preprocessing((8, 8), 8, "bilinear", (0.5,) * 3, (0.5,) * 3)


def test_images_of_a_named_set():
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8))
    named = NamedSet(images, [f"digits/test/{i:05d}" for i in range(3)])
    (batch,) = Images(named.keys, PREPARE, opener=named.open)
    expected = (images.expand(-1, 3, -1, -1).float() / 255 - 0.5) / 0.5
    assert torch.equal(batch.inputs, expected)


def test_a_named_set_is_loaded_by_its_name():
    named = NamedSet.load("gaussian", "test")
    assert len(named.keys) == len(named.images) == 10_000
    assert named.keys[12] == "gaussian/test/00012"
    image, note = named.open(named.keys[12])
    assert np.array_equal(np.asarray(image), named.images[12].permute(1, 2, 0).numpy())
    assert note == ""


def test_files_of_a_named_set_are_opened_one_by_one(tmp_path, monkeypatch):
    """They may be of several sizes."""
    pictures = [*photographs(2, 12), *photographs(1, 20)]
    save(tmp_path / "made", pictures)

    def read(root: Path, split: str) -> Raw:
        return Raw(sorted((root / "made").iterdir()))

    monkeypatch.setenv("GRAMWATCH_DATA", str(tmp_path))
    monkeypatch.setattr(
        "gramwatch.inputs.sets.CATALOGUE", {**CATALOGUE, "made": Source("made", "", "made", read)}
    )
    named = NamedSet.load("made", "test")
    assert named.keys == ["made/test/00000", "made/test/00001", "made/test/00002"]
    for key, picture in zip(named.keys, pictures, strict=True):
        assert np.array_equal(np.asarray(named.open(key)[0]), picture)
    (batch,) = Images(named.keys, PREPARE, opener=named.open)
    assert len(batch.inputs) == 3
