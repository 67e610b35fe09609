"""From images to inputs, compared with timm and torchvision."""

import numpy as np
import pytest
import torch
from PIL import Image

from gramwatch import InputError
from gramwatch.models import resolve
from gramwatch.networks.foreign import import_torchvision
from gramwatch.preprocessing import Preprocessing

HALF = (0.5, 0.5, 0.5)
SIZES = [(300, 401), (500, 220), (64, 64), (224, 224)]


def image(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
@pytest.mark.parametrize("size", SIZES)
def test_inputs_are_those_of_timm(name, size):
    import_torchvision()
    import timm

    model = resolve(f"timm:{name}", untrained=True)
    theirs = timm.data.create_transform(
        **timm.data.resolve_model_data_config(model.network), is_training=False
    )
    given = image(*size)
    assert torch.equal(model.preprocessing(given), theirs(given))


@pytest.mark.parametrize("name", ["squeezenet1_1", "mobilenet_v3_small"])
@pytest.mark.parametrize("size", SIZES)
def test_inputs_are_those_of_torchvision(name, size):
    models = import_torchvision().models
    model = resolve(f"torchvision:{name}", untrained=True)
    given = image(*size)
    theirs = models.get_model_weights(name).DEFAULT.transforms()
    assert torch.equal(model.preprocessing(given), theirs(given))


def test_what_resizing_does_to_an_image():
    prepare = Preprocessing((8, 8), 10, "nearest", HALF, HALF)
    assert prepare.change_of(10, 10) == prepare.change_of(10, 30) == "kept"
    assert (prepare.change_of(20, 40), prepare.change_of(5, 40)) == ("reduced", "enlarged")
    squashed = Preprocessing((8, 6), None, "nearest", HALF, HALF)
    assert (squashed.change_of(6, 8), squashed(image(20, 10)).shape) == ("kept", (3, 8, 6))


def test_grey_inputs_have_one_channel():
    prepare = Preprocessing((8, 8), 8, "bicubic", (0.0,), (1.0,))
    assert prepare.grey
    assert torch.equal(prepare(Image.new("L", (8, 8), 51)), torch.full((1, 8, 8), 0.2))


def test_differences_name_both_values():
    one = Preprocessing((8, 8), 8, "bilinear", HALF, HALF)
    assert one.differences(one) == []
    assert one.differences(one.changed(resize="nearest")) == ["resize: bilinear, not nearest"]
    assert len(one.differences(one.changed(size=9, mean=(0.0, 0.0, 0.0)))) == 3


def test_what_is_written_is_read():
    one = Preprocessing((8, 6), None, "bilinear", HALF, (0.1, 0.2, 0.3))
    assert Preprocessing.from_json(one.to_json()) == one
    for wrong in ({"size": [8]}, {"resize": "magic"}, {"std": [0.0, 1.0, 1.0]}, {"mean": "no"}):
        with pytest.raises(ValueError, match=r"size|magic|std|mean"):
            Preprocessing.from_json(one.to_json() | wrong)


@pytest.mark.parametrize(
    "values",
    [
        ((0, 8), 8, "nearest", HALF, HALF),
        ((8, 8), 8, "nearest", HALF, (0.5,)),
        ((8, 8), 8, "nearest", (float("nan"),), (0.5,)),
    ],
)
def test_impossible_values_are_refused(values):
    with pytest.raises(InputError):
        Preprocessing(*values)
