"""Deviations and their total against the float64 transcription of the paper."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gramwatch.detect.measurement import Measurement
from gramwatch.methods.gram_rules import MeanOfRoots
from gramwatch.numerics.bounds import MeanVariance, MinMax
from gramwatch.numerics.deviation import CONFIDENCES, Layout, TotalDeviation, outside_range, tap_deviations
from tests import oracle

numbers = st.floats(-1e4, 1e4, width=32)


@given(numbers, numbers, numbers)
@settings(max_examples=300, deadline=None)
def test_each_deviation_is_eq_3(a, b, value):
    minimum, maximum = min(a, b), max(a, b)
    got = outside_range(*(torch.tensor(v, dtype=torch.float64) for v in (value, minimum, maximum)))
    assert got.item() == pytest.approx(oracle.delta_min_max(minimum, maximum, value), rel=1e-12)


def test_nan_and_infinity_are_never_taken_for_no_deviation():
    values = torch.tensor([float("nan"), float("inf"), -float("inf")])
    got = outside_range(values, torch.zeros(3), torch.ones(3))
    assert not got.isfinite().any()


@pytest.mark.parametrize("bounds_type", [MinMax, MeanVariance])
def test_tap_deviation_is_eq_4(bounds_type):
    orders, classes = (1, 2, 3), 3
    rng = np.random.default_rng(0)
    train = [[rng.normal(size=(4, 6)).astype(np.float32)] for _ in range(60)]
    test = [[2 * rng.normal(size=(4, 6)).astype(np.float32)] for _ in range(9)]
    train_class, test_class = np.arange(60) % classes, np.arange(9) % classes
    name = bounds_type.name
    first, second = oracle.compute_bounds(train, train_class, orders, "row_sums", classes, name)
    expected = oracle.deviations(test, test_class, orders, "row_sums", first, second, name)[:, 0]

    def stats(features):
        return torch.tensor(
            np.array([np.concatenate([oracle.stat(f[0], p, "row_sums") for p in orders]) for f in features])
        ).float()

    bounds = bounds_type(classes, (12,))
    bounds.update(stats(train), torch.from_numpy(train_class))
    got = tap_deviations(stats(test), torch.from_numpy(test_class), bounds, Layout.of([12]))
    assert (got > 0).all()
    np.testing.assert_allclose(got[:, 0].numpy(), expected, rtol=1e-4)


def test_each_tap_sums_its_own_features_as_often_as_they_count():
    bounds = MinMax(1, (6,))
    bounds.update(torch.ones(1, 6), torch.zeros(1, dtype=torch.long))
    statistics = torch.tensor([[2.0, 1.0, 1.0, 1.0, 4.0, 0.5]])
    zero = torch.zeros(1, dtype=torch.long)
    plain = tap_deviations(statistics, zero, bounds, Layout.of([2, 1, 3]))
    assert plain.tolist()[0] == pytest.approx([1, 0, 3.5], rel=1e-5)
    weights = torch.tensor([5.0, 5.0, 1.0, 1.0, 2.0, 4.0])
    weighted = tap_deviations(statistics, zero, bounds, Layout.of([2, 1, 3], weights))
    assert weighted.tolist()[0] == pytest.approx([5, 0, 6 + 2], rel=1e-5)


@pytest.mark.parametrize("confidence", CONFIDENCES)
@pytest.mark.parametrize("normalise", [True, False])
def test_total_deviation_is_eq_5(confidence, normalise):
    rng = np.random.default_rng(1)
    validation, test = rng.exponential(size=(50, 7)), 3 * rng.exponential(size=(20, 7))
    validation_confidence, test_confidence = rng.uniform(0.2, 1, 50), rng.uniform(0.2, 1, 20)
    expected = oracle.total_deviation(
        validation, validation_confidence, test, test_confidence, confidence, normalise
    )
    total = TotalDeviation(normalise, confidence)
    total.fit(torch.tensor(validation), torch.tensor(validation_confidence))
    got = total(torch.tensor(test), torch.tensor(test_confidence))
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_a_tap_that_never_deviates_is_left_out():
    deviations = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    total = TotalDeviation(confidence="none").fit(deviations, torch.ones(2))
    got = total(torch.tensor([[2.0, 100.0]]), torch.ones(1))
    assert got.item() == pytest.approx(1, rel=1e-6)


def test_expectations_shrink_towards_their_mean_over_the_taps() -> None:
    deviations = torch.tensor([[0.0, 3.0], [0.0, 1.0], [3.0, 2.0]], dtype=torch.float64)
    total = TotalDeviation(confidence="none", shrink=1).fit(deviations, torch.ones(3))
    assert total.expectation_ is not None
    assert total.expectation_.tolist() == pytest.approx([(3 + 1.5) / 4, (6 + 1.5) / 4])
    silent = TotalDeviation(confidence="none", shrink=3).fit(
        deviations * torch.tensor([0.0, 1.0]), torch.ones(3)
    )
    assert silent.expectation_ is not None
    assert silent.expectation_.tolist() == pytest.approx([0.5, 1.5])


def test_subtract_needs_a_deviation_to_divide_by():
    with pytest.raises(ValueError, match="largest deviation"):
        TotalDeviation(confidence="subtract").fit(torch.zeros(5, 2), torch.ones(5))


@pytest.mark.parametrize("confidence", ["divide", "none"])
def test_other_scores_need_no_deviation(confidence):
    """Deviations of zero are no reason to refuse where nothing is divided by the largest one."""
    total = TotalDeviation(confidence=confidence).fit(torch.zeros(5, 2), torch.ones(5))
    assert total(torch.zeros(3, 2), torch.ones(3)).tolist() == [0, 0, 0]


def test_a_second_fit_replaces_the_first() -> None:
    first, second = torch.rand(20, 3) + 0.1, 5 * torch.rand(20, 3) + 0.1
    certain = torch.ones(20)
    again = TotalDeviation().fit(first, certain)
    again(first, certain)
    again.fit(second, certain)
    assert torch.equal(again(first, certain), TotalDeviation().fit(second, certain)(first, certain))


@pytest.mark.parametrize("confidence", ["none", "divide", "divide_total"])
def test_the_mean_of_roots_is_over_the_taps_that_count(confidence) -> None:
    deviations = torch.tensor([[0.0, 3.0, 0.5], [0.0, 1.0, 4.0]], dtype=torch.float64)
    probability = torch.tensor([0.5, 0.8], dtype=torch.float64)
    logits = torch.stack([probability / (1 - probability), torch.ones(2)], 1).log()
    measured = Measurement(deviations, logits.double(), torch.ones(2, dtype=torch.bool))
    rule = MeanOfRoots(TotalDeviation(confidence=confidence)).fit(measured)
    divided = deviations if confidence == "none" else deviations / probability[:, None]
    expectation = (divided if confidence == "divide" else deviations).mean(0)
    roots = (divided[:, 1:] / (expectation[1:] + 1e-7)).sqrt()
    torch.testing.assert_close(rule(measured)[:, 0], roots.mean(1))
    torch.testing.assert_close(rule.terms(measured)[:, 1:], roots / 2)
    plain = MeanOfRoots(TotalDeviation(confidence=confidence, normalise=False)).fit(measured)
    torch.testing.assert_close(plain(measured)[:, 0], divided.sqrt().mean(1))


def test_the_mean_of_roots_is_zero_if_no_tap_ever_deviates() -> None:
    logits, finite = torch.rand(5, 4), torch.ones(5, dtype=torch.bool)
    rule = MeanOfRoots(TotalDeviation()).fit(Measurement(torch.zeros(5, 2), logits, finite))
    assert rule(Measurement(torch.rand(5, 2), logits, finite)).flatten().tolist() == [0] * 5


@pytest.mark.parametrize("confidence", ["none", "divide", "divide_total", "subtract"])
def test_shares_of_taps_add_up_to_the_score(confidence) -> None:
    deviations, probability = torch.rand(20, 3), torch.rand(20).double() / 2 + 0.5
    total = TotalDeviation(confidence=confidence).fit(3 * deviations, probability)
    score = total(deviations, probability)
    taken_off = probability if confidence == "subtract" else 0
    torch.testing.assert_close(total.shares(deviations, probability).sum(1) - taken_off, score)
