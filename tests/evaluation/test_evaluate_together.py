"""Detectors that are fitted together: one pass, and each as alone."""

import pytest
import torch

from gramwatch import GramDetector, GramwatchWarning
from gramwatch.evaluation.evaluate import fit_together
from gramwatch.methods import METHODS
from gramwatch.observe.plan import MOST_STATISTICS
from tests.compared import made, training


@pytest.fixture
def net():
    return made()


@pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")
@pytest.mark.parametrize("most", [MOST_STATISTICS, 0], ids=["at once", "in pieces"])
def test_gram_fitted_beside_others_is_what_it_is_alone(net, most, monkeypatch):
    monkeypatch.setattr("gramwatch.observe.plan.MOST_STATISTICS", most)
    loader = training()
    loader[1][0][3] = torch.nan
    beside, alone = GramDetector(net), GramDetector(net)
    with pytest.warns(GramwatchWarning, match=r"1 training example\(s\) with NaN"):
        fit_together({"Gram": beside, "vim": METHODS["vim"](net)}, loader, progress=False)
    with pytest.warns(GramwatchWarning, match=r"1 training example\(s\) with NaN"):
        alone.fit(loader, progress=False)
    assert torch.equal(beside.class_counts_, alone.class_counts_)
    x = 2 * torch.randn(20, 1, 6, 6)
    assert torch.equal(beside.measure(x).deviations, alone.measure(x).deviations)


def test_fitting_together_takes_one_pass(net):
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))
    fit_together({"Gram": GramDetector(net), "vim": METHODS["vim"](net)}, training(), progress=False)
    looking = 2 + 1  # for the taps, for the layer that makes the logits
    assert len(passes) == len(training()) + looking
