"""Sets by name: labels, absent data, what cannot be asked for, the catalogue."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from gramwatch import DataError, MissingDataError
from gramwatch.inputs.sets import Raw
from gramwatch_lab import datasets
from gramwatch_lab.datasets import CATALOGUE, load
from tests.inputs.files import photographs, save


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    save(folder, photographs(6, 64))
    return str(folder)


def test_labels_go_with_their_images(tmp_path):
    (tmp_path / "cifar100-subset").mkdir()
    images = np.repeat(np.arange(50, dtype=np.uint8), 32 * 32 * 3).reshape(50, 32, 32, 3)
    np.save(tmp_path / "cifar100-subset" / "images.npy", images)
    np.save(tmp_path / "cifar100-subset" / "labels.npy", np.arange(50))
    image_set = load("cifar100_subset", tmp_path, count=20)
    assert image_set.labels.tolist() == image_set.images[:, 0, 0, 0].tolist()
    assert len(set(image_set.labels.tolist())) == 20
    small = load("cifar100_subset", tmp_path, count=20, size=28, grey=True)
    assert torch.equal(small.labels, image_set.labels)
    assert small.images[:, 0, 5, 5].tolist() == image_set.labels.tolist()


def test_an_absent_set_names_the_file_the_place_and_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAMWATCH_DATA", str(tmp_path))
    assert datasets.default_root() == tmp_path
    with pytest.raises(MissingDataError) as raised:
        load("svhn")
    for part in (
        str(tmp_path / "svhn" / "test_32x32.mat"),
        "gramwatch data get svhn",
        str(tmp_path / "svhn"),
    ):
        assert part in str(raised.value)
    with pytest.raises(MissingDataError, match="not published anywhere"):
        load("cifar100_subset")
    monkeypatch.delenv("GRAMWATCH_DATA")
    assert datasets.default_root() == Path.home() / ".cache" / "gramwatch" / "data"


def test_what_cannot_be_asked_for(tmp_path):
    with pytest.raises(DataError, match=r"no set and no folder 'cifar11'\. The sets are cifar10, "):
        load("cifar11", tmp_path)
    with pytest.raises(DataError, match="'mnist' has no split 'val': choose from train, test"):
        load("mnist", tmp_path, split="val")
    with pytest.raises(DataError, match="count=0"):
        load("gaussian", count=0)


def test_sets_are_kept_in_memory(pictures):
    first = load(pictures, reduce="nearest")
    assert load(pictures, reduce="nearest") is first
    shutil.rmtree(pictures)
    assert load(pictures, reduce="nearest") is first


def test_every_checksum_has_a_source_and_every_set_a_line_in_the_docs():
    page = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text(encoding="utf-8")
    for name, source in CATALOGUE.items():
        assert f"`{name}`" in page
        for download in source.downloads:
            assert download.url.startswith("http")
            for checksum, length in ((download.md5, 16), (download.sha256, 32)):
                assert checksum is None or len(bytes.fromhex(checksum)) == length
            if download.has_checksum:
                assert download.url.startswith("https:")
                assert download.cited.partition(",")[0] in page
            else:
                assert name == "miniplaces"


def test_classes_of_numbers_in_memory_are_chosen_too():
    raw = Raw(torch.arange(5).reshape(5, 1, 1, 1), torch.tensor([2, 0, 1, 2, 0]))
    chosen = datasets.of_classes(raw, [2, 0])
    assert isinstance(chosen.images, torch.Tensor)
    assert chosen.images.flatten().tolist() == [0, 3, 1, 4]
    assert chosen.labels is not None
    assert chosen.labels.tolist() == [0, 0, 1, 1]
