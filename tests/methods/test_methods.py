"""What all methods share, and the methods that see only the logits."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gramwatch
from gramwatch import InputError, NotFittedError
from gramwatch.evaluation.evaluate import fit_together
from gramwatch.methods import METHODS
from gramwatch.observe.observation import Observation
from tests.methods import plain

DOCS = Path(__file__).parents[2] / "docs" / "methods"
LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.0, 0.0, 0.0], [30.0, -30.0, 4.0]])
EVERY_METHOD = pytest.mark.parametrize("name", list(METHODS))


@pytest.fixture
def net():
    return plain.network()


@pytest.fixture
def data():
    return plain.examples()


def fitted(name, net, data):
    x, labels = data
    small = {"k": 5} if name in ("knn", "nnguide") else {}
    detector = METHODS[name](net, **small)
    return detector.fit(list(zip(x[:200].split(50), labels[:200].split(50), strict=True)), progress=False)


def ready(detector, data):
    """A method with a rule has a score only after a calibration."""
    if detector.rule().standardises:
        detector.calibrate([data[0][200:]], progress=False)
    return detector


def closed_form(name, logits):
    """Each score written out in float64."""
    z = logits.double().numpy()
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    if name == "msp":
        return [-max(row) for row in p]
    if name == "max_logit":
        return [-max(row) for row in z]
    if name == "energy":
        return [-np.log(sum(np.exp(v) for v in row)) for row in z]
    return [sum(v**0.1 * (1 - v) ** 0.1 for v in row) for row in p]


@pytest.mark.parametrize("name", ["msp", "max_logit", "energy", "gen"])
def test_scores_of_logits_equal_the_closed_form(name, net):
    score = METHODS[name](net).score(Observation(LOGITS))
    assert np.allclose(score.numpy(), closed_form(name, LOGITS), rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "theirs"), [("msp", "MaxSoftmax"), ("max_logit", "MaxLogit"), ("energy", "EnergyBased")]
)
def test_scores_of_logits_equal_those_of_pytorch_ood(name, theirs, net):
    detectors = pytest.importorskip("pytorch_ood.detector")
    their = getattr(detectors, theirs)(nn.Identity()).predict(LOGITS)
    ours = METHODS[name](net).score(Observation(LOGITS))
    assert torch.allclose(ours, their.double(), atol=1e-5)


def test_gen_equals_that_of_pytorch_ood_but_for_a_factor_and_its_clamp(net):
    """Theirs is the mean, not the sum, of probabilities clamped at 1e-7."""
    detectors = pytest.importorskip("pytorch_ood.detector")
    their = detectors.GEN(nn.Identity()).predict(LOGITS)
    ours = METHODS["gen"](net).score(Observation(LOGITS))
    assert torch.allclose(ours[:2], 3 * their[:2].double(), atol=1e-5)
    assert ours[2] < 3 * their[2]


def test_gen_counts_only_the_largest(net):
    score = METHODS["gen"](net, largest=1).score(Observation(LOGITS))
    p = LOGITS.double().softmax(1).amax(1)
    assert torch.allclose(score, p**0.1 * (1 - p) ** 0.1)


@EVERY_METHOD
def test_every_method_has_a_record_and_a_page(name):
    record = METHODS[name].record
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {record.title}"), f"docs/methods/{name}.md begins with another title"
    assert METHODS[name].name == name
    for field in dataclasses.fields(record):
        assert getattr(record, field.name) != "", f"{name} says nothing of {field.name}"
    assert any(year in record.paper for year in map(str, range(2016, 2027)))


@EVERY_METHOD
def test_fit_calibrate_judge_save_load(name, net, data, tmp_path):
    x, _ = data
    detector = fitted(name, net, data)
    with pytest.raises(NotFittedError, match="not calibrated"):
        detector(x[:2])
    detector.calibrate([x[200:]], progress=False)
    found = detector(x[:20])
    assert found.score.shape == found.is_ood.shape == (20,)
    assert torch.equal(found.is_ood, found.score > detector.threshold_)
    assert torch.equal(found.is_ood, found.p_value <= 1 - detector.level + 1e-12)
    assert torch.equal(found.predicted, net(x[:20]).argmax(1))
    assert repr(found).startswith("Detection:")
    detector.metadata["note"] = "a"
    detector.save(tmp_path / "d.safetensors")
    loaded = gramwatch.load(tmp_path / "d.safetensors", net)
    assert type(loaded) is type(detector)
    assert loaded.metadata == {"note": "a"}
    again = loaded(x[:20])
    assert torch.equal(again.score, found.score)
    assert torch.equal(again.p_value, found.p_value)


@EVERY_METHOD
def test_what_is_not_finite_scores_infinite_and_stays_out_of_the_fit(name, net, data):
    x, labels = data
    detector = ready(fitted(name, net, data), data)
    bad = x[:3].clone()
    bad[1] = torch.nan
    score = detector.score_inputs(bad)[1]
    assert torch.isinf(score[1])
    assert score[[0, 2]].isfinite().all()
    worse = x[:210].clone()
    worse[200:] = torch.inf
    both = METHODS[name](net, **({"k": 5} if name in ("knn", "nnguide") else {}))
    if both.learns:
        with pytest.warns(gramwatch.GramwatchWarning, match=r"^10 training example\(s\) with NaN") as caught:
            both.fit([(worse, labels[:210])], progress=False)
        assert len(caught) == 1
    ready(both, data)
    assert torch.allclose(both.score_inputs(x[:9])[1], detector.score_inputs(x[:9])[1], rtol=1e-5)


def test_fitting_together_equals_fitting_alone(net, data):
    x, labels = data
    small = {name: {"k": 5} if name in ("knn", "nnguide") else {} for name in METHODS}
    together = {name: METHODS[name](net, **small[name]) for name in METHODS}
    fit_together(together, list(zip(x[:200].split(50), labels[:200].split(50), strict=True)), progress=False)
    for name, detector in together.items():
        alone = ready(fitted(name, net, data), data).score_inputs(x[200:])[1]
        ready(detector, data)
        assert torch.allclose(detector.score_inputs(x[200:])[1], alone, rtol=1e-6), name


def test_a_method_that_must_be_fitted_says_so(net, data):
    for name, method in METHODS.items():
        if method.record.fitted:
            with pytest.raises(NotFittedError, match=f"{name} is not fitted"):
                method(net).score_inputs(data[0][:2])
            with pytest.raises(InputError, match="nothing to fit"):
                method(net).fit([], progress=False)


def test_features_of_another_size_are_refused(net, data):
    for name, method in METHODS.items():
        if "features" in method.looks_at and method.record.fitted:
            detector = fitted(name, net, data)
            with pytest.raises(InputError, match=f"{name} was fitted on 12 features, 7 were given"):
                detector.judged(Observation(LOGITS, torch.randn(3, 7), None))
