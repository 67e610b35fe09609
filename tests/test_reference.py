"""Every kind of detector still says what it once said: from its file, and fitted anew."""

import json
import runpy
import warnings
from pathlib import Path

import pytest
import torch

import gramwatch
from gramwatch.detect import calibrating, measurement
from gramwatch.detect.measurement import Calibration

DATA = Path(__file__).with_name("data")
MADE = runpy.run_path(str(DATA / "make_reference.py"))
NOTED = json.loads((DATA / "reference" / "numbers.json").read_text(encoding="utf-8"))["detectors"]


def assert_same(result, noted):
    """The same to 1e-6; ranks and verdicts exactly."""
    now = MADE["numbers"](result)
    assert now.keys() == noted.keys()
    for name, value in noted.items():
        if name in ("score", "deviations"):
            torch.testing.assert_close(
                torch.tensor(now[name], dtype=torch.float64),
                torch.tensor(value, dtype=torch.float64),
                rtol=1e-6,
                atol=1e-6,
            )
        elif name == "parts":
            assert {part: pytest.approx(p, abs=1e-12) for part, p in value.items()} == now[name]
        else:
            assert now[name] == pytest.approx(value, abs=1e-12), name


@pytest.mark.parametrize("name", NOTED)
def test_a_file_of_an_earlier_version_says_what_it_said(name):
    path = DATA / "reference" / f"{name}.safetensors"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
        detector = gramwatch.load(path, MADE["TinyNet"]())
    assert_same(detector(MADE["judged"]()), NOTED[name])


@pytest.fixture
def as_then(monkeypatch):
    """Halves drawn after all was measured, and ranks without a tolerance, as when the numbers were noted."""

    def halves(examples, seed):
        count = examples if isinstance(examples, int) else len(examples)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        return order[: count // 2], order[count // 2 :]

    for module in (calibrating, measurement):
        monkeypatch.setattr(module, "halves", halves)
    monkeypatch.setattr(measurement, "rounding_of", lambda scores: torch.zeros(scores.shape[1]).double())
    monkeypatch.setattr(Calibration, "tolerating", lambda calibration, tolerance, level: calibration)


@pytest.mark.parametrize("name", NOTED)
def test_a_detector_fitted_anew_says_what_it_said(name, tmp_path, as_then):
    detector = MADE["ready"](MADE["detectors"]()[name])
    assert_same(detector(MADE["judged"]()), NOTED[name])
    detector.save(tmp_path / "detector.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
        loaded = gramwatch.load(tmp_path / "detector.safetensors", MADE["TinyNet"]())
    assert_same(loaded(MADE["judged"]()), NOTED[name])


def test_every_method_has_a_reference():
    assert set(NOTED) == {*MADE["GRAMS"], *MADE["GUARDS"], *MADE["methods"]()}
