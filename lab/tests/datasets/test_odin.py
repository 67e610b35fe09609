"""The sets that the authors of ODIN published, as folders."""

import pytest
import torch

from gramwatch import MissingDataError
from gramwatch_lab.datasets import CATALOGUE, load
from tests.inputs.files import as_tensor, photographs, save


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("miniplaces", "miniplaces/val"),
        ("miniplaces", "miniplaces/images/val"),
        ("dtd_10_classes", "dtd-32"),
        ("lsun_resize", "LSUN_resize/LSUN_resize"),
        ("lsun_crop", "LSUN/test"),
        ("imagenet_resize", "Imagenet_resize/Imagenet_resize"),
        ("imagenet_crop", "Imagenet/test"),
        ("isun", "iSUN/iSUN_patches"),
    ],
)
def test_folders_of_publishers(tmp_path, name, folder):
    images = photographs(3, 32)
    save(tmp_path / folder, images)
    (tmp_path / folder / "._0000.png").write_bytes(b"what some systems leave in archives")
    image_set = load(name, tmp_path, size=32)
    assert torch.equal(image_set.images, as_tensor(images))
    assert image_set.name == CATALOGUE[name].title  # nothing was done to them
    with pytest.raises(MissingDataError):
        load(name, tmp_path / "elsewhere")
