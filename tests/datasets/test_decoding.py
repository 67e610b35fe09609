"""Opening images of every kind."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gramwatch import DataError
from gramwatch.datasets import decoding
from gramwatch.datasets.decoding import opened

RED = (200, 10, 10)


@pytest.mark.parametrize(
    ("mode", "ending", "colour", "expected"),
    [
        ("RGB", "png", RED, RED),
        ("RGBA", "png", (*RED, 128), RED),
        ("L", "png", 90, (90, 90, 90)),
        ("LA", "png", (90, 128), (90, 90, 90)),
        ("1", "png", 1, (255, 255, 255)),
        ("I;16", "png", 0x5A33, (0x5A, 0x5A, 0x5A)),
        ("CMYK", "tif", (0, 0, 0, 155), (100, 100, 100)),
    ],
)
def test_every_kind_becomes_rgb(tmp_path, mode, ending, colour, expected):
    path = tmp_path / f"image.{ending}"
    Image.new(mode, (4, 3), colour).save(path)
    image, _ = opened(path)
    assert (image.mode, image.size) == ("RGB", (4, 3))
    assert image.getpixel((1, 1)) == expected
    assert opened(path, grey=True)[0].mode == "L"


def test_palettes_with_and_without_transparency(tmp_path):
    image = Image.new("RGB", (4, 4), RED).quantize(4)
    image.save(tmp_path / "plain.png")
    image.save(tmp_path / "clear.png", transparency=0)
    for name in ("plain.png", "clear.png"):
        found, note = opened(tmp_path / name)
        assert np.abs(np.subtract(found.getpixel((0, 0)), RED)).max() <= 3
        assert note == ""


def test_notes_say_what_was_changed(tmp_path):
    Image.new("I;16", (4, 4), 300).save(tmp_path / "deep.png")
    Image.new("CMYK", (4, 4)).save(tmp_path / "ink.jpg")
    frames = [Image.new("RGB", (4, 4), (i, i, i)) for i in (0, 100, 200)]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    notes = {path.name: opened(path)[1] for path in tmp_path.iterdir()}
    assert notes == {
        "deep.png": "16 bits reduced to 8",
        "ink.jpg": "CMYK made RGB",
        "moving.gif": "first of 3 frames",
    }
    assert opened(tmp_path / "moving.gif")[0].getpixel((0, 0)) == (0, 0, 0)


def test_images_are_turned_as_exif_says(tmp_path):
    image = Image.new("RGB", (6, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    found, note = opened(tmp_path / "turned.jpg")
    assert (found.size, note) == ((4, 6), "turned as EXIF says")


def damaged(folder: Path, name: str) -> Path:
    path = folder / name
    rng = np.random.default_rng(0)
    whole = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
    if name == "cut.png":
        whole.save(path)
        path.write_bytes(path.read_bytes()[:-1000])
    elif name == "float.tif":
        Image.new("F", (4, 4), 0.5).save(path)
    elif name == "deep.tif":
        Image.new("I", (4, 4), 70_000).save(path)
    elif name == "text.jpg":
        path.write_text("no image")
    elif name == "picture.pcx":  # a format that is not read, under any name
        whole.save(path)
        path = path.rename(folder / "picture.png")
    return path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cut.png", "truncated"),
        ("float.tif", "floats, whose range is unknown"),
        ("deep.tif", "more than 16 bits"),
        ("text.jpg", "not an image of a known format"),
        ("picture.pcx", "not an image of a known format"),
        ("missing.png", "No such file or directory"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, reason):
    with pytest.raises(DataError, match=reason) as error:
        opened(damaged(tmp_path, name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("most", [100, 30])
def test_bombs_are_not_decoded(tmp_path, monkeypatch, most):
    """Between Pillow's limit and its double it only warns. Both are refused here."""
    Image.new("RGB", (11, 11)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(decoding, "MOST_PIXELS", 100)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
    with pytest.raises(DataError, match="too large: it has more than 100 pixels"):
        opened(tmp_path / "bomb.png")


def test_no_permission(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Image, "open", forbidden)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        opened(tmp_path / "image.png")
