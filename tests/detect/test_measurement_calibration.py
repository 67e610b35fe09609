"""A calibration: which examples rank, how, and what decides the groups of classes."""

import pytest
import torch

from gramwatch import Guard
from gramwatch.detect.measurement import AsMeasured, Calibration, Measurement, halves, how_many_rank
from gramwatch.detect.threshold import class_groups
from tests.guarded import images, made


def measurement(predicted: torch.Tensor, classes: int = 2) -> Measurement:
    count = len(predicted)
    logits = torch.nn.functional.one_hot(predicted, classes).float()
    return Measurement(torch.rand(count, 1).double(), logits, torch.ones(count, dtype=torch.bool))


@pytest.mark.parametrize("examples", [40, 41])
@pytest.mark.parametrize("split", [True, False])
def test_as_many_rank_as_a_file_says(examples, split):
    measured = measurement(torch.zeros(examples, dtype=torch.int64))
    calibration = Calibration.of(measured, AsMeasured(), 0.95, split=split)
    assert len(calibration.scores) == how_many_rank(calibration.how)
    assert 2 * len(calibration.scores) >= examples


@pytest.mark.parametrize("enough", [True, False])
def test_examples_that_rank_do_not_decide_which_classes_are_ranked_together(enough):
    """Class 1 has 200 examples, and 100 are enough for a group of its own. One half has enough of them."""
    predicted = (torch.arange(1000) < 200).long()
    for seed in range(50):
        fitting, ranking = (predicted[half] for half in halves(1000, seed))
        if int(ranking.sum()) != 100 and (int(fitting.sum()) >= 100) == enough:
            break
    calibration = Calibration.of(measurement(predicted), AsMeasured(), 0.95, per_class=True, seed=seed)
    assert calibration.ranks.group_of.tolist() == class_groups(fitting, 2, 0.95).tolist()
    assert calibration.ranks.group_of.tolist() != class_groups(ranking, 2, 0.95).tolist()


def test_without_a_split_examples_rank_as_if_left_out_of_the_rule():
    guard = Guard(made(), orders=(1, 2)).fit([images(300, 0)], progress=False)
    measured = guard.measure_all([images(150, 1)], progress=False)
    guard.calibrate_on(measured, split=False)
    calibration = guard.calibration()
    expected = calibration.rule.left_out(measured)
    torch.testing.assert_close(calibration.scores, expected, rtol=0, atol=0)
    column = 1 + list(guard.members).index("profile")
    profile, rule = measured.parts["profile"], calibration.rule.rules["profile"]
    torch.testing.assert_close(expected[:, column], rule.left_out(profile)[:, 0], rtol=0, atol=0)
    # An example that fitted the rule looks more ordinary to it than one that did not.
    assert bool((expected[:, column] > calibration.rule(measured)[:, column]).all())


def test_an_example_is_finite_only_if_it_is_so_for_all_members():
    one, two = (measurement(torch.zeros(3, dtype=torch.int64)) for _ in range(2))
    one.finite[0], two.finite[1] = False, False
    assert Measurement.together({"one": one, "two": two}).finite.tolist() == [False, False, True]
