"""What all methods share: settings, the sample of the training data, states, files."""

import dataclasses
from typing import ClassVar

import pytest
import torch

import gramwatch
from gramwatch import CalibrationError, GramwatchWarning, InputError
from gramwatch.files import artifact
from gramwatch.files.artifact import FINITE, NOT_NEGATIVE, Field
from gramwatch.methods import METHODS
from gramwatch.methods.base import Method, Record, _Sample
from gramwatch.observe.observation import Observation
from tests.methods import plain


@pytest.fixture
def net():
    return plain.network()


@pytest.fixture
def data():
    return plain.examples()


def test_settings_are_checked(net):
    with pytest.raises(ValueError, match="level must lie between"):
        METHODS["msp"](net, level=1.0)
    with pytest.raises(ValueError, match="most_examples"):
        METHODS["msp"](net, most_examples=0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        METHODS["energy"](net, temperature=0)
    with pytest.raises(ValueError, match="gamma"):
        METHODS["gen"](net, gamma=2)


def test_too_few_calibration_examples_are_refused(net, data):
    with pytest.raises(CalibrationError, match="at least 19 are needed"):
        METHODS["msp"](net).calibrate([data[0][:10]], progress=False)


def test_a_file_of_another_method_or_with_a_foreign_tensor_is_refused(net, data, tmp_path):
    path = tmp_path / "d.safetensors"
    METHODS["msp"](net).calibrate([data[0]], progress=False).save(path)
    saved = artifact.read(path)
    header = {key: saved.header[key] for key in ("settings", "network", "shapes", "metadata")}
    artifact.write(path, header | {"detector": "oracle"}, {"calibration.scores": torch.zeros(300)})
    with pytest.raises(gramwatch.ArtifactError, match="'oracle', which this version does not know"):
        gramwatch.load(path, net)
    header["shapes"] = {"_fitted": [1]}
    artifact.write(path, header | {"detector": "msp"}, {"_fitted": torch.zeros(1)})
    with pytest.raises(gramwatch.ArtifactError, match="'_fitted' does not belong"):
        gramwatch.load(path, net)


def test_the_sample_is_bounded_uniform_and_repeatable():
    def sampled(seed, sizes):
        sample = _Sample(50, seed)
        start = 0
        for size in sizes:
            sample.add(Observation(torch.arange(start, start + size)[:, None].float()))
            start += size
            assert len(sample) <= 100 + size
        return sample.observation().logits.flatten().long()

    first = sampled(0, [40] * 25)
    assert len(first) == 50
    assert torch.equal(first, sampled(0, [100] * 10))
    assert not torch.equal(first, sampled(1, [40] * 25))
    counts = torch.zeros(1000)
    for seed in range(200):
        counts[sampled(seed, [250] * 4)] += 1
    # 10 of 200 each: a fifth of all stays within 4 standard deviations over any quarter.
    assert abs(counts[:250].sum() / counts.sum() - 0.25) < 0.02
    assert counts.max() < 10 + 6 * 10**0.5


class Extent(Method):
    """How far the logits lie outside the range of training logits. Its states declare how they reduce."""

    name = "extent"
    record = Record("extent", "a test, 2026", "max_c max(z - top, bottom - z)", fitted=True)
    running = True
    kept: ClassVar = {
        "top_": Field(("classes",), torch.float32, FINITE, reduce="max"),
        "bottom_": Field(("classes",), torch.float32, FINITE, reduce="min"),
        "sum_": Field(("classes",), torch.float64, FINITE, reduce="sum"),
        "mean_": Field(("classes",), torch.float64, FINITE, reduce="mean"),
        "count_": Field((), torch.int64, NOT_NEGATIVE, reduce="sum"),
    }

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.top_ = self.bottom_ = self.sum_ = self.mean_ = self.count_ = None

    def take(self, observation):
        z = observation.logits
        self.add_states(
            {
                "top_": z.amax(0),
                "bottom_": z.amin(0),
                "sum_": z.double().sum(0),
                "mean_": z.double().mean(0),
                "count_": torch.tensor(len(z)),
            }
        )
        return 0

    def score(self, observation):
        z = observation.logits
        return torch.maximum(z - self.top_, self.bottom_ - z).amax(1)


def test_states_are_fitted_further_merged_and_resumed_as_they_declare(net, data, tmp_path):
    x = data[0]
    with torch.no_grad():
        z = net(x[:200])
    expected = {
        "top_": z.amax(0),
        "bottom_": z.amin(0),
        "sum_": z.double().sum(0),
        "mean_": z.double().mean(0),
        "count_": torch.tensor(200),
    }
    further = Extent(net).fit([x[:30]], progress=False).fit(x[30:200].split(64), progress=False)
    merged = Extent(net).fit([x[:120]], progress=False)
    merged.merge(Extent(net).fit([x[120:200]], progress=False))

    def interrupted():
        yield x[:70]
        raise KeyboardInterrupt

    checkpoint = tmp_path / "c.safetensors"
    with pytest.raises(KeyboardInterrupt):
        Extent(net).fit(interrupted(), checkpoint=checkpoint, progress=False)
    resumed = Extent(net).fit([x[:70], x[70:200]], checkpoint=checkpoint, progress=False)
    for detector in (further, merged, resumed):
        found = detector.state()
        assert found.keys() == expected.keys()
        for name, state in expected.items():
            torch.testing.assert_close(found[name], state)


class Careful(Extent):
    """Looks at the features, too, and hands nothing over for a batch without finite examples."""

    name = "careful"
    looks_at = frozenset({"features"})

    def take(self, observation):
        finite = observation[observation.finite]
        if len(finite):
            super().take(finite)
        return len(observation) - len(finite)


def test_a_running_method_that_took_in_nothing_is_not_fitted(net, data):
    x = data[0][:2].clone()
    x[:] = torch.nan
    detector = Careful(net)
    with (
        pytest.warns(GramwatchWarning, match="2 training example"),
        pytest.raises(InputError, match="careful has seen no finite training example"),
    ):
        detector.fit([x], progress=False)
    assert not detector.is_fitted
    detector.fit([data[0][:30]], progress=False)
    assert detector.count_ == 30


def test_states_that_do_not_declare_how_they_reduce_are_not_added(net, data, monkeypatch):
    one, two = (Extent(net).fit([part], progress=False) for part in data[0][:100].split(50))
    two.count_ = None
    with pytest.raises(InputError, match="extent was saved without its number of examples"):
        one.merge(two)
    two.count_, two.sum_ = torch.tensor(50), None
    with pytest.raises(InputError, match="extent was saved without sum_"):
        two.merge(one)
    silent = {name: dataclasses.replace(field, reduce=None) for name, field in Extent.kept.items()}
    monkeypatch.setattr(Extent, "kept", silent)
    with pytest.raises(NotImplementedError, match="extent says that it can be merged, but not how"):
        one.merge(two)
