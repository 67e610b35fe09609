"""Several methods evaluated side by side: each as alone, and an overview."""

import pytest
import torch

from gramwatch import GramDetector, InputError, evaluate
from gramwatch.detect.joint import JointRule
from gramwatch.detect.measurement import Measurement
from gramwatch.evaluation.evaluate import evaluate_measured
from gramwatch.methods import METHODS
from gramwatch.methods.gram_rules import MeanOfRoots
from gramwatch.numerics.deviation import TotalDeviation
from gramwatch.numerics.metrics import all_metrics, auroc
from gramwatch_lab.paper import guard_study
from gramwatch_lab.paper.false_alarms import simulated
from tests.compared import Net, made, outliers


@pytest.fixture
def sets():
    return outliers()


@pytest.fixture
def net():
    return made()


def test_figures_are_those_of_each_method_alone(net, sets):
    inside = [torch.randn(60, 1, 6, 6)]
    detectors = {"e": METHODS["energy"](net), "m": METHODS["msp"](net)}
    joint = evaluate(detectors, inside, sets, draws=1, validation_share=0.5, progress=False)
    alone = evaluate({"e": detectors["e"]}, inside, sets, draws=1, validation_share=0.5, progress=False)
    assert joint.figures()[0].tolist() == alone.figures()[0].tolist()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[30:]
    scores = detectors["e"].score_all(inside, progress=False)[order]
    outside = detectors["e"].score_all(sets["noise"], progress=False)
    assert joint.figures()[0, 0] == pytest.approx(auroc(scores, outside), abs=1e-12)


@pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")
def test_gram_beside_others_gives_what_it_gives_alone(net, sets):
    inside = [torch.randn(60, 1, 6, 6)]
    gram = GramDetector(net).fit([torch.randn(200, 1, 6, 6)], progress=False)
    alone = evaluate(gram, inside, sets, draws=3, progress=False)
    both = evaluate({"Gram": gram, "energy": METHODS["energy"](net)}, inside, sets, draws=3, progress=False)
    assert alone.figures()[0] == pytest.approx(both.figures()[0], abs=1e-12)
    assert "No method saw an outlier" in both.protocol


def test_methods_that_saw_outliers_are_named(net, sets):
    tuned = METHODS["energy"](net)
    tuned.tuned_ = torch.tensor(True)
    result = evaluate(
        {"a": tuned, "b": METHODS["msp"](net)}, [torch.randn(60, 1, 6, 6)], sets, progress=False
    )
    assert "Tuned on outliers: a. No other method saw one." in result.protocol


def test_detectors_of_other_networks_and_none_at_all_are_refused(net, sets):
    with pytest.raises(InputError, match="'b' judges another network"):
        evaluate({"a": METHODS["msp"](net), "b": METHODS["msp"](Net())}, [torch.randn(9, 1, 6, 6)], sets)
    with pytest.raises(InputError, match="no detector"):
        evaluate({}, [torch.randn(9, 1, 6, 6)], sets)


def test_the_overview_has_mean_and_worst_best_first(net, sets):
    detectors = {"energy": METHODS["energy"](net), "MSP": METHODS["msp"](net)}
    result = evaluate(detectors, [torch.randn(60, 1, 6, 6)], sets, progress=False)
    lines = result.overview().splitlines()
    assert lines[0].split() == ["method", "noise", "flat", "mean", "worst"]
    figures = 100 * result.figures()
    best = int(figures.mean(1).argmax())
    assert lines[2].startswith(result.methods[best])
    assert f"{figures[best].mean():.2f}" in lines[2]
    assert f"{figures[best].min():.2f} ({result.sets[int(figures[best].argmin())]})" in lines[2]
    with pytest.raises(ValueError, match="there is no metric 'auc'"):
        result.overview("auc")


@pytest.fixture
def measured() -> Measurement:
    return simulated(300, torch.Generator().manual_seed(0))


def test_the_first_draw_is_that_of_the_evaluation(measured: Measurement) -> None:
    generator = torch.Generator().manual_seed(1)
    inside, outside = {"Guard": measured}, {"far": {"Guard": simulated(200, generator)}}
    rules = {"Guard": JointRule({"gram": MeanOfRoots(TotalDeviation())})}
    kept, result = guard_study.scores_of_first_draw("Guard", inside, outside, rules)
    assert (len(kept), len(result["far"])) == (270, 200)
    row = evaluate_measured(inside, outside, rules, draws=1).rows[0]
    assert row.mean == pytest.approx(all_metrics(kept, result["far"]))
    validation = {"Guard": simulated(100, generator)}
    kept, result = guard_study.scores_of_first_draw("Guard", inside, outside, rules, validation)
    assert len(kept) == 300
    row = evaluate_measured(inside, outside, rules, validation=validation).rows[0]
    assert row.mean == pytest.approx(all_metrics(kept, result["far"]))
