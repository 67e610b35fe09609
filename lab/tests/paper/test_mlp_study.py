"""The study of MLPs, on a small made-up MNIST."""

from dataclasses import replace

import pytest
import torch

from gramwatch.watch import find_taps
from gramwatch_lab.paper import experiment, mlp, mlp_study, sets

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


@pytest.mark.parametrize("kind", ["dropout", "batch_norm"])
def test_study_puts_layers_between(kind: str) -> None:
    network = mlp_study.with_between(kind).eval()
    images = torch.rand(3, 1, 28, 28)
    assert network(images).shape == (3, 10)
    taps = [tap.name for tap in find_taps(network, images, "paper")]
    assert taps == ["layers.relu1", "layers.relu2", "layers.relu3"]


def test_study(options: experiment.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("the recipe", "SGD, learning rate 0.1", "row sums")
    monkeypatch.setattr(mlp_study, "VARIANTS", {name: mlp_study.VARIANTS[name] for name in chosen})
    monkeypatch.setattr(
        mlp_study, "DIGITS", [digit_set for digit_set in sets.DIGITS if digit_set.name == "kmnist"]
    )
    monkeypatch.setattr(mlp, "RECIPE", {**mlp.RECIPE, "epochs": 2})
    lines = experiment.run("mlp_study", replace(options, network=None, weights={}))
    assert len(lines) == 3 * 2
    trained = list((options.output / "cells").glob("*-trained-*"))
    assert len(trained) == 2  # row sums judge the first network
