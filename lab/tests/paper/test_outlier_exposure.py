"""The table with Outlier Exposure, on a small made-up MNIST."""

from dataclasses import replace

import pytest

from gramwatch.errors import InputError
from gramwatch_lab.paper import experiment
from gramwatch_lab.paper.beside import SEEN
from gramwatch_lab.paper.sets import OodSet
from lab.tests.paper.made_up import NOISE

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


def test_outlier_exposure(options: experiment.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    kmnist = OodSet("KMNIST", "kmnist", source="somewhere")
    monkeypatch.setattr("gramwatch_lab.paper.outlier_exposure.ood_sets", lambda name: [kmnist, *NOISE])
    (file,) = options.weights.values()
    both = {"cross_entropy": file, "outlier_exposure": file}
    lines = experiment.run("outlier_exposure", replace(options, weights=both, auxiliary="somewhere"))
    marked = {(line.network, line.method, line.ood) for line in lines if line.note == SEEN}
    assert marked == {
        *(("MNIST ConvNet, outlier_exposure", m, "KMNIST") for m in ("MSP", "Gram")),
        *(("MNIST ConvNet, outlier_exposure", m, "KMNIST") for m in ("Gram less MSP", "Gram over MSP")),
        ("MNIST ConvNet", "OE", "KMNIST"),
    }
    means = {line.method: line.ours for line in lines if line.summary}
    assert {method: mean.examples for method, mean in means.items()} == {"MSP": 2, "OE": 2, "Gram": 2}
    assert means["MSP"].mean == means["OE"].mean  # the same file
    with pytest.raises(InputError, match="two networks"):
        experiment.run("outlier_exposure", options)
