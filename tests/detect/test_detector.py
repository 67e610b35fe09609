"""The life of a detector, with Gram as the example: fit, merge, resume, calibrate, call, and bad input."""

import signal
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gramwatch
from gramwatch import CalibrationError, GramDetector, GramwatchWarning, InputError, NotFittedError
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


def assert_same_bounds(a: GramDetector, b: GramDetector) -> None:
    mine, theirs = a._bounds.state(), b._bounds.state()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name])


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
    monkeypatch.setattr("gramwatch.detect.progress.CHECKPOINT_SECONDS", 0.0)
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
