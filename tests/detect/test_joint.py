"""The rule that joins scores: standardising, joining, and taps that say nothing."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from gramwatch.detect.joint import JointRule, Standard
from gramwatch.detect.measurement import Measurement
from gramwatch.methods.gram_rules import MeanOfRoots
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch_lab.paper import false_alarms


def test_taps_that_never_deviate_are_left_out_of_the_mean():
    measured = false_alarms.simulated(100, torch.Generator().manual_seed(0))
    gram = measured.parts["gram"]
    silent = dataclasses.replace(gram, values=F.pad(gram.values, (0, 3)))
    with_silent = Measurement.together({**measured.parts, "gram": silent})
    scores = [
        JointRule({"gram": MeanOfRoots(TotalDeviation())}).fit(each).member_scores(each)
        for each in (measured, with_silent)
    ]
    torch.testing.assert_close(*scores)


def test_standardising_leaves_out_what_is_constant():
    scores = torch.stack([torch.linspace(-3, 5, 50), torch.full((50,), 0.1)], 1).double()
    standard = Standard().fit(scores)
    found = standard(scores)
    assert found[:, 0].median().item() == pytest.approx(0, abs=0.05)
    assert found[:, 0].quantile(0.99).item() == pytest.approx(1)
    assert (standard(scores + 1)[:, 1] == 0).all()


def test_where_most_scores_are_equal_the_standard_deviation_serves():
    scores = torch.zeros(100, 1).double()
    scores[0] = 5.0  # median and 99th percentile are nearly equal
    standard = Standard().fit(scores)
    torch.testing.assert_close(standard.tail_, scores.std(0, correction=0))
    assert standard(scores)[0] > 5


def test_a_rule_can_standardise_and_join_otherwise():
    class Doubled(Standard):
        def __call__(self, scores):
            return 2 * super().__call__(scores)

    class Highest(JointRule):
        def joined(self, scores):
            return self.standard(scores).amax(1)

    measured = false_alarms.simulated(200, torch.Generator().manual_seed(0))
    rules = {"gram": MeanOfRoots(TotalDeviation())}
    plain = JointRule(rules).fit(measured)
    highest = Highest(rules, Doubled()).fit(measured)
    scores = plain.member_scores(measured)
    median = scores.quantile(0.5, 0)
    floored = scores.maximum(scores.quantile(0.25, 0))
    standardised = (floored - median) / (scores.quantile(0.99, 0) - median)
    torch.testing.assert_close(plain(measured)[:, 0], standardised.sum(1))
    torch.testing.assert_close(plain(measured)[:, 1:], scores)
    torch.testing.assert_close(highest(measured)[:, 0], 2 * standardised.amax(1))


def test_a_fit_leaves_the_rule_and_earlier_fits_as_they_are():
    """`evaluate` fits one rule draw by draw."""
    one, other = (false_alarms.simulated(200, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    rule = JointRule({"gram": MeanOfRoots(TotalDeviation())})
    first = rule.fit(one)
    scores = first(one)
    second = rule.fit(other)
    assert not torch.equal(second(one), scores)
    assert torch.equal(first(one), scores)
    assert rule.rules["gram"].total.expectation_ is None
    assert rule.standard.median_ is None


def test_scores_that_differ_by_rounding_only_are_constant():
    scores = torch.stack([torch.linspace(-3, 5, 50), 7 + 1e-10 * torch.linspace(-1, 1, 50).double()], 1)
    standard = Standard().fit(scores.double())
    assert standard.tail_.isinf().tolist() == [False, True]
    assert (standard(scores.double() + 1)[:, 1] == 0).all()
