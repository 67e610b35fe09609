"""The numbers of images, against formulas in float64, and what they mean."""

import numpy as np
import pytest
import torch
from torch import Tensor

from gramwatch.inputs import image_numbers
from gramwatch.inputs.image_numbers import GROUPS, Number, columns, image_of, look, meaning, numbers
from gramwatch.numerics.image_scales import pairs_of

SIDES = ((8, 8), (8, 24), (24, 8), (9, 12), (15, 15), (15, 32), (16, 16), (20, 32), (32, 32))


def images(count: int, channels: int, *size: int, seed: int = 0) -> Tensor:
    """Smooth images with some noise, from 0 to 1, whose channels are alike."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.rand(count, 1, *size, generator=generator).cumsum(2).cumsum(3)
    own = torch.rand(count, channels, *size, generator=generator)
    return 0.7 * shared / shared.amax((2, 3), keepdim=True) + 0.3 * own


def by_meaning(x: Tensor) -> dict[Number, np.ndarray]:
    result = look(x).double().numpy()
    named = numbers(x.shape[1])
    assert len(set(named)) == len(named) == result.shape[1]
    return {number: result[:, place] for place, number in enumerate(named)}


def reduced(x: np.ndarray, scale: int) -> np.ndarray:
    """One channel of one image, by the mean of square blocks."""
    height, width = (side // scale for side in x.shape)
    return np.array(
        [
            [x[scale * i : scale * (i + 1), scale * j : scale * (j + 1)].mean() for j in range(width)]
            for i in range(height)
        ]
    )


def repeated(x: np.ndarray) -> np.ndarray:
    """An image with a side below 16: every pixel repeated until no side is."""
    factor = -(-16 // min(x.shape[1:]))
    return x.repeat(factor, 1).repeat(factor, 2)


def floor_of(x: np.ndarray) -> float:
    return 2.5e-6 * np.abs(x).max() ** 2 + 1e-12


def transcription(number: Number, x: np.ndarray) -> float | None:
    """One number of one image `(channels, height, width)`, by its meaning; None if it is not written here."""
    floor = floor_of(x)
    channels = [int(c) for c in number.channels.split(" and ") if c]
    parts = [reduced(x[c], number.scale) for c in channels]
    what, _, way = number.what.partition(" of ")
    axis = 0 if "vertical" in number.what else 1
    steps = [np.diff(part, axis=axis) for part in parts]
    centred = [part - part.mean() for part in parts]
    if number.what.endswith("differences") and "slope" not in what:
        if what == "log mean square":
            step = np.diff(steps[0], axis=axis) if "second" in way else steps[0]
            return float(np.log((step**2).mean() + floor))
        if what == "log mean over root mean square":
            top = np.abs(steps[0]).mean() + np.sqrt(floor)
            return float(np.log(top / np.sqrt((steps[0] ** 2).mean() + floor)))
        if what == "log of 1 - correlation":
            one, other = steps
            both = np.sqrt((one**2).mean() * (other**2).mean() + floor**2)
            return float(np.log(max(0.0, 1 - (one * other).mean() / both) + 1e-3))
    if number.what in ("correlation", "log of 1 - squared correlation"):
        one, other = centred
        result = (one * other).mean() / np.sqrt((one**2).mean() * (other**2).mean() + floor**2)
        return float(result if number.what == "correlation" else np.log(1 - result**2 + 1e-4))
    if number.what == "skewness of the difference":
        apart = centred[0] - centred[1]
        return float((apart**3).mean() / (apart.var() + floor) ** 1.5)
    if "at one line" in number.what:
        lines = np.abs(np.diff(x, axis=1 + axis)).mean((0, 2 - axis))
        small = 1e-3 * np.abs(np.diff(x, axis=1 + axis)).max() + 1e-12
        line = lines.max() if "largest" in number.what else lines.min()
        return float(np.log((line + small) / (lines.mean() + small)))
    if "slope of" in number.what and "differences" in number.what:
        energy = steps[0] ** 2
        ramp = np.linspace(-1, 1, energy.shape[axis])
        ramp = ramp[:, None] if axis == 0 else ramp[None]
        return float((energy * ramp).mean() / (energy.mean() + floor))
    if number.what == "mean":
        return float(parts[0].mean())
    if number.what == "log variance":
        return float(np.log(parts[0].var() + floor))
    if number.what == "skewness":
        return float((centred[0] ** 3).mean() / (parts[0].var() + floor) ** 1.5)
    if number.what == "log variance of the difference":
        return float(np.log((centred[0] - centred[1]).var() + floor))
    if number.what == "largest value":
        return float(parts[0].max())
    if number.what == "smallest value":
        return float(parts[0].min())
    if number.what.endswith("slope of the values"):
        ramp = np.linspace(-1, 1, x.shape[1 + axis])
        ramp = ramp[:, None] if axis == 0 else ramp[None]
        return float((centred[0] * ramp).mean() / np.sqrt(parts[0].var() + floor))
    return None


@pytest.mark.parametrize(("channels", "size"), [(3, (16, 16)), (1, (12, 9)), (2, (21, 34)), (5, (16, 24))])
def test_numbers_equal_their_formula(channels, size):
    x = images(4, channels, *size)
    checked = 0
    for number, result in by_meaning(x).items():
        expected = [transcription(number, repeated(image)) for image in x.double().numpy()]
        if expected[0] is not None:
            checked += 1
            np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-5, err_msg=str(number))
    assert checked > 0.6 * look(x).shape[1]


def test_the_plainest_and_the_busiest_region_equal_their_formula():
    x = images(3, 3, 17, 17)  # 16 x 16 differences: regions of 4 x 4
    x[0, :, :4, :4] = 0.5  # a dead block
    result = by_meaning(x)
    for place, image in enumerate(x.double().numpy()):
        square = (np.diff(image, axis=1)[:, :, :-1] ** 2 + np.diff(image, axis=2)[:, :-1] ** 2).mean(0)
        regions = square.reshape(4, 4, 4, 4).mean((1, 3))
        energy = np.log(regions + floor_of(image))
        for what, value in (
            ("plainest region", energy.min()),
            ("busiest region", energy.max()),
            ("spread over regions", energy.std()),
        ):
            number = Number("detail", f"log mean square of differences: {what}", 1, "")
            np.testing.assert_allclose(result[number][place], value, rtol=1e-4)


@pytest.mark.parametrize("factor", [0.01, 4.0, 255.0])
def test_scaling_the_input_adds_a_constant_to_logarithms_of_squares_and_leaves_correlations(factor):
    x = images(5, 3, 24, 20)
    before, after = by_meaning(x), by_meaning(factor * x)
    squares = ("log mean square", "log variance")
    scaled = ("mean", "largest value", "smallest value", "mean of the")
    for number, value in before.items():
        if number.what.startswith(squares) and "spread" not in number.what:
            expected = value + 2 * np.log(factor)
        elif number.what.startswith(scaled):
            expected = value * factor
        else:
            expected = value
        np.testing.assert_allclose(after[number], expected, rtol=1e-3, atol=1e-3, err_msg=str(number))


@pytest.mark.parametrize("channels", range(1, image_numbers.MOST_CHANNELS + 1))
def test_channels_decide_what_the_numbers_mean(channels):
    for height, width in SIDES:
        count = look(torch.rand(1, channels, height, width)).shape[1]
        named = numbers(channels)
        assert len(named) == count
        assert meaning(count) == named, (height, width)
        columns_of_groups = [columns(count, group) for group in GROUPS]
        assert [part.start for part in columns_of_groups] == [
            0,
            *(part.stop for part in columns_of_groups[:-1]),
        ]
        assert columns_of_groups[-1].stop == count
        for group, part in zip(GROUPS, columns_of_groups, strict=True):
            assert {number.group for number in named[part]} <= {group}


def test_no_two_kinds_of_images_have_as_many_numbers():
    counts = [len(numbers(channels)) for channels in range(1, 17)]
    assert len(set(counts)) == len(counts)
    with pytest.raises(ValueError, match="no image has 3 numbers"):
        meaning(3)


def test_pairs_of_channels():
    assert pairs_of(1) == []
    assert pairs_of(2) == [(0, 1)]
    assert pairs_of(3) == [(0, 1), (1, 2), (2, 0)]


@pytest.mark.parametrize("channels", [1, 2, 3, 16])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 255.0, 1e-12])
@pytest.mark.parametrize("size", [(8, 8), (16, 24)])
def test_numbers_of_constant_images_are_finite(channels, value, size):
    assert look(torch.full((2, channels, *size), value)).isfinite().all()


def test_numbers_of_an_image_do_not_depend_on_the_batch():
    x = images(6, 3, 16, 16)
    torch.testing.assert_close(look(x)[2:3], look(x[2:3]), rtol=1e-5, atol=1e-5)


def test_the_image_of_a_nest():
    x, tokens = images(2, 3, 8, 8), torch.zeros(2, 5, dtype=torch.int64)
    assert image_of(x) is x
    assert image_of({"pixel_values": x, "ids": tokens}) is x
    assert image_of((tokens, x)) is x
    assert image_of((x, x.clone())) is None
    assert image_of(tokens) is None
    assert image_of(torch.rand(2, 7)) is None
    assert image_of(x[0]) is None
    assert image_of((255 * x).to(torch.uint8)) is None
    assert image_of(x[:, :, :7]) is None
    assert image_of(x[..., :7]) is None
    assert image_of(torch.rand(2, 16, 8, 8)) is not None
    assert image_of(torch.rand(2, 17, 8, 8)) is None
