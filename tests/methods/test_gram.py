"""GramDetector: against the transcription of the paper, its settings, its taps and its classes."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramwatch import CalibrationError, GramDetector, GramwatchWarning, InputError, TapError
from gramwatch.methods.gram_rules import GramRule
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch.numerics.statistics import STATISTICS
from gramwatch.watch import observe
from tests import fed, oracle
from tests.small import CLASSES, SmallNet, images, made


@pytest.fixture
def net() -> SmallNet:
    return made()


@pytest.fixture
def fitted(net) -> GramDetector:
    return GramDetector(net).fit(images(300, 0).split(64))


@pytest.fixture
def ready(fitted) -> GramDetector:
    return fitted.calibrate(images(200, 1).split(64))


def feature_maps(detector: GramDetector, x: torch.Tensor):
    """Feature maps [example][layer] as the network makes them, in float64 numpy, and the logits."""
    seen = [None] * len(detector.taps)

    def receive(number, maps):
        seen[number] = maps.double().numpy().copy()

    logits = observe(detector.model, detector.taps, x, receive)
    return [[seen[layer][d] for layer in range(len(seen))] for d in range(len(x))], logits.double().numpy()


# --- faithful ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistic", [*STATISTICS, "auto"])
@pytest.mark.parametrize("bounds", ["min_max", "mean_variance"])
def test_deviations_equal_the_transcription(net, statistic, bounds):
    orders = (1, 2, 3, 4, 5, 10)
    train, test = images(200, 0), images(12, 1, scale=1.5)
    detector = GramDetector(net, orders=orders, statistic=statistic, bounds=bounds)
    detector.fit(train.split(64))
    got = detector.measure(test)
    train_maps, train_logits = feature_maps(detector, train)
    test_maps, test_logits = feature_maps(detector, test)
    for layer, tap in enumerate(detector.taps):
        name = statistic
        if statistic == "auto":
            name = "triangle" if tap.name in ("hidden", "tanh") else "row_sums"
        one = [[f[layer]] for f in train_maps]
        first, second = oracle.compute_bounds(one, train_logits.argmax(1), orders, name, CLASSES, bounds)
        expected = oracle.deviations(
            [[f[layer]] for f in test_maps], test_logits.argmax(1), orders, name, first, second, bounds
        )[:, 0]
        np.testing.assert_allclose(got.deviations[:, layer].numpy(), expected, rtol=2e-3, atol=1e-5)
    assert (got.deviations > 0).any(0).all()


@pytest.mark.parametrize("confidence", ["none", "divide", "divide_total", "subtract"])
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("split", [True, False])
def test_scores_and_p_values_equal_the_transcription(net, confidence, normalise, split):
    detector = GramDetector(net, confidence=confidence, normalise=normalise, level=0.9)
    detector.fit(images(300, 0).split(100))
    validation, test = images(81, 1), images(30, 2, scale=1.2)
    detector.calibrate(validation.split(17), split=split, seed=5)
    found = detector(test)
    measured = detector.measure_all(validation.split(17))
    order = oracle.drawn(81, 5)
    normalising, ranking = (order[:40], order[40:]) if split else (order, order)
    deltas, logits = measured.deviations.double().numpy(), measured.logits.double().numpy()
    conf = oracle.softmax_confidence(logits)
    test_conf = oracle.softmax_confidence(found.logits.double().numpy())

    def scores(d, c):
        return oracle.total_deviation(deltas[normalising], conf[normalising], d, c, confidence, normalise)

    calibration = scores(deltas[ranking], conf[ranking])
    expected = scores(found.deviations.double().numpy(), test_conf)
    np.testing.assert_allclose(found.score.numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(detector.calibration_scores_.numpy(), np.sort(calibration), rtol=1e-9)
    tolerance = float(detector.calibration().tolerance[0])
    assert 0 < tolerance < 1e-4 * np.abs(calibration).max()
    assert detector.threshold_ == pytest.approx(oracle.threshold(calibration, 0.9) + tolerance, rel=1e-9)
    ranks = detector.calibration_scores_.numpy()
    for i in range(30):
        p = oracle.p_value(ranks + tolerance, found.score[i].item())
        assert found.p_value[i].item() == pytest.approx(p)
        assert found.is_ood[i].item() == (p <= 0.1 + 1e-12)


def test_the_false_alarm_rate_is_what_was_asked_for(net):
    """Over many small calibrations, fresh in-distribution inputs are flagged at most 10 % of the time."""
    detector = GramDetector(net, level=0.9).fit([images(300, 0)])
    pool = images(2000, 1)
    measured = detector.measure_all(pool.split(500))
    rates = {True: [], False: []}
    for trial in range(150):
        order = torch.randperm(2000, generator=torch.Generator().manual_seed(trial))
        chosen, fresh = order[:40], order[40:]
        detector.measure_all = lambda *_, part=measured[chosen]: part  # type: ignore[method-assign]
        for split in rates:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # with 20 examples some tap may never deviate
                detector.calibrate([], split=split, seed=trial)
            score = detector.calibration().rule(measured[fresh])[:, 0]
            rates[split].append((score > detector.threshold_).double().mean().item())
    rate = np.mean(rates[True])
    assert rate <= 0.1 + 4 * np.std(rates[True]) / np.sqrt(150)
    assert np.mean(rates[False]) > rate  # the paper's way, with the same data for both, flags more


def test_outliers_are_flagged_and_the_rest_is_not(ready):
    assert ready(images(100, 5)).is_ood.double().mean() < 0.15
    assert ready(images(100, 6, scale=8)).is_ood.all()


# --- everyday use ------------------------------------------------------------------------------------


def test_taps_print_as_a_table(ready):
    text = str(ready.taps)
    assert [tap.name for tap in ready.taps] == ["conv1", "relu", "conv2", "relu#2", "hidden", "tanh"]
    assert "N x 5 x 8 x 8" in text
    assert "6 taps" in text
    assert "fitted on 300" in repr(ready)


def test_wide_vectors_are_judged_by_row_sums_and_it_is_said():
    net = nn.Sequential(nn.Linear(8, 1100), nn.ReLU(), nn.Linear(1100, 2)).eval()
    with torch.no_grad():
        net[2].bias -= net(torch.randn(500, 8)).mean(0)
    with pytest.warns(GramwatchWarning, match=r"2 vector\(s\) over 1024"):
        detector = GramDetector(net).fit([torch.randn(200, 8)])
    assert detector._bounds.state()["minimum"].shape == (2, 2 * 10 * 1100)


def test_vectors_take_one_odd_and_one_even_order():
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)).eval()
    detector = GramDetector(net).fit([torch.randn(200, 8)])
    assert detector._bounds.state()["minimum"].shape == (2, 2 * 2 * 21)


# --- classes that training hardly saw ----------------------------------------------------------------


class FixedClass(nn.Module):
    """Predicts the class that the first pixel names."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.classes = classes

    def forward(self, x):
        features = torch.relu(self.conv(x)).mean() * 0
        return F.one_hot(x[:, 0, 0, 0].long(), self.classes).float() * 5 + features


def of_class(cls: int, count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    x = images(count, seed, scale)
    x[:, 0, 0, 0] = cls
    return x


@pytest.mark.parametrize("bounds", ["min_max", "mean_variance"])
def test_a_class_never_predicted_is_judged_by_pooled_bounds(bounds):
    net = FixedClass().eval()
    train = torch.cat([of_class(0, 50, 0), of_class(1, 50, 1), of_class(2, 7, 2)])
    with pytest.warns(GramwatchWarning, match=r"3 of 5 classes .* 2 of them for none: class 2, 3, 4"):
        detector = GramDetector(net, bounds=bounds).fit([train])
    detector.calibrate([torch.cat([of_class(0, 50, 3), of_class(1, 50, 4)])])
    found = detector(torch.cat([of_class(0, 1, 5), of_class(2, 1, 5), of_class(4, 1, 5)]))
    assert found.class_support.tolist() == [50, 7, 0]
    assert found.score.isfinite().all()
    assert detector(of_class(4, 3, 6, scale=9)).is_ood.all()


# --- bad input ---------------------------------------------------------------------------------------


def test_a_pattern_that_matches_nothing(net):
    with pytest.raises(TapError, match="conv3"):
        GramDetector(net, taps=["conv1", "conv3"]).fit([images(10, 0)])


def test_a_network_without_a_tap():
    class Nothing(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :3] * 2

    with pytest.raises(TapError, match="Nothing has no tap"):
        GramDetector(Nothing()).fit([images(10, 0)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"orders": (0, 1)}, "positive integers"),
        ({"orders": (1.5,)}, "positive integers"),
        ({"statistic": "rows"}, "statistic must be one of auto"),
        ({"bounds": "quantile"}, "bounds must be one of min_max"),
        ({"confidence": "times"}, "confidence must be one of none"),
        ({"level": 95}, "level must lie between 0 and 1"),
    ],
)
def test_settings_that_make_no_sense(net, arguments, message):
    with pytest.raises(ValueError, match=message):
        GramDetector(net, **arguments)


def test_taps_that_never_deviate_are_named():
    class WithDeadTap(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.dead = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 2, 3)
            nn.init.zeros_(self.dead.weight)
            nn.init.zeros_(self.dead.bias)

        def forward(self, x):
            logits = self.conv(x)[:, :2, 3, 3] - self.conv.bias[:2]
            return logits + self.dead(x).sum() * 0

    detector = GramDetector(WithDeadTap().eval())
    detector.fit([images(200, 0)])
    with pytest.warns(GramwatchWarning, match=r"1 of 2 taps never deviate .* dead"):
        detector.calibrate([images(200, 1)])
    assert detector(images(3, 2)).score.isfinite().all()


def test_the_tap_that_is_not_finite_is_named():
    net = fed.Plain()
    with torch.no_grad():
        net.hidden.weight[2] = torch.inf
    with (
        pytest.warns(GramwatchWarning, match=r"left out; the first tap to show it is 'hidden'"),
        pytest.raises(
            InputError, match=r"every training example held NaN or infinity; the first tap .*'hidden'"
        ),
    ):
        GramDetector(net).fit([fed.images(20, 0)], progress=False)


# --- merging -----------------------------------------------------------------------------------------


class Switched(nn.Module):
    """It looks at the first channel of its input. Its activation may be another with the same weights."""

    def __init__(self, activation=F.relu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head, self.activation = nn.Conv2d(1, 4, 3), nn.Linear(4, 2), activation

    def forward(self, x):
        return self.head(self.activation(self.conv(x[:, :1])).mean((2, 3)))


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")
def test_detectors_that_watch_different_tensors_are_not_merged():
    def fitted(channels=1, **options):
        batch = torch.randn(200, channels, 6, 6)
        return GramDetector(Switched(**options).eval(), orders=(1,)).fit([batch], progress=False)

    merged = fitted().merge(fitted())
    assert int(merged.class_counts_.sum()) == 400
    other_taps, other_inputs = fitted(activation=F.gelu), fitted(channels=3)
    assert other_inputs.taps == merged.taps
    for other in (other_taps, other_inputs):
        with pytest.raises(ValueError, match="the two watch different tensors"):
            merged.merge(other)
    assert int(merged.class_counts_.sum()) == 400


# --- calibration data --------------------------------------------------------------------------------


def test_training_examples_among_a_few_others_do_not_calibrate(net):
    train = images(400, 0)
    detector = GramDetector(net, orders=(1, 2)).fit(train.split(100), progress=False)
    with pytest.raises(CalibrationError, match="look like training examples"):
        detector.calibrate([torch.cat([train, images(2, 7, 9.0)])], progress=False)


def test_taps_that_never_deviate_are_not_left_out_of_a_sum_that_divides_by_nothing():
    detector = GramDetector(made(), orders=(1,), normalise=False)
    detector.fit(images(400, 0).split(100), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GramwatchWarning)
        total = TotalDeviation(normalise=False).fit(torch.zeros(9, len(detector.taps)), torch.ones(9))
        detector.check_rule(GramRule(total))
