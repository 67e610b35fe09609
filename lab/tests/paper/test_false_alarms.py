"""The rate of false alarms: what is measured, and what chance allows."""

import pytest
import torch

from gramwatch.detect.joint import JointRule
from gramwatch.detect.measurement import Measurement
from gramwatch.methods.gram_rules import MeanOfRoots
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch_lab.paper import false_alarms
from gramwatch_lab.paper.false_alarm_study import shares
from gramwatch_lab.paper.false_alarms import simulated
from tests.guarded import largest_share


@pytest.mark.parametrize("calibration", [200, 1001])
def test_p_values_hold_on_the_whole(calibration):
    rates = false_alarms.rates(per_class=False, calibration=calibration, fresh=500, repeats=150, seed=3)
    for share, alpha in zip(rates.overall.tolist(), false_alarms.ALPHAS, strict=True):
        assert share <= largest_share(alpha, calibration - calibration // 2, 500, 150)
        assert share > alpha - 0.012  # and not by flagging nothing


def test_p_values_hold_for_each_class():
    calibration, fresh, repeats = 4000, 2000, 60
    rates = false_alarms.rates(per_class=True, calibration=calibration, fresh=fresh, repeats=repeats, seed=4)
    for i, alpha in enumerate(false_alarms.ALPHAS):
        for c, frequency in enumerate(false_alarms.SHARES[: -false_alarms.RARE]):
            most = largest_share(alpha, int(frequency * calibration / 2), int(frequency * fresh), repeats)
            assert rates.by_class[c, i] <= most
        rare = sum(false_alarms.SHARES[-false_alarms.RARE :])
        most = largest_share(alpha, int(rare * calibration / 2), int(rare * fresh), repeats)
        assert rates.rare[i] <= most
    on_the_whole = false_alarms.rates(
        per_class=False, calibration=calibration, fresh=fresh, repeats=repeats, seed=4
    )
    assert on_the_whole.by_class[-4, 1] > 0.06  # what per_class is for
    assert on_the_whole.rare[1] > 0.1


@pytest.mark.parametrize("shares", [false_alarms.SCARCE, false_alarms.BORDER])
def test_p_values_hold_where_classes_are_rare_or_near_the_limit(shares):
    """Rare classes that score higher must not be ranked among examples that score lower."""
    calibration, fresh, repeats = 2000, 1000, 200
    rates = false_alarms.rates(
        per_class=True, shares=shares, calibration=calibration, fresh=fresh, repeats=repeats, seed=5
    )
    least = min(share for share in shares if share >= 0.1)
    for i, alpha in enumerate(false_alarms.ALPHAS):
        assert rates.overall[i] <= largest_share(alpha, calibration // 2, fresh, repeats)
        for rates_of in (rates.alone, rates.shared):
            assert alpha / 2 < rates_of[i] <= largest_share(alpha, int(least * calibration / 2), 100, repeats)


def test_false_alarms_of_fresh_examples_are_as_chance_has_them() -> None:
    examples = simulated(3000, torch.Generator().manual_seed(5))
    rule = JointRule({"gram": MeanOfRoots(TotalDeviation())})
    whole, per_class = (
        shares(examples, rule, 1500, per_class_ranks, splits=60) for per_class_ranks in (False, True)
    )
    for row in (*whole, *per_class):
        assert (row.calibration, row.fresh) == (1500, 1500)
        spread = (row.chance_high - row.chance_low) / 4
        assert row.mean <= 100 * row.alpha + 3 * spread / 60**0.5
        assert row.mean >= row.chance_low
        assert row.low == pytest.approx(row.chance_low, abs=spread)
        assert row.high == pytest.approx(row.chance_high, abs=spread)
    # 750 examples rank. By 5 %: how far rates of one calibration are from it is the beta distribution's.
    deviation = 100 * (0.05 * 0.95 * (1 / 752 + 1 / 1500)) ** 0.5
    assert whole[1].chance_high - whole[1].chance_low == pytest.approx(4 * 0.98 * deviation, rel=0.06)
    assert [row.chance_class for row in whole] == [None] * 3
    for row in per_class:
        assert 0 < row.highest_class <= row.chance_class
    assert whole[2].highest_class > per_class[2].chance_class  # what per_class is for


def test_a_p_value_that_does_not_hold_is_seen() -> None:
    """Fresh examples score higher than those that calibrate."""
    examples = simulated(1200, torch.Generator().manual_seed(6))
    rule = JointRule({"gram": MeanOfRoots(TotalDeviation())})

    class Optimistic(JointRule):
        def __call__(self, measured: Measurement) -> torch.Tensor:
            scores = super().__call__(measured)
            return scores + 3 * (len(scores) > 400)  # only the fresh ones are so many

    result = shares(examples, Optimistic(rule.rules), 600, False, splits=20)
    assert all(row.mean > row.chance_high for row in result)
