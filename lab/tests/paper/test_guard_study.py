"""The study of Guard: rules to join members, forms of Gram, and the figures in the docs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gramwatch.detect.joint import JointRule, Standard
from gramwatch.detect.measurement import Measurement
from gramwatch.guard.guard import Guard
from gramwatch.methods.gram_rules import MeanOfRoots
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch_lab.paper import guard_study
from gramwatch_lab.paper.false_alarms import simulated
from tests.guarded import made

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def measured() -> Measurement:
    return simulated(300, torch.Generator().manual_seed(0))


def scores_by(measured: Measurement, standard: Standard) -> torch.Tensor:
    return JointRule({"gram": MeanOfRoots(TotalDeviation())}, standard).fit(measured)(measured)[:, 0]


def test_every_rule_differs_from_guards_in_what_it_says() -> None:
    titles = [variant.title for variant in guard_study.VARIANTS]
    assert titles[0] == guard_study.GUARD
    assert len(set(titles)) == len(titles)
    for variant in guard_study.VARIANTS:
        assert (guard_study.GRAM in variant.rule().rules) == (guard_study.GRAM in variant.members)


def test_the_first_rule_is_a_guards() -> None:
    net = made()
    guard, lean = Guard(net, members=guard_study.STUDIED), guard_study.LEAN.make(net)
    gram = guard.members["gram"]
    assert lean.settings_as_json() == gram.settings_as_json()
    variant = guard_study.VARIANTS[0]
    titles = [member.title for member in guard.members.values()]
    assert list(variant.members) == titles
    mine, theirs = variant.rule(), guard.rule()
    assert (list(mine.rules.values()), mine.standard) == (list(theirs.rules.values()), theirs.standard)


def test_every_form_of_gram_has_its_row() -> None:
    forms = [form.title for form in guard_study.forms_of("resnet20")]
    usual = (guard_study.GRAM, guard_study.LEAN.title)
    used = [variant.form for variant in guard_study.VARIANTS if variant.form not in usual]
    assert used == forms
    assert [form.title for form in guard_study.forms_of("mnist_convnet")] == forms[:-1]  # it has no blocks


def test_a_rule_takes_the_deviations_of_its_form(measured: Measurement) -> None:
    gram, energy = measured.parts["gram"], measured.parts["energy"]
    methods = {guard_study.GRAM: gram[:0], "other": gram, "energy": energy}
    form = guard_study.JoinVariant("", (guard_study.GRAM, "energy"), form="other")
    parts = form.measured(methods).parts
    assert torch.equal(parts[guard_study.GRAM].deviations, gram.deviations)
    assert torch.equal(parts["energy"].values, energy.values)

    halves = [
        replace(form, part=part).measured(methods).parts[guard_study.GRAM].deviations
        for part in (guard_study._first_half, guard_study._last_half)
    ]
    assert all(half.shape[1] for half in halves)
    assert torch.equal(torch.cat(halves, 1), gram.deviations)


def test_gram_is_compressed_tap_by_tap(measured: Measurement) -> None:
    gram = measured.parts["gram"]
    ways = {
        guard_study.Logarithms: lambda x: (1 + x).log().mean(),
        guard_study.CubeRoots: lambda x: (x ** (1 / 3)).mean(),
        guard_study.RootOfMean: lambda x: x.mean().sqrt(),
        guard_study.LogarithmOfMean: lambda x: (1 + x.mean()).log(),
        guard_study.Plain: lambda x: x.mean(),
        MeanOfRoots: lambda x: x.sqrt().mean(),
    }
    for way, formula in ways.items():
        rule = way(TotalDeviation()).fit(gram)
        expectation = rule.total.expectation_
        assert expectation is not None
        result = rule(gram)[:, 0]
        for i in (0, 17):
            normalised = gram.deviations[i].double() / gram.probability[i] / (expectation + 1e-7)
            assert result[i].item() == pytest.approx(formula(normalised).item()), way


def test_fisher_sums_logarithms_of_p_values(measured: Measurement) -> None:
    result = scores_by(measured, guard_study.LogarithmOfP())
    members = JointRule({"gram": MeanOfRoots(TotalDeviation())}).fit(measured).member_scores(measured)
    p = torch.stack([(1 + (members >= row).sum(0)) / 301 for row in members])
    torch.testing.assert_close(result, -p.log().sum(1), atol=1e-3, rtol=1e-3, check_dtype=False)


def test_stouffer_is_symmetric_about_the_median(measured: Measurement) -> None:
    standard = guard_study.NormalDeviate().fit(torch.linspace(0, 1, 999).double()[:, None])
    z = standard(torch.tensor([[0.5], [0.975], [0.025]]).double())[:, 0]
    assert z.tolist() == pytest.approx([0, 1.96, -1.96], abs=0.02)


def test_z_scores(measured: Measurement) -> None:
    scores = torch.linspace(-1, 3, 101).double()[:, None]
    z = guard_study.ZScore(floored=False).fit(scores)(scores)[:, 0]
    assert z.mean().item() == pytest.approx(0, abs=1e-9)
    assert z.std(correction=0).item() == pytest.approx(1)


def test_members_that_say_the_same_share_their_say() -> None:
    scores = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)).double()
    scores = torch.cat([scores, scores[:, 1:]], 1)
    z = guard_study.Decorrelated(floored=False).fit(scores)(scores)
    plain = guard_study.Adjusted(floored=False).fit(scores)(scores)
    weights = (z / plain)[0]
    assert weights[1].item() == pytest.approx(weights[2].item())
    variances = plain.var(0)
    assert weights[0].item() == pytest.approx(1 / variances[0].item(), rel=0.05)
    assert (weights[1] + weights[2]).item() == pytest.approx(1 / variances[1].item(), rel=0.05)


def test_an_exponential_tail_goes_on_beyond_the_examples() -> None:
    scores = torch.distributions.Exponential(1.0).icdf(torch.linspace(0.0005, 0.9995, 1000)).double()[:, None]
    tail = guard_study.ExponentialTail().fit(scores)
    result = tail(torch.tensor([[0.7], [5.0], [20.0]]).double())[:, 0]
    assert result.tolist() == pytest.approx([0.7, 5.0, 20.0], rel=0.03)  # -log p of an exponential is x


def test_classes_may_lie_at_different_heights() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.arange(4).repeat(500)
    logits = torch.nn.functional.one_hot(predicted, 4).double()
    scores = torch.randn(2000, generator=generator).double() + 3 * predicted
    finite = torch.ones(2000, dtype=torch.bool)
    measured = Measurement.together({"energy": Measurement(scores[:, None], logits, finite)})
    result = guard_study.PerClass({}).fit(measured)(measured)[:, 0]
    plain = JointRule({}).fit(measured)(measured)[:, 0]

    def gap(x: torch.Tensor) -> float:
        medians = torch.stack([x[predicted == c].median() for c in range(4)])
        return float(medians.max() - medians.min())

    assert gap(result) < 0.25 * gap(plain)
    assert result.median().item() == pytest.approx(0, abs=0.1)


def test_a_rule_is_fitted_anew_each_time(measured: Measurement) -> None:
    other = simulated(200, torch.Generator().manual_seed(1))
    for variant in guard_study.VARIANTS:
        rule = replace(variant, members=("gram", "fdbd", "energy")).rule()
        rule = replace(rule, rules={"gram": variant.gram})
        first = rule.fit(measured)(measured)
        again = rule.fit(other).fit(measured)(measured)
        assert torch.equal(first, again), variant.title
        assert rule.standard.median_ is None
        assert variant.gram.total.expectation_ is None


def test_rules_and_single_methods_stand_side_by_side(measured: Measurement) -> None:
    lean = guard_study.LEAN.title
    methods = {lean if name == "gram" else name: part for name, part in measured.parts.items()}
    variant = guard_study.JoinVariant("both", (guard_study.GRAM, "energy"))
    result = guard_study.WithRules(methods, [variant], ["fdbd"])
    assert list(result) == ["both", "fdbd"]
    assert len(result) == 2
    assert result["fdbd"] is methods["fdbd"]
    assert list(result["both"].parts) == [guard_study.GRAM, "energy"]
    assert torch.equal(result["both"].parts["energy"].values, methods["energy"].values)


def test_joins(measured: Measurement) -> None:
    z = torch.tensor([[-1.0, 2.0], [-3.0, -2.0]])
    assert guard_study._highest(z).tolist() == [2, -2]
    assert guard_study._squares(z).tolist() == [4, 0]
    assert guard_study._smooth_maximum(z)[0] == pytest.approx(2.0486, abs=1e-4)


# --- the figures in the docs -------------------------------------------------------------------------
