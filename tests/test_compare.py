"""Several methods side by side: one pass over the data, one table, one picture."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from gramwatch import GramDetector, GramwatchWarning, InputError, evaluate, observation
from gramwatch.cli.app import app
from gramwatch.detector import fit_together
from gramwatch.methods import METHODS
from gramwatch.metrics import auroc
from gramwatch.paper import compare
from gramwatch.report.comparison import draw_comparison
from tests.pictures import size_of_drawing


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.head = nn.Conv2d(1, 6, 3), nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(F.relu(self.hidden(F.relu(self.conv(x)).mean((2, 3)))))


class NotLinear(Net):
    def forward(self, x):
        x = F.relu(self.hidden(F.relu(self.conv(x)).mean((2, 3))))
        return F.normalize(x) @ F.normalize(self.head.weight).T


@pytest.fixture
def sets():
    return {"noise": [3 * torch.randn(40, 1, 6, 6)], "flat": [torch.rand(30, 1, 1, 1).expand(30, 1, 6, 6)]}


@pytest.fixture
def net():
    net = Net().eval()
    with torch.no_grad():
        net.head.weight *= 20
        net.head.bias -= net(torch.randn(500, 1, 6, 6)).mean(0)
    return net


def training():
    x = torch.randn(200, 1, 6, 6)
    return [(part, torch.zeros(len(part), dtype=torch.long)) for part in x.split(50)]


def small_methods(monkeypatch):
    """Neighbours of 200 examples, not of 50,000."""
    for name in {"knn", "nnguide"} & set(METHODS):
        method = METHODS[name]
        monkeypatch.setitem(METHODS, name, type(method.__name__, (method,), {"__init__": _few(method)}))


def _few(method):
    def init(self, model, **options):
        method.__init__(self, model, **{"k": 5, **options})

    return init


@pytest.mark.filterwarnings("ignore:.*the covariance:gramwatch.GramwatchWarning")
@pytest.mark.filterwarnings("ignore:.*never deviate:gramwatch.GramwatchWarning")
def test_all_methods_without_gradients_share_one_pass(net, sets, monkeypatch):
    small_methods(monkeypatch)
    methods = [
        name
        for name in compare.method_names("all")
        if name in ("guard", "gram") or not METHODS[name](net).gradients
    ]
    detectors = compare.fitted(net, training(), methods)
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))
    result = evaluate(detectors, [torch.randn(60, 1, 6, 6)], sets, draws=2, progress=False)
    looking = 2 + 1  # for the taps, for the layer that makes the logits; once for all sets
    assert len(passes) == 3 + looking
    assert result.methods == list(detectors)
    assert result.sets == ["noise", "flat"]
    assert result.figures("auroc").shape == (len(methods), 2)
    assert np.isfinite(result.figures("auroc")).all()


def test_figures_are_those_of_each_method_alone(net, sets):
    inside = [torch.randn(60, 1, 6, 6)]
    detectors = {"e": METHODS["energy"](net), "m": METHODS["msp"](net)}
    together = evaluate(detectors, inside, sets, draws=1, validation_share=0.5, progress=False)
    alone = evaluate({"e": detectors["e"]}, inside, sets, draws=1, validation_share=0.5, progress=False)
    assert together.figures()[0].tolist() == alone.figures()[0].tolist()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[30:]
    scores = detectors["e"].score_all(inside, progress=False)[order]
    outside = detectors["e"].score_all(sets["noise"], progress=False)
    assert together.figures()[0, 0] == pytest.approx(auroc(scores, outside), abs=1e-12)


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


@pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")
@pytest.mark.filterwarnings("ignore:.*the covariance:gramwatch.GramwatchWarning")
def test_methods_that_need_a_linear_head_are_left_out_with_a_reason(sets, monkeypatch):
    small_methods(monkeypatch)
    said = []
    found = compare.fitted(NotLinear().eval(), training(), compare.method_names("all"), said.append)
    needy = [m.record.title for m in METHODS.values() if m.looks_at & {"features", "head"}]
    assert not set(needy) & set(found)
    assert {"Guard", "Gram", "MSP", "energy"} <= set(found)
    assert list(found["Guard"].members) == ["gram", "early_mahalanobis", "class_ratio", "energy"]
    assert len(said) == len(needy)
    assert all("not made by one linear layer" in line for line in said)


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


def test_the_picture_is_drawn(net, sets, tmp_path):
    detectors = {"energy": METHODS["energy"](net), "MSP": METHODS["msp"](net)}
    result = evaluate(detectors, [torch.randn(60, 1, 6, 6)], sets, progress=False)
    draw_comparison(tmp_path / "a.png", result, "a title")
    assert min(size_of_drawing(tmp_path / "a.png")) > 200


def test_method_names():
    assert compare.method_names("all") == ["guard", "gram", *METHODS]
    assert compare.method_names("energy, gram,energy") == ["energy", "gram"]
    with pytest.raises(ValueError, match="there is no method 'magic': choose from guard, gram"):
        compare.method_names("magic")


def test_the_command_prints_tables_and_draws(tmp_path):
    arguments = [
        "evaluate",
        "--methods",
        "guard,gram,msp",
        "--networks",
        "mlp",
        "--output",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "mlp, AUROC in percent" in result.output
    assert "worst" in result.output
    assert "\nGuard " in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"mlp.csv", "mlp.md", "mlp.png"}
    assert CliRunner().invoke(app, ["evaluate", "--methods", "magic"]).exit_code == 2


def test_the_command_shows_warnings_as_notes(tmp_path):
    arguments = [
        "evaluate",
        "--methods",
        "relative_mahalanobis",
        "--networks",
        "mlp",
        "--output",
        str(tmp_path),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "gramwatch", *arguments], capture_output=True, text=True, check=True
    )
    assert "note: the covariance of 128 features" in result.stderr
    assert "GramwatchWarning" not in result.stderr


@pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")
@pytest.mark.parametrize("most", [observation.MOST_STATISTICS, 0], ids=["at once", "in pieces"])
def test_gram_fitted_beside_others_is_what_it_is_alone(net, most, monkeypatch):
    monkeypatch.setattr(observation, "MOST_STATISTICS", most)
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
