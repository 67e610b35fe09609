"""Gram over a regular grid of pixels: which pixels, statistics against the oracle, files, compiling."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gramwatch
from gramwatch import GramDetector, Guard
from gramwatch.methods import Profile
from gramwatch.numerics.samples import TOGETHER, Sample
from tests import oracle

pytestmark = pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")


class Net(nn.Module):
    """Maps of 24 x 17 and of 12 x 9 pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.Tanh()
        )
        self.head = nn.Linear(8, 3)
        with torch.no_grad():  # so that all classes are predicted
            self.head.weight *= 40
            self.head.bias -= self(images(200, 9)).mean(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def images(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(count, 2, 24, 17, generator=torch.Generator().manual_seed(seed))


def chosen(shape: tuple[int, ...], axis: int, pixels: int) -> list[tuple[int, ...]]:
    """The positions of the sampled pixels, found by numbering all of them."""
    sides = [size for i, size in enumerate(shape) if i not in (0, axis)]
    numbers = torch.arange(math.prod(sides), dtype=torch.float64).reshape(sides)
    x = numbers.unsqueeze(0).unsqueeze(axis).expand(shape)
    maps = Sample(pixels).of(x.shape, axis).maps(x)
    assert maps.shape[:2] == (shape[0], shape[axis])
    assert (maps == maps[:1, :1]).all()
    return [tuple(int(i) for i in np.unravel_index(int(n), sides)) for n in maps[0, 0].tolist()]


@given(channels=st.integers(1, 5000), most=st.integers(TOGETHER, 600), axis=st.integers(1, 3))
@settings(deadline=None, max_examples=200)
def test_channels_are_evenly_spread_groups_and_no_more_than_asked_for(channels, most, axis):
    sample = Sample(None, most)
    numbers = sample.numbers(channels).tolist()
    assert len(numbers) == len(set(numbers)) == sample.count(channels) <= min(channels, most)
    assert channels <= most or len(numbers) >= most // 2 - TOGETHER
    groups = [numbers[i : i + TOGETHER] for i in range(0, len(numbers), TOGETHER)]
    if channels > most:
        assert all(group == list(range(group[0], group[0] + TOGETHER)) for group in groups)
        assert len({b[0] - a[0] for a, b in itertools.pairwise(groups)}) <= 1
    x = (
        torch.arange(channels)
        .reshape([-1 if i == axis else 1 for i in range(4)])
        .expand([channels if i == axis else 2 for i in range(4)])
    )
    maps = sample.of(x.shape, axis).maps(x)
    assert maps.shape == (2, len(numbers), 4)
    assert (maps == torch.tensor(numbers)[None, :, None]).all()
    vectors = torch.arange(channels).expand(3, -1)
    assert sample.of(vectors.shape, 1).maps(vectors).squeeze(2).tolist() == [numbers] * 3


@given(
    sides=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    axis=st.integers(1, 4),
    pixels=st.integers(1, 300),
)
@settings(deadline=None, max_examples=200)
def test_the_grid_is_regular_and_its_size_is_the_nearest(sides, axis, pixels):
    axis = min(axis, len(sides) + 1)
    shape = (2, *sides[: axis - 1], 5, *sides[axis - 1 :])
    positions = chosen(shape, axis, pixels)
    along = [sorted({p[i] for p in positions}) for i in range(len(sides))]
    assert len(positions) == math.prod(map(len, along)) == len(set(positions))
    steps = {b - a for line in along for a, b in itertools.pairwise(line)}
    assert len(steps) <= 1
    for line, size in zip(along, sides, strict=True):  # in the middle, to half a pixel
        assert 0 <= (size - 1 - line[-1]) - line[0] <= 1 or len(line) == size
    counts = [math.prod(-(-size // step) for size in sides) for step in range(1, max(sides) + 1)]
    ratios = [max(Fraction(count, pixels), Fraction(pixels, count)) for count in (len(positions), *counts)]
    assert ratios[0] == min(ratios)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 64, 112, 112), 64),
        ((1, 256, 56, 56), 64),
        ((1, 512, 28, 28), 49),
        ((1, 2048, 7, 7), 49),
        ((1, 16, 65), 65),
        ((1, 16, 197), 66),
    ],
)
def test_about_64_pixels_of_usual_maps(shape, expected):
    assert len(chosen(shape, 1, 64)) == expected


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("orders", [(1, 2, 4, 8), (8, 1), (1, 2, 3), tuple(range(1, 11))])
def test_statistics_are_the_papers_on_the_same_pixels(layout, orders):
    net = Net().to(memory_format=layout).eval()
    x = images(5, 1).contiguous(memory_format=layout)
    detector = GramDetector(net, orders=orders, pixels=20).fit([images(40, 0)], progress=False)
    found = detector.planned(x)(x)[0].statistics.numpy()
    start = 0
    for tap, maps in zip(detector.taps, seen(net, x), strict=True):
        (_, channels, height, width) = maps.shape
        positions = chosen(tuple(maps.shape), 1, 20)
        assert len(positions) < height * width
        for p in orders:
            for n, each in enumerate(maps):
                few = np.stack([each[:, i, j] for i, j in positions], 1)
                expected = oracle.stat(few, p, "row_sums")
                mine = found[n, start : start + channels]
                np.testing.assert_allclose(mine, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())
            start += channels
        assert tap.channels == channels
    assert start == found.shape[1]


def seen(net: Net, x: torch.Tensor) -> list[np.ndarray]:
    found = []
    with torch.no_grad():
        for layer in net.body:
            x = layer(x)
            found.append(x.double().numpy())
    return found


def test_channel_means_over_few_pixels():
    net, x = Net().eval(), images(7, 1)
    detector = Profile(net, pixels=20).fit([images(60, 0)], progress=False)
    means = detector.planned(x)(x)[0].channel_means
    for mine, maps in zip(means, seen(net, x), strict=True):
        positions = chosen(tuple(maps.shape), 1, 20)
        expected = np.mean([maps[:, :, i, j] for i, j in positions], 0)
        np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_one_pass_serves_whole_maps_and_samples():
    net, x = Net().eval(), images(9, 1)
    detectors = {
        "all": GramDetector(net),
        "few": GramDetector(net, pixels=20),
        "fewer": GramDetector(net, pixels=4, orders=[1]),
        "means": Profile(net),
        "few means": Profile(net, pixels=20),
    }
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))
    gramwatch.fit_together(detectors, [images(60, 0)], progress=False)
    assert len(passes) <= 3  # the look at the network, and one batch
    for name, each in detectors.items():
        alone = type(each)(net, **given_to(each)).fit([images(60, 0)], progress=False)
        assert torch.equal(alone.measure(x).values, each.measure(x).values), name


def given_to(detector: GramDetector | Profile) -> dict[str, object]:
    orders = {"orders": detector.orders} if isinstance(detector, GramDetector) else {}
    return {"pixels": detector.pixels, **orders}


def test_a_file_says_what_was_sampled(tmp_path):
    net, x = Net().eval(), images(20, 2, 1.5)
    guard = Guard(net).fit([images(300, 0)], progress=False).calibrate([images(200, 1)], progress=False)
    guard.save(tmp_path / "guard.safetensors")
    again = gramwatch.load(tmp_path / "guard.safetensors", net)
    gram = again.members["gram"]
    assert (gram.pixels, gram.orders, gram.selection) == (256, (1, 2, 4, 8), "spread")
    assert torch.equal(again(x).score, guard(x).score)
    whole = GramDetector(net).fit([images(300, 0)], progress=False)
    assert "pixels" not in whole.contents()[0]["settings"]
    with pytest.raises(ValueError, match="pixels"):
        GramDetector(net, pixels=64).fit([images(30, 0)], progress=False).merge(whole)


def test_full_effort_is_the_papers_gram():
    net, x = Net().eval(), images(20, 2, 1.5)
    guard = Guard(net, effort="full").fit([images(300, 0)], progress=False)
    gram = GramDetector(net).fit([images(300, 0)], progress=False)
    assert torch.equal(guard.members["gram"].measure(x).values, gram.measure(x).values)
    mixed = Guard(net, orders=[3], pixels="all", taps="all").members["gram"]
    assert (mixed.orders, mixed.pixels, mixed.selection) == ((3,), None, "all")


@pytest.mark.parametrize("pixels", [0, -3, True, 2.5, "few"])
def test_a_wrong_number_of_pixels_is_named(pixels):
    with pytest.raises(ValueError, match="pixels must be a positive integer"):
        GramDetector(Net(), pixels=pixels)
    with pytest.raises(ValueError, match="pixels must be a positive integer"):
        Guard(Net(), pixels=pixels)


def test_a_wrong_effort_is_named():
    with pytest.raises(ValueError, match="effort must be one of lean, full; got 'much'"):
        Guard(Net(), effort="much")


def test_a_compiled_network_is_sampled_alike():
    net, x = Net().eval(), images(6, 2, 1.5)
    plain = Guard(net, pixels=20).fit([images(300, 0)], progress=False)
    compiled = Guard(torch.compile(net, backend="eager"), pixels=20).fit([images(300, 0)], progress=False)
    torch.testing.assert_close(compiled.measure(x).values, plain.measure(x).values, rtol=1e-4, atol=1e-5)
