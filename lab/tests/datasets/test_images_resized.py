"""Images reduced and enlarged."""

import numpy as np
import pytest
import torch
from PIL import Image

from gramwatch import DataError
from gramwatch_lab.datasets.images import resized, through
from tests.inputs.files import smooth


def test_resizing_is_pillows_in_both_directions() -> None:
    images = smooth(2)
    for side in (28, 128):
        result = resized(images, side)
        one = Image.fromarray(images[1].permute(1, 2, 0).numpy()).resize(
            (side, side), Image.Resampling.BICUBIC
        )
        assert torch.equal(result[1], torch.from_numpy(np.asarray(one).copy()).permute(2, 0, 1))
    assert resized(images, 64) is images
    assert resized(images[:, :1], 32).shape == (2, 1, 32, 32)
    soft = through(images, 32)
    assert soft.shape == images.shape
    assert torch.equal(soft, resized(resized(images, 32), 64))
    with pytest.raises(DataError, match="nearest, antialiased"):
        resized(images, 32, "lanczos")
