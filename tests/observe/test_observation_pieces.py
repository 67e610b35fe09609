"""Batches whose statistics are too large to be held: they are split into smaller batches."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch import GramDetector, GramwatchWarning, Guard
from gramwatch.detect.detector import Detector
from gramwatch.evaluation.evaluate import Together, fit_together
from gramwatch.methods import METHODS
from gramwatch.numerics.bounds import HalfMinMax, MeanVariance, MinMax
from gramwatch.numerics.statistics import STATISTICS
from gramwatch.observe.needs import Needs, Statistics
from gramwatch.observe.plan import Plan
from gramwatch.watch import Network
from tests.files.test_artifact import _Largest

CLASSES = 3
# Float64 networks, in which a batch's size changes nothing, have no fast kernels. Who hears of it varies.
pytestmark = pytest.mark.filterwarnings("ignore:the network's feature maps are float64")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 12, 3)
        self.hidden, self.head = nn.Linear(12, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))), inplace=True)
        return self.head(torch.tanh(self.hidden(x.mean((2, 3)))))


def images(count: int, seed: int, scale: float = 1.0) -> Tensor:
    """In float64, in which a network's float32 statistics do not depend on the size of the batch."""
    noise = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    return scale * noise.double()


@pytest.fixture
def net() -> nn.Module:
    net = Net().double()
    with torch.no_grad():
        net.head.weight *= 20  # so that all classes are predicted
        net.head.bias -= net(images(500, 9)).mean(0)
    return net.eval()


@pytest.fixture
def passes(net: nn.Module) -> list[int]:
    """How many examples each forward pass had."""
    sizes: list[int] = []
    net.register_forward_hook(lambda _, given, __: sizes.append(len(given[0])))
    return sizes


@pytest.fixture
def by_pieces(monkeypatch: pytest.MonkeyPatch):
    """From when it is called on, a batch of which a detector asks so much is run a few examples at a time."""

    def switch(gram: GramDetector, at_once: int) -> None:
        features = sum(gram.statistics.at(tap).size for tap in gram.taps)
        monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", 4 * features * (at_once + 1) - 1)

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


@pytest.mark.parametrize("at_once", [1, 7])
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_pieces_give_what_one_batch_gives(choices, at_once, net, passes, by_pieces):
    train, test = images(80, 0).split(32), images(30, 1, scale=1.5)
    expected = quiet_fit(net, train, **choices)
    measured = expected.measure(test)
    by_pieces(expected, at_once)
    found = quiet_fit(net, train, **choices)
    assert_alike(found, expected)
    passes.clear()
    again = found.measure(test)
    assert max(passes) == at_once
    assert again.logits.equal(measured.logits)
    assert again.finite.equal(measured.finite)
    assert measured.deviations.gt(0).any(0).all()
    torch.testing.assert_close(again.deviations, measured.deviations, rtol=2e-6, atol=1e-9)
    found.calibrate([images(50, 2)], progress=False)
    assert found(images(20, 3, scale=20.0)).is_ood.all()


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_pieces_are_batches_of_that_size_bit_for_bit(choices, net, by_pieces):
    net.float()
    train, test = images(100, 0).float(), images(30, 1, scale=1.5).float()
    expected = quiet_fit(net, train.split(7), **choices)
    by_pieces(expected, 7)
    found = quiet_fit(net, [train], **choices)
    assert found.class_counts_.equal(expected.class_counts_)
    for name, tensor in expected._bounds.state().items():
        assert found._bounds.state()[name].equal(tensor)
    assert found.measure(test).values.equal(expected.measure_all(test.split(7), progress=False).values)


@pytest.mark.parametrize("choices", CHOICES[-5:], ids=str)
def test_examples_that_are_not_finite_are_left_out_of_both(choices, net, by_pieces):
    batch = images(200, 0)
    batch[3, 0, 0, 0] = torch.nan
    batch[5, 0, 1, 1] = torch.inf
    batch[7, 0, 2, 2] = 1e25  # the logits are finite behind tanh, statistics are not
    assert net(batch[7:8]).isfinite().all()
    expected = quiet_fit(net, [batch], **choices)
    by_pieces(expected, 2)
    with pytest.warns(GramwatchWarning, match=r"3 training example\(s\) with NaN or infinity were left out"):
        found = GramDetector(net, **choices).fit([batch], progress=False)
    assert_alike(found, expected)
    assert found.measure(batch).finite.logical_not().nonzero().flatten().tolist() == [3, 5, 7]


@pytest.mark.parametrize("per_class", [False, True])
def test_a_guard_of_pieces_is_a_guard_of_whole_batches(per_class, net, passes, by_pieces):
    labels = torch.arange(300) % CLASSES
    train, test = [(images(300, 0), labels)], images(30, 1, scale=1.5)
    members = ("gram", "early_mahalanobis", "class_ratio", "energy", "knn", "vim", "unit_mahalanobis")

    def ready() -> Guard:
        guard = Guard(net, members=members, per_class=per_class).fit(train, progress=False)
        return guard.calibrate([images(900, 2)], progress=False)

    expected = ready()
    measured, verdict = expected.measure(test), expected(test)
    by_pieces(expected.members["gram"], 7)
    guard = ready()
    passes.clear()
    found = guard.measure(test)
    assert passes == [7, 7, 7, 7, 2]
    assert found.columns == measured.columns
    assert found.logits.equal(measured.logits)
    torch.testing.assert_close(found.values, measured.values, rtol=1e-6, atol=1e-6)
    assert verdict.is_ood.any()
    again = guard(test)
    assert again.is_ood.equal(verdict.is_ood)
    torch.testing.assert_close(again.score, verdict.score, rtol=1e-6, atol=1e-6)
    assert again.p_value.equal(verdict.p_value)


def test_detectors_that_share_passes_share_their_pieces(net, passes, by_pieces):
    def fitted() -> dict[str, Detector]:
        made = {"gram": GramDetector(net), "knn": METHODS["knn"](net), "energy": METHODS["energy"](net)}
        fit_together(made, [images(200, 0)], progress=False)
        return made

    test = images(30, 1, scale=1.5)
    detectors = fitted()
    expected = Together(detectors).measure([test], "judging", False)
    by_pieces(detectors["gram"], 16)
    detectors = fitted()
    together = Together(detectors)
    together.measure([test], "judging", False)
    passes.clear()
    found = together.measure([test], "judging", False)
    assert passes == [16, 14]
    for name, each in expected.items():
        torch.testing.assert_close(found[name].values, each.values, rtol=2e-6, atol=1e-7)


def test_the_pieces_of_a_batch_are_the_batch(net, monkeypatch):
    x, labels, constant = images(23, 0), torch.arange(23), torch.arange(5)
    plan = Plan.of(Network.of(net), [Needs(statistics=Statistics("all", "row_sums", (1, 2)))], x)
    inputs = {"x": x, "more": (x[:, 0], constant, torch.tensor(2.0)), "word": "as it is"}
    ((whole, same),) = plan.pieces(inputs, labels)
    assert whole is inputs
    assert same is labels
    statistics = plan(x)[0].statistics
    monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", 10 * statistics[0].nbytes)
    parts = list(plan.pieces(inputs, labels))
    assert [len(some["x"]) for some, _ in parts] == [10, 10, 3]
    assert torch.cat([some["x"] for some, _ in parts]).equal(x)
    assert torch.cat([some["more"][0] for some, _ in parts]).equal(x[:, 0])
    assert torch.cat([each for _, each in parts]).equal(labels)
    for some, _ in parts:
        assert some["more"][1].equal(constant)
        assert some["more"][2].item() == 2.0
        assert some["word"] == "as it is"
    assert [each for _, each in plan.pieces(inputs, None)] == [None] * 3
    found = torch.cat([plan(some)[0].statistics for some, _ in plan.pieces(x, None)])
    torch.testing.assert_close(found, statistics, rtol=1e-6, atol=0)


def test_without_statistics_a_batch_stays_whole(net, monkeypatch):
    monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", 0)
    x = images(50, 0)
    plan = Plan.of(Network.of(net), [Needs(features=True), Needs(means="all")], x)
    assert [len(some) for some, _ in plan.pieces(x, None)] == [50]


@pytest.mark.parametrize("kind", [MinMax, HalfMinMax, MeanVariance])
def test_no_tensor_grows_with_all_statistics_of_a_batch(kind, net, by_pieces):
    storage = "float16" if kind is HalfMinMax else "float32"
    name = "mean_variance" if kind is MeanVariance else "min_max"
    fitted = GramDetector(net, taps=["conv2"], statistic="triangle", bounds=name, storage=storage)
    fitted.fit([images(100, 0)], progress=False)
    batch = images(100, 1)
    by_pieces(fitted, 5)
    features = 10 * 12 * 13 // 2
    allowed = max(2 * (CLASSES + 1) * features, batch.numel())  # as large as all classes, and a little more
    assert allowed < 10 * features
    with _Largest() as largest:
        fitted.measure(batch)
        fitted.fit([batch], progress=False)
    assert 5 * features <= largest.numbers <= allowed


def test_only_large_batches_are_split(net, passes, by_pieces):
    fitted = GramDetector(net).fit([images(200, 0)], progress=False)
    by_pieces(fitted, 20)
    fitted.measure(images(20, 1))  # which looks at the network, once
    total = 200
    for count, expected in ((20, [20]), (21, [20, 1]), (45, [20, 20, 5])):
        passes.clear()
        fitted.measure(images(count, 1))
        assert passes == expected
        passes.clear()
        fitted.fit([images(count, 1)], progress=False)
        assert passes[-len(expected) :] == expected
        total += count
        assert int(fitted.class_counts_.sum()) == total
