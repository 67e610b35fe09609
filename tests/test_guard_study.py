"""The study behind Guard, on a network small enough to be fitted here."""

import pytest
import torch

from gramwatch.deviation import TotalDeviation
from gramwatch.experiments import guard_study
from gramwatch.experiments.false_alarms import simulated
from gramwatch.joint import JointMeasurement, JointRule


@pytest.fixture
def measured() -> JointMeasurement:
    return simulated(300, torch.Generator().manual_seed(0))


def scores_by(measured: JointMeasurement, standard: object, join: object) -> torch.Tensor:
    totals = {"gram": TotalDeviation()}
    return JointRule(totals, standard, join).fit(measured)(measured)  # type: ignore[arg-type]


def test_every_rule_differs_from_guards_in_what_it_says() -> None:
    titles = [each.title for each in guard_study.VARIANTS]
    assert titles[0] == guard_study.GUARD
    assert len(set(titles)) == len(titles)
    for each in guard_study.VARIANTS:
        assert (guard_study.GRAM in each.rule().totals) == (guard_study.GRAM in each.members)


def test_fisher_sums_logarithms_of_p_values(measured: JointMeasurement) -> None:
    found = scores_by(measured, guard_study.LogarithmOfP(), guard_study.sum_of_members)
    members = JointRule({"gram": TotalDeviation()}).fit(measured).member_scores(measured)
    p = torch.stack([(1 + (members >= row).sum(0)) / 301 for row in members])
    torch.testing.assert_close(found, -p.log().sum(1), atol=1e-3, rtol=1e-3, check_dtype=False)


def test_stouffer_is_symmetric_about_the_median(measured: JointMeasurement) -> None:
    standard = guard_study.NormalDeviate().fit(torch.linspace(0, 1, 999).double()[:, None])
    z = standard(torch.tensor([[0.5], [0.975], [0.025]]).double())[:, 0]
    assert z.tolist() == pytest.approx([0, 1.96, -1.96], abs=0.02)


def test_the_quartile_is_a_floor(measured: JointMeasurement) -> None:
    scores = torch.linspace(-1, 1, 101).double()[:, None]
    z = guard_study.FromQuartile().fit(scores)(scores)[:, 0]
    assert int((z == z.min()).sum()) == 26
    assert z[-1] == pytest.approx(1 / scores.std(correction=0).item())


def test_joins(measured: JointMeasurement) -> None:
    z = torch.tensor([[-1.0, 2.0], [-3.0, -2.0]])
    assert guard_study._highest(z).tolist() == [2, -2]
    assert guard_study._squares(z).tolist() == [4, 0]
    assert guard_study._smooth_maximum(z)[0] == pytest.approx(2.0486, abs=1e-4)


def test_sets_are_chosen_by_name() -> None:
    sets = guard_study.ood_sets("cifar10")
    chosen = {each.name for each in sets if guard_study._chosen(each, "tiny_imagenet, mnist")}
    assert chosen == {"tiny_imagenet", "mnist"}
    assert all(guard_study._chosen(each, "") for each in sets)
