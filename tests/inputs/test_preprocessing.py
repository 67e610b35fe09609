"""From images to inputs, compared with timm and torchvision."""

import numpy as np
import pytest
import torch
from PIL import Image

from gramwatch import InputError
from gramwatch.inputs import preprocessing
from gramwatch.inputs.foreign import import_torchvision
from gramwatch.inputs.models import resolve
from gramwatch.inputs.preprocessing import FILTERS, Preprocessing

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


def resized_whole(given: Image.Image, prepare: Preprocessing) -> np.ndarray:
    """As Pillow does it: the whole image is resized, then its middle is cut out."""
    height, width = prepare.size
    whole = given.resize(prepare.resized_to(*given.size), Image.Resampling[prepare.resize.upper()])
    left, top = round((whole.width - width) / 2.0), round((whole.height - height) / 2.0)
    return np.array(whole.crop((left, top, left + width, top + height)))


@pytest.mark.parametrize("resize", FILTERS)
@pytest.mark.parametrize("shorter", [48, 32, 20, None])
def test_ordinary_images_are_resized_as_pillow_does_it_to_the_bit(resize, shorter):
    prepare = Preprocessing((32, 32), shorter, resize, HALF, HALF)
    for size in [(300, 401), (640, 40), (3, 1000), (33, 17), (2000, 1), (32, 32), (7, 7)]:
        given = image(*size)
        assert np.array_equal(prepare.pixels(given).numpy(), resized_whole(given, prepare)), size


@pytest.mark.parametrize("resize", FILTERS)
@pytest.mark.parametrize(
    ("shorter", "size"), [(48, (4000, 3)), (24, (33, 900)), (32, (1, 333)), (None, (90, 2))]
)
def test_the_kept_part_of_a_thin_image_is_that_of_the_whole(monkeypatch, resize, shorter, size):
    """Up to roundings. A smooth image, as the nearest pixel of noise may be any other."""
    monkeypatch.setattr(preprocessing, "MOST_PIXELS", 0)
    prepare = Preprocessing((32, 20), shorter, resize, HALF, HALF)
    across, down = np.meshgrid(*(np.linspace(0, 6, length) for length in size))
    given = Image.fromarray((127 + 60 * np.sin(across) + 60 * np.cos(down)).astype(np.uint8)).convert("RGB")
    part, whole = prepare.pixels(given).numpy().astype(int), resized_whole(given, prepare).astype(int)
    step = max(abs(np.diff(np.asarray(given).astype(int), axis=axis)).max(initial=0) for axis in (0, 1))
    assert abs(part - whole).max() <= (2 if resize not in ("nearest", "box") else 1 + step)


@pytest.mark.parametrize("shorter", [32, None])
@pytest.mark.parametrize("size", [(4_000_000, 1), (1, 4_000_000)])
def test_a_thin_image_takes_no_more_memory_than_it_has_pixels(monkeypatch, shorter, size):
    """Resized whole, it would have four thousand million pixels."""
    computed = []
    resize = Image.Image.resize

    def noted(self, size, *args, **kwargs):
        computed.append(size[0] * size[1])
        return resize(self, size, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", noted)
    prepare = Preprocessing((32, 32), shorter, "bicubic", HALF, HALF)
    result = prepare(Image.new("RGB", size, (0, 255, 51)))
    assert torch.equal(result, torch.tensor([-1.0, 1.0, -0.6])[:, None, None].expand(3, 32, 32))
    assert computed
    assert max(computed) <= 32 * 32


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
