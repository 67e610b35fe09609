"""Batches whose statistics are too large to be held: run twice, taken in and judged piece by piece."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch import GramDetector, GramwatchWarning, detector, statistics
from gramwatch.bounds import HalfMinMax, MeanVariance, MinMax
from gramwatch.statistics import STATISTICS, triangle, triangle_pieces
from test_artifact import _Largest

CLASSES = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 12, 3)
        self.hidden, self.head = nn.Linear(12, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))), inplace=True)
        return self.head(torch.tanh(self.hidden(x.mean((2, 3)))))


def images(count: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def net() -> nn.Module:
    net = Net()
    with torch.no_grad():
        net.head.weight *= 20  # so that all classes are predicted
        net.head.bias -= net(images(500, 9)).mean(0)
    return net.eval()


@pytest.fixture
def by_pieces(monkeypatch: pytest.MonkeyPatch):
    """From when it is called on, every batch is run twice, in pieces of a few rows of a few examples."""

    def switch() -> None:
        monkeypatch.setattr(detector, "MOST_STATISTICS", 0)
        monkeypatch.setattr(statistics, "PIECE", 2000)

    return switch


def quiet_fit(net: nn.Module, batches: list[Tensor], **choices: object) -> GramDetector:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GramwatchWarning)  # of classes with few examples, or some left out
        return GramDetector(net, **choices).fit(batches, progress=False)


def assert_alike(found: GramDetector, expected: GramDetector) -> None:
    assert found.class_counts_.equal(expected.class_counts_)
    for name, tensor in expected._bounds.state().items():
        if isinstance(expected._bounds, MinMax):
            assert found._bounds.state()[name].equal(tensor)
        else:
            torch.testing.assert_close(found._bounds.state()[name], tensor, rtol=1e-9, atol=1e-12)


CHOICES = [
    *({"statistic": statistic} for statistic in [*STATISTICS, "auto"]),
    {"statistic": "triangle", "orders": [10, 1, 4]},
    {"statistic": "triangle", "storage": "float16"},
    {"statistic": "auto", "storage": "float16"},
    {"statistic": "triangle", "bounds": "mean_variance", "orders": [3, 1]},
    {"statistic": "auto", "bounds": "mean_variance"},
]


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_two_passes_give_what_one_gives(choices, net, by_pieces):
    train, test = images(200, 0).split(64), images(30, 1, scale=1.5)
    expected = quiet_fit(net, train, **choices)
    measured = expected.measure(test)
    by_pieces()
    found = quiet_fit(net, train, **choices)
    assert_alike(found, expected)
    again = found.measure(test)
    assert again.logits.equal(measured.logits)
    assert again.finite.equal(measured.finite)
    assert measured.deviations.gt(0).any(0).all()
    torch.testing.assert_close(again.deviations, measured.deviations, rtol=2e-6, atol=1e-9)
    found.calibrate([images(100, 2)], progress=False)
    assert found(images(20, 3, scale=20.0)).is_ood.all()


@pytest.mark.parametrize("choices", CHOICES[-5:], ids=str)
def test_examples_that_are_not_finite_are_left_out_of_both(choices, net, by_pieces):
    batch = images(200, 0)
    batch[3, 0, 0, 0] = torch.nan
    batch[5, 0, 1, 1] = torch.inf
    batch[7, 0, 2, 2] = 1e25  # the logits are finite behind tanh, statistics are not
    assert net(batch[7:8]).isfinite().all()
    expected = quiet_fit(net, [batch], **choices)
    by_pieces()
    with pytest.warns(GramwatchWarning, match=r"3 training example\(s\) with NaN or infinity were left out"):
        found = GramDetector(net, **choices).fit([batch], progress=False)
    assert_alike(found, expected)
    assert found.measure(batch).finite.logical_not().nonzero().flatten().tolist() == [3, 5, 7]


def test_the_pieces_of_a_triangle_are_the_triangle(monkeypatch):
    monkeypatch.setattr(statistics, "PIECE", 300)
    maps, orders = torch.randn(7, 9, 11), (4, 1, 3)
    found = torch.full((7, 3 * 45), torch.nan)
    for samples, features, values in triangle_pieces(maps, orders):
        assert values.numel() <= 300
        assert found[samples, features].isnan().all()
        found[samples, features] = values
    monkeypatch.undo()
    torch.testing.assert_close(found.unflatten(1, (3, 45)), triangle(maps, orders), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [MinMax, HalfMinMax, MeanVariance])
def test_no_tensor_grows_with_all_statistics_of_a_batch(kind, net, by_pieces, monkeypatch):
    storage = "float16" if kind is HalfMinMax else "float32"
    name = "mean_variance" if kind is MeanVariance else "min_max"
    fitted = GramDetector(net, taps=["conv2"], statistic="triangle", bounds=name, storage=storage)
    fitted.fit([images(100, 0)], progress=False)
    by_pieces()
    batch = images(100, 1)
    features = 10 * 12 * 13 // 2
    bounds = 2 * (CLASSES + 1) * features  # as large as all classes, and a little more
    activations = 100 * 12 * 6 * 6
    allowed = max(bounds, activations, 2 * statistics.PIECE)
    assert allowed < 100 * features
    with torch.inference_mode(), _Largest() as largest:
        fitted.measure(batch)
        fitted.take_alone(batch)
    assert 2000 <= largest.numbers <= allowed


def test_only_large_batches_are_run_twice(net, monkeypatch):
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))
    fitted = GramDetector(net).fit([images(200, 0)], progress=False)
    size = 4 * fitted._bounds.state()["minimum"].shape[1]
    monkeypatch.setattr(detector, "MOST_STATISTICS", 20 * size)
    for count, expected in ((20, 1), (21, 2)):
        passes.clear()
        fitted.measure(images(count, 1))
        assert len(passes) == expected
        passes.clear()
        fitted.fit([images(count, 1)], progress=False)
        assert len(passes) == expected


def test_an_interrupted_batch_of_moments_changes_nothing():
    bounds = MeanVariance(2, (4,))
    bounds.update(torch.rand(9, 4), torch.arange(9) % 2)
    before = {name: tensor.clone() for name, tensor in bounds.state().items()}

    def interrupted() -> None:
        with bounds.in_parts() as update:
            update(torch.rand(5, 2), torch.zeros(5, dtype=torch.long), slice(0, 2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(bounds.state()[name].equal(tensor) for name, tensor in before.items())
