"""Opening images of every kind."""

import errno
import os
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gramwatch import DataError
from gramwatch.inputs import decoding
from gramwatch.inputs.decoding import begun, opened, work

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
        actual, note = opened(tmp_path / name)
        assert np.abs(np.subtract(actual.getpixel((0, 0)), RED)).max() <= 3
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
    actual, note = opened(tmp_path / "turned.jpg")
    assert (actual.size, note) == ((4, 6), "turned as EXIF says")


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

    (tmp_path / "image.png").touch()
    monkeypatch.setattr(Image, "open", forbidden)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        opened(tmp_path / "image.png")


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    """To open a FIFO waits for a writer, without end."""
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "link.png").symlink_to("/dev/zero")
    (tmp_path / "folder.png").mkdir()
    for path in tmp_path.iterdir():
        with pytest.raises(DataError, match="not a regular file"):
            opened(path)


def with_scans(count: int) -> bytes:
    """A JPEG whose last scan is repeated. A scan takes a few bytes, and goes over all pixels."""
    file = BytesIO()
    Image.new("RGB", (64, 64), RED).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * count + data[-2:]


def test_the_work_of_decoding_is_known_before_it_begins():
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM"):
        file = BytesIO()
        Image.new("RGB", (100, 50)).save(file, kind)
        assert 5000 <= work(begun(file)) <= 6000
    plain, odd = b"P2 100 50 255\n" + b"1 " * 5000, b"P6 100 50 254\n" + bytes(15_000)
    assert min(work(begun(BytesIO(data))) for data in (plain, odd)) > 400_000  # Python decodes them
    assert work(begun(BytesIO(with_scans(990)))) > 100 * 64 * 64
    tall = BytesIO()
    Image.new("L", (1, 50_000)).save(tall, "PNG")
    assert work(begun(tall)) == 8 * 50_000


def test_a_jpeg_of_endless_scans_is_not_decoded():
    assert opened(BytesIO(with_scans(5)), most_work=20_000)[0].getpixel((0, 0))[0] > 180
    with pytest.raises(DataError, match="too slow to decode: it takes as long as"):
        opened(BytesIO(with_scans(100)), most_work=20_000)


def test_too_little_memory_is_one_line(tmp_path, monkeypatch):
    def exhausted(*_, **__):
        raise MemoryError

    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", exhausted)
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", exhausted, raising=False)
    with pytest.raises(DataError, match="there is not enough memory"):
        opened(tmp_path / "image.png")
