"""Images from files: reduced, cropped, padded, made grey."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from gramwatch import DataError
from gramwatch_lab.datasets import load
from tests.inputs.files import as_tensor, photographs, save


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    save(folder, photographs(6, 64))
    return str(folder)


def test_the_three_ways_of_reducing(pictures):
    original = as_tensor(photographs(6, 64))
    nearest = load(pictures, reduce="nearest")
    assert nearest.name == "pictures, nearest"
    assert any(torch.equal(nearest.images, original[:, :, i::2, j::2]) for i in (0, 1) for j in (0, 1))
    smooth = load(pictures, reduce="antialiased")
    assert smooth.name == "pictures, anti-aliased"
    # Averaging four independent pixels and their neighbours leaves well under half of the contrast.
    assert smooth.images.float().std() < 0.6 * nearest.images.float().std()
    direct = np.asarray(Image.fromarray(photographs(6, 64)[0]).resize((32, 32), Image.Resampling.BICUBIC))
    assert torch.equal(smooth.images[0], as_tensor(direct[None])[0])
    crops = load(pictures, reduce="crop")
    assert crops.name == "pictures, crops"
    for image, crop in zip(original, crops.images, strict=True):
        windows = image.unfold(1, 32, 1).unfold(2, 32, 1).permute(1, 2, 0, 3, 4)
        assert (windows == crop).flatten(2).all(2).sum() == 1
    assert {n.images.shape for n in (nearest, smooth, crops)} == {(6, 3, 32, 32)}
    assert load(pictures, reduce="nearest", size=28).name == "pictures, nearest 28 x 28"
    with pytest.raises(DataError, match=r"reduce='bilinear': choose from nearest, antialiased, crop"):
        load(pictures, reduce="bilinear")


def test_draws_and_crops_depend_on_the_seed_alone(pictures):
    crops = load(pictures, reduce="crop")
    few = load(pictures, reduce="crop", count=3)
    assert all(any(torch.equal(a, b) for b in crops.images) for a in few.images)
    assert torch.equal(load(pictures, reduce="crop", count=5).images[:3], few.images)
    assert not torch.equal(load(pictures, reduce="crop", seed=1).images, crops.images)
    everything = load(pictures, count=6).images
    assert len(everything.flatten(1).unique(dim=0)) == 6
    assert "3 of 6, drawn with seed 0" in few.description


def test_images_that_are_not_square_give_their_middle(tmp_path):
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, 32:64] = 255
    save(tmp_path, [wide])
    assert (load(str(tmp_path), size=16).images == 255).all()
    assert load(str(tmp_path), size=16, reduce="crop").images.shape == (1, 3, 16, 16)


def test_small_images_are_put_on_black(tmp_path):
    save(tmp_path, [np.full((20, 30, 3), 9, np.uint8)])
    image = load(str(tmp_path), size=32).images[0, 0]
    assert (image[6:26, 1:31] == 9).all()
    assert image.sum() == 9 * 20 * 30


def test_grey_is_as_pillow_makes_it_and_is_in_the_name(pictures):
    image_set = load(pictures, size=28, grey=True)
    assert image_set.name == "pictures, anti-aliased 28 x 28, grey"
    assert image_set.images.shape == (6, 1, 28, 28)
    colour = load(pictures, size=28).images[0].permute(1, 2, 0).numpy()
    pillow = np.asarray(Image.fromarray(colour).convert("L")).astype(int)
    assert np.abs(image_set.images[0, 0].numpy().astype(int) - pillow).max() <= 1
    assert "made grey" in image_set.description


def test_what_is_no_image_of_the_formats_we_read_is_named(tmp_path):
    tmp_path = tmp_path / "pictures"
    pcx = io.BytesIO()
    Image.fromarray(photographs(1, 32)[0]).save(pcx, "PCX")
    contents = pcx.getvalue(), b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x89PNG\r\n\x1a\n" + bytes(60)
    for number, content in enumerate(contents):
        (tmp_path / str(number)).mkdir(parents=True)
        (tmp_path / str(number) / "picture.png").write_bytes(content)
        with pytest.raises(DataError, match=r"picture\.png is not a readable image"):
            load(str(tmp_path / str(number)), size=8)
