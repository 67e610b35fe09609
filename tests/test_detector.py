"""The detector as a user holds it: against the transcription, in all its forms, and with bad input."""

import signal
import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramwatch
from gramwatch import (
    CalibrationError,
    GramDetector,
    GramwatchWarning,
    InputError,
    NotFittedError,
    TapError,
)
from gramwatch.statistics import STATISTICS
from gramwatch.taps import observe
from tests import oracle

CLASSES = 3


class SmallNet(nn.Module):
    """Convolutions, functional ReLUs in place and not, a hidden vector."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 5, 3, padding=1)
        self.conv2 = nn.Conv2d(5, 6, 3)
        self.hidden = nn.Linear(6, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x), inplace=True)
        x = torch.tanh(self.hidden(x.mean((2, 3))))
        return self.head(x)


def images(count: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def net() -> SmallNet:
    torch.manual_seed(3)
    net = SmallNet()
    with torch.no_grad():
        net.head.weight *= 20  # so that all classes are predicted
        net.head.bias -= net(images(500, 9)).mean(0)
    return net.eval()


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


def assert_same_bounds(a: GramDetector, b: GramDetector) -> None:
    mine, theirs = a._bounds.state(), b._bounds.state()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name])


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
    order = torch.randperm(81, generator=torch.Generator().manual_seed(5))
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
    assert detector.threshold_ == pytest.approx(oracle.threshold(calibration, 0.9), rel=1e-9)
    ranks = detector.calibration_scores_.numpy()
    for i in range(30):
        p = oracle.p_value(ranks, found.score[i].item())
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


def test_a_detection_holds_what_it_says(ready):
    found = ready(images(7, 3))
    assert len(found) == 7
    assert found.logits.shape == (7, CLASSES)
    assert found.deviations.shape == (7, len(ready.taps))
    assert torch.equal(found.predicted, found.logits.argmax(1))
    assert torch.equal(found.class_support, ready.class_counts_[found.predicted])
    assert found.is_ood.dtype == torch.bool
    assert "of 7 out-of-distribution" in repr(found)
    assert not found.score.is_inference()


def test_batches_of_one_and_ragged_batches_give_the_same(ready):
    x = images(11, 3)
    whole = ready(x)
    for size in (1, 4):
        parts = [ready(part) for part in x.split(size)]
        torch.testing.assert_close(torch.cat([p.score for p in parts]), whole.score, rtol=1e-3, atol=1e-3)
        assert torch.equal(torch.cat([p.predicted for p in parts]), whole.predicted)


def test_loaders_may_yield_tensors_tuples_lists_or_dicts(net):
    x = images(120, 0)
    reference = GramDetector(net).fit([x]).class_counts_

    class TakesKeywords(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, pixel_values, other=None):
            return SimpleNamespace(logits=self.net(pixel_values))

    class TakesTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, a, b):
            return {"logits": self.net(a + b)}

    labels = torch.zeros(40)
    for batches in (x.split(40), [(p, labels) for p in x.split(40)], [[p, labels] for p in x.split(40)]):
        assert torch.equal(GramDetector(net).fit(batches).class_counts_, reference)
    as_dicts = [{"pixel_values": p, "labels": labels} for p in x.split(40)]
    detector = GramDetector(TakesKeywords()).fit(as_dicts)
    assert torch.equal(detector.class_counts_, reference)
    assert len(detector.measure({"pixel_values": x}).deviations) == 120
    pairs = [((p, torch.zeros_like(p)), labels) for p in x.split(40)]
    detector = GramDetector(TakesTwo()).fit(pairs)
    assert torch.equal(detector.class_counts_, reference)
    assert len(detector.measure((x, torch.zeros_like(x))).deviations) == 120


def test_works_inside_inference_mode_and_outside(net):
    detector = GramDetector(net)
    with torch.inference_mode():
        detector.fit([images(100, 0)])
    detector.fit([images(100, 1)])
    with torch.inference_mode():
        detector.calibrate([images(100, 2)])
        inside = detector(images(5, 3)).score
    assert torch.equal(inside, detector(images(5, 3)).score)
    assert int(detector.class_counts_.sum()) == 200


def test_half_precision_networks_and_autocast(net):
    x = images(300, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        detector = GramDetector(net).fit(x.split(100)).calibrate([images(100, 1)])
        assert detector(images(50, 6, scale=8)).is_ood.all()
    half = SmallNet().bfloat16()
    half.load_state_dict(net.state_dict())
    detector = GramDetector(half).fit(x.bfloat16().split(100)).calibrate([images(100, 1).bfloat16()])
    assert detector(images(50, 6, scale=8).bfloat16()).is_ood.all()


def test_labels_are_ignored_predictions_are_not(net):
    x = images(120, 0)
    detector = GramDetector(net).fit([(x, torch.full((120,), 2))])
    assert torch.equal(detector.class_counts_, net(x).argmax(1).bincount(minlength=CLASSES))


def test_fitting_again_accumulates_and_asks_for_calibration(net):
    x = images(200, 0)
    twice = GramDetector(net).fit([x[:100]]).calibrate([images(100, 1)])
    twice.fit([x[100:]])
    with pytest.raises(NotFittedError, match="calibrate"):
        twice(x[:2])
    once = GramDetector(net).fit(x.split(100))
    assert_same_bounds(twice, once)


def test_merged_shards_equal_one_fit(net):
    x = images(450, 0)
    a, b, c = (GramDetector(net).fit([x[i : i + 150]]) for i in (0, 150, 300))
    merged = c.merge(a).merge(b)
    once = GramDetector(net).fit(x.split(150))
    assert torch.equal(merged.class_counts_, once.class_counts_)
    assert_same_bounds(merged, once)
    with pytest.raises(NotFittedError, match="calibrate"):
        merged(x[:2])


def test_merging_what_does_not_belong_together_is_refused(net, fitted):
    with pytest.raises(ValueError, match="orders"):
        fitted.merge(GramDetector(net, orders=(1, 2)).fit([images(100, 0)]))
    other = SmallNet().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="different weights"):
            fitted.merge(GramDetector(other).fit([images(100, 0)]))
    with pytest.raises(NotFittedError):
        fitted.merge(GramDetector(net))


def test_the_network_is_left_as_found(net):
    net.train()
    net.conv2.eval()
    before = {name: module.training for name, module in net.named_modules()}
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    detector = GramDetector(net).fit([images(100, 0)]).calibrate([images(100, 1)])
    detector(images(3, 2))
    assert {name: module.training for name, module in net.named_modules()} == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in net.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_two_threads_may_call_one_detector(ready):
    ready.model.train()
    batches = [images(40, seed) for seed in range(12)]
    expected = [ready(batch).score for batch in batches]
    found = [None] * len(batches)

    def work(numbers):
        for i in numbers:
            found[i] = ready(batches[i]).score

    threads = [threading.Thread(target=work, args=(range(k, 12, 3),)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert ready.model.training


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


# --- interruption ------------------------------------------------------------------------------------


def interrupted(batches, after):
    for number, batch in enumerate(batches):
        if number == after:
            # A shell's background jobs ignore the signal: ask for Python's own handling.
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.signal(signal.SIGINT, before)
        yield batch


def test_ctrl_c_keeps_the_state_so_far(net):
    detector = GramDetector(net)
    with pytest.raises(KeyboardInterrupt):
        detector.fit(interrupted(images(200, 0).split(50), after=3))
    assert int(detector.class_counts_.sum()) == 150
    detector.calibrate([images(100, 1)])
    assert len(detector(images(2, 2))) == 2


def test_a_checkpoint_resumes_where_it_stopped(net, tmp_path):
    batches = images(200, 0).split(50)
    path = tmp_path / "fit.safetensors"
    with pytest.raises(KeyboardInterrupt):
        GramDetector(net).fit(interrupted(batches, after=3), checkpoint=path)
    assert path.exists()
    run = []

    def counted():
        for batch in batches:
            run.append(len(batch))
            yield batch

    resumed = GramDetector(net).fit(counted(), checkpoint=path)
    once = GramDetector(net).fit(batches)
    assert torch.equal(resumed.class_counts_, once.class_counts_)
    assert_same_bounds(resumed, once)
    assert path.exists()  # nothing is lost if the process ends before `save`
    with pytest.warns(GramwatchWarning, match="holds all 4 batches already"):
        again = GramDetector(net).fit(batches, checkpoint=path)
    assert_same_bounds(again, once)
    again.save(tmp_path / "detector.safetensors")
    assert not path.exists()


def test_a_detector_may_be_saved_where_its_checkpoint_was(net, tmp_path):
    path = tmp_path / "fit.safetensors"
    GramDetector(net).fit([images(100, 0)], checkpoint=path).save(path)
    assert int(gramwatch.load(path, net).class_counts_.sum()) == 100


def test_a_checkpoint_that_cannot_be_written_is_told_before_the_first_batch(net, tmp_path):
    (tmp_path / "file").touch()
    seen = []
    with pytest.raises(OSError, match="cannot write"):
        GramDetector(net).fit((seen.append(1) for _ in range(3)), checkpoint=tmp_path / "file" / "fit")
    assert seen == []


def test_a_fit_after_an_interrupted_one_says_that_batches_may_count_twice(net):
    batches = images(200, 0).split(50)
    detector = GramDetector(net)
    with pytest.raises(KeyboardInterrupt):
        detector.fit(interrupted(batches, after=3))
    with pytest.warns(GramwatchWarning, match=r"interrupted after 3 batch.*reset\(\) forgets"):
        detector.fit(batches)
    assert int(detector.class_counts_.sum()) == 350
    detector.reset()
    with pytest.raises(NotFittedError):
        detector.taps  # noqa: B018
    detector.fit(batches)
    assert_same_bounds(detector, GramDetector(net).fit(batches))
    assert int(detector.class_counts_.sum()) == 200


def test_a_checkpoint_is_written_now_and_then(net, tmp_path, monkeypatch):
    monkeypatch.setattr("gramwatch.detector.CHECKPOINT_SECONDS", 0.0)
    path = tmp_path / "fit.safetensors"
    seen = []

    def watched():
        for batch in images(150, 0).split(50):
            seen.append(path.exists())
            yield batch

    GramDetector(net).fit(watched(), checkpoint=path)
    assert seen == [False, True, True]


def test_a_checkpoint_of_other_settings_is_refused(net, tmp_path):
    path = tmp_path / "fit.safetensors"
    with pytest.raises(KeyboardInterrupt):
        GramDetector(net).fit(interrupted(images(200, 0).split(50), after=2), checkpoint=path)
    with pytest.raises(gramwatch.ArtifactError, match="orders"):
        GramDetector(net, orders=(1, 2)).fit([images(50, 0)], checkpoint=path)
    GramDetector(net).fit([images(100, 0)]).save(path)
    with pytest.raises(gramwatch.ArtifactError, match="finished detector"):
        GramDetector(net).fit([images(50, 0)], checkpoint=path)


def test_a_checkpoint_longer_than_the_loader_is_refused(net, tmp_path):
    path = tmp_path / "fit.safetensors"
    with pytest.raises(KeyboardInterrupt):
        GramDetector(net).fit(interrupted(images(200, 0).split(50), after=3), checkpoint=path)
    with pytest.raises(InputError, match="holds 3 batches"):
        GramDetector(net).fit([images(50, 0)], checkpoint=path)


# --- bad input ---------------------------------------------------------------------------------------


def test_not_fitted(net):
    detector = GramDetector(net)
    for ask in (
        lambda: detector(images(1, 0)),
        lambda: detector.calibrate([images(50, 0)]),
        lambda: detector.save("x"),
        lambda: detector.class_counts_,
        lambda: detector.taps,
        lambda: detector.threshold_,
    ):
        with pytest.raises(NotFittedError, match=r"detector\.fit"):
            ask()
    assert "not fitted" in repr(detector)


def test_not_calibrated(fitted):
    with pytest.raises(NotFittedError, match=r"detector\.calibrate"):
        fitted(images(1, 0))
    assert "not calibrated" in repr(fitted)


def test_empty_loaders(net, fitted):
    for empty in ([], [images(0, 0)]):
        with pytest.raises(InputError, match="no example: there is nothing to fit"):
            GramDetector(net).fit(empty)
    with pytest.raises(InputError, match="no example"):
        fitted.calibrate([])
    with pytest.raises(InputError, match="empty tuple"):
        fitted.calibrate([()])


def test_an_empty_batch_among_others_is_harmless(net):
    detector = GramDetector(net).fit([images(100, 0), images(0, 0)])
    assert int(detector.class_counts_.sum()) == 100


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_inputs_when_scoring(ready, bad):
    x = images(5, 0)
    x[2, 0, 4, 4] = bad
    with pytest.warns(GramwatchWarning, match=r"1 input\(s\)"):
        found = ready(x)
    assert found.score[2] == float("inf")
    assert found.p_value[2] == 1 / (len(ready.calibration_scores_) + 1)
    assert found.is_ood[2]
    others = [0, 1, 3, 4]
    torch.testing.assert_close(found.score[others], ready(x[others]).score, rtol=1e-4, atol=1e-4)


def test_non_finite_activations_when_scoring(ready):
    x = images(3, 0)
    x[1] *= 1e30  # finite, but its products are not
    with pytest.warns(GramwatchWarning, match=r"1 input\(s\)"):
        found = ready(x)
    assert found.score.isfinite().tolist() == [True, False, True]
    assert found.is_ood[1]


def test_non_finite_examples_are_left_out_of_fit_and_calibration(net):
    train, validation = images(100, 0), images(100, 1)
    broken_train, broken_validation = train.clone(), validation.clone()
    broken_train[[3, 50]] = float("nan")
    broken_validation[7, 0, 0, 0] = float("inf")
    with pytest.warns(GramwatchWarning, match=r"2 training example\(s\)"):
        detector = GramDetector(net).fit([broken_train])
    with pytest.warns(GramwatchWarning, match=r"1 calibration example\(s\)"):
        detector.calibrate([broken_validation], split=False)
    good = [i for i in range(100) if i not in (3, 50)]
    clean = GramDetector(net).fit([train[good]])
    clean.calibrate([validation[[i for i in range(100) if i != 7]]], split=False)
    torch.testing.assert_close(detector.calibration_scores_, clean.calibration_scores_, rtol=1e-3, atol=1e-3)


def test_nothing_finite_to_fit(net):
    with pytest.warns(GramwatchWarning), pytest.raises(InputError, match="every training example"):
        GramDetector(net).fit([images(10, 0) * float("nan")])


def test_other_shapes_and_dtypes_than_at_fit(ready):
    with pytest.raises(InputError, match=r"float32 \(2, 8, 8\).*float32 \(1, 8, 8\)"):
        ready(torch.randn(2, 2, 8, 8))
    with pytest.raises(InputError, match=r"float32 \(8, 8\).*float32 \(1, 8, 8\)"):
        ready(torch.randn(2, 8, 8))
    with pytest.raises(InputError, match="uint8"):
        ready(images(2, 0).byte())


def test_a_network_converted_to_half_precision_keeps_its_detector(net, ready, tmp_path):
    ready.save(tmp_path / "detector.safetensors")
    net.bfloat16()
    with pytest.raises(gramwatch.ArtifactError, match="other weights"):
        gramwatch.load(tmp_path / "detector.safetensors", net)
    detector = gramwatch.load(tmp_path / "detector.safetensors", net, accept_other_weights=True)
    assert detector(images(50, 6, scale=8).bfloat16()).is_ood.all()
    assert detector(images(100, 5).bfloat16()).is_ood.double().mean() < 0.3


def test_a_number_of_classes_that_changes(net, ready):
    net.head = nn.Linear(4, 5)
    with pytest.raises(InputError, match=r"5 classes.*3"):
        ready(images(2, 0))


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


@pytest.mark.filterwarnings("ignore:.*never deviate")
def test_too_few_calibration_examples(fitted):
    with pytest.raises(CalibrationError, match="at least 38 are needed"):
        fitted.calibrate([images(37, 1)])
    fitted.calibrate([images(38, 1)])
    assert len(fitted.calibration_scores_) == 19
    with pytest.raises(CalibrationError, match="at least 19 are needed"):
        fitted.calibrate([images(18, 1)], split=False)
    fitted.calibrate([images(19, 1)], split=False)


def test_calibrating_on_training_data_is_refused(fitted):
    with pytest.raises(CalibrationError, match="look like training examples"):
        fitted.calibrate(images(300, 0).split(11))


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
