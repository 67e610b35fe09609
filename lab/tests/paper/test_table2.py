"""Table 2 on a small made-up MNIST, and on the real one."""

from dataclasses import replace
from pathlib import Path

import pytest

from gramwatch_lab.paper import experiment
from lab.tests.paper.made_up import NOISE, rows_of

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


def test_table2(options: experiment.Options) -> None:
    lines = experiment.run("table2", replace(options, methods="msp,gram"))
    result = {(line.ood, line.method): line for line in lines}
    assert result["SVHN", "Gram"].ours is None
    assert result["Bernoulli noise", "Gram"].our("auroc") > 90
    assert result["KMNIST", "MSP"].ours.examples == 60
    table = rows_of(options.output / "table2-mnist_convnet.csv")
    assert len(table) == len(lines)
    absent = [r for r in table if r["images"] == "data not present"]
    assert {r["tnr"] for r in absent} == {""}
    page = (options.output / "table2-mnist_convnet.md").read_text(encoding="utf-8")
    assert "SVHN: data not present" in page
    assert "No method saw an outlier" in page
    assert (options.output / "table2-mnist_convnet.png").exists()


@pytest.mark.parametrize("tune", ["fgsm", "outliers"])
def test_table2_tuned(options: experiment.Options, tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramwatch_lab.paper.experiment.ood_sets", lambda name: NOISE[:1])
    options = replace(options, methods="odin,mahalanobis,gram", tune=tune, subset=100)
    lines = experiment.run("table2", options)
    assert {line.ours.examples for line in lines} == {80}
    page = (options.output / f"table2-mnist_convnet-{tune}.md").read_text(encoding="utf-8")
    words = {"fgsm": "FGSM examples", "outliers": "images of each out-of-distribution set"}
    assert f"ODIN and Mahalanobis tuned on {words[tune]}" in page
    tuned = list((options.output / "cells").glob("*mahalanobis-fitted*"))
    assert len(tuned) == 2  # untuned and tuned


def test_on_real_digits(shared_data: Path, shared_weights: Path, tmp_path: Path) -> None:
    """The authors' MNIST ConvNet with Outlier Exposure tells KMNIST from MNIST; Gram has no such help."""
    given = experiment.Options(
        tmp_path,
        network="mnist_convnet",
        weights={"oe": shared_weights / "mnist_convnet_outlier_exposure_tuned.pth"},
        data=shared_data,
        subset=300,
        methods="msp,gram",
        say=lambda text: None,
    )
    result = {(line.ood, line.method): line.our("auroc") for line in experiment.run("table2", given)}
    assert result["KMNIST", "MSP"] > 95
    assert result["Fashion-MNIST", "Gram"] > 99
    assert result["KMNIST", "Gram"] > 88
