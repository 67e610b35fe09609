"""Several methods side by side: fitted in one pass, or left out with a reason."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gramwatch import evaluate
from gramwatch.evaluation import compare
from gramwatch.methods import METHODS
from tests.compared import Net, made, outliers, training


class NotLinear(Net):
    def forward(self, x):
        x = F.relu(self.hidden(F.relu(self.conv(x)).mean((2, 3))))
        return F.normalize(x) @ F.normalize(self.head.weight).T


@pytest.fixture
def sets():
    return outliers()


@pytest.fixture
def net():
    return made()


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
    assert result.figures("auroc").shape == (len(methods) - 1, 2)  # the inputs are too small for image
    assert np.isfinite(result.figures("auroc")).all()


@pytest.mark.filterwarnings("ignore:.*fewer than 20:gramwatch.GramwatchWarning")
@pytest.mark.filterwarnings("ignore:.*the covariance:gramwatch.GramwatchWarning")
def test_methods_that_need_a_linear_head_are_left_out_with_a_reason(sets, monkeypatch):
    small_methods(monkeypatch)
    said = []
    result = compare.fitted(NotLinear().eval(), training(), compare.method_names("all"), said.append)
    needy = [m.record.title for m in METHODS.values() if m.looks_at & {"features", "head"}]
    assert not set(needy) & set(result)
    assert {"Guard", "Gram", "MSP", "energy"} <= set(result)
    assert list(result["Guard"].members) == ["gram", "profile", "class_ratio", "energy"]
    assert len(said) == len(needy) + 1
    assert sum("not made by one linear layer" in line for line in said) == len(needy)
    assert sum(line.startswith("image is left out: the input holds no image") for line in said) == 1


def test_method_names():
    assert compare.method_names("all") == ["guard", "gram", *METHODS]
    assert compare.method_names("energy, gram,energy") == ["energy", "gram"]
    with pytest.raises(ValueError, match="there is no method 'magic': choose from guard, gram"):
        compare.method_names("magic")
