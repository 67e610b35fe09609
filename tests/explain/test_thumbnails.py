"""Small pictures as data URIs."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from gramwatch.errors import DataError
from gramwatch.explain import thumbnails


def decoded(uri: str) -> Image.Image:
    kind, _, text = uri.partition(",")
    assert kind == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(text)))


@pytest.mark.parametrize(
    ("size", "shown"),
    [((1000, 500), (192, 96)), ((8, 8), (192, 192)), ((150, 100), (150, 100)), ((10000, 1), (192, 1))],
)
def test_a_thumbnail_has_the_right_size(size, shown):
    assert decoded(thumbnails.thumbnail(Image.new("RGB", size, "red"))).size == shown


def test_an_image_is_opened_by_its_path(tmp_path):
    Image.new("RGB", (5, 4), "blue").save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_text("no image")
    opened = thumbnails.Finder()
    assert opened(str(tmp_path / "a.png"))[0].size == (5, 4)
    assert opened(str(tmp_path / "a.png"), grey=True)[0].mode == "L"
    for name, reason in (("broken.png", "not an image"), ("missing.png", "No such file")):
        with pytest.raises(DataError, match=reason):
            opened(str(tmp_path / name))


def test_an_image_is_opened_by_its_key_in_a_named_set():
    opened = thumbnails.Finder()
    assert opened("gaussian/test/00003")[0].size == opened("gaussian/test/00004", grey=True)[0].size
    for key in ("gaussian/test/99999999", "gaussian/test/x", "cifar10/nothing/00001"):
        with pytest.raises(DataError):
            opened(key)


def test_the_map_is_red_where_it_is_large():
    heat = np.zeros((4, 4))
    heat[0, 0] = 5
    drawn = np.asarray(thumbnails.over(Image.new("RGB", (64, 64), "grey"), heat)).astype(int)
    assert drawn[2, 2, 0] - drawn[2, 2, 2] > 100
    assert abs(drawn[60, 60, 0] - drawn[60, 60, 2]) <= 1
    flat = np.asarray(thumbnails.over(Image.new("RGB", (8, 8), "grey"), np.zeros((2, 2))))
    assert (flat == flat[0, 0]).all()
