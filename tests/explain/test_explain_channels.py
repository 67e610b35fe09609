"""Channels in an explanation: their own numbers, and their parts as the score counts them."""

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn

from gramwatch import GramDetector, GramwatchWarning, Guard
from gramwatch.numerics.deviation import outside_range

CHANNELS = 300


class Wide(nn.Module):
    """A tap with more channels than a lean guard looks at. One channel can be scaled, without a trace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(1, CHANNELS, 3), nn.Linear(CHANNELS, 3)
        self.factor = torch.ones(CHANNELS, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).sigmoid() * self.factor
        x = x.relu()
        return self.head((x / self.factor).mean((2, 3)))


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def quietly(detector, train, validation):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)
        return detector.fit([train], progress=False).calibrate([validation], progress=False)


@functools.cache
def lean() -> Guard:
    return quietly(Guard(Wide().eval(), members=("gram",)), images(400, 0), images(200, 1))


def watched() -> list[int]:
    gram = lean().members["gram"]
    (wide,) = (tap for tap in gram.taps if tap.name == "relu")
    return gram.channels_at(wide).tolist()


def test_a_lean_guard_looks_at_groups_of_channels_that_are_spread():
    assert len(watched()) < CHANNELS
    assert watched() != list(range(len(watched())))


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_lean_guard_names_channels_of_wide_taps_by_their_own_numbers(place):
    channel, model = watched()[place], lean().model
    model.factor[channel] = 20.0
    try:
        explanation = lean().explain(images(3, 7), places=False)
    finally:
        model.factor[channel] = 1.0
    for i in range(3):
        strongest = explanation.channels(i, member="gram", most=1)[0]
        assert (strongest.tap, strongest.channel) == ("relu", channel)


def test_orders_of_a_vector_are_explained_as_often_as_they_count():
    """A vector has one statistic for all odd orders, here three, and one for all even orders, here one."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    detector = quietly(GramDetector(net, orders=(1, 2, 3, 5)), torch.randn(300, 5), torch.randn(300, 5))
    x = 4 * torch.randn(4, 5)
    (observation,) = detector._observed(x).values()
    deviations = detector(x).deviations
    for example in range(4):
        for number in range(len(detector.taps)):
            shares = detector.shares_at(observation, None, example, number)
            times = torch.tensor([{"order 1": 3.0, "order 2": 1.0}[order] for order in shares.of])
            assert set(times.tolist()) == {1, 3}
            expected = outside_range(shares.value, shares.low, shares.high) * times
            torch.testing.assert_close(shares.amount, expected.double(), rtol=1e-6, atol=0)
            assert float(expected.sum()) == pytest.approx(float(deviations[example, number]), rel=1e-4)
