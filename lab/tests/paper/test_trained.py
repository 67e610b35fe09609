"""The table of networks trained for detection, on a small made-up MNIST."""

from dataclasses import replace
from pathlib import Path

import pytest

from gramwatch.errors import InputError
from gramwatch.inputs import networks
from gramwatch_lab import datasets, training
from gramwatch_lab.paper import experiment
from lab.tests.paper.made_up import NOISE

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


def test_trained(options: experiment.Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gramwatch_lab.paper.trained.ood_sets", lambda name: NOISE)
    (file,) = options.weights.values()
    semantic = tmp_path / "semantic.safetensors"
    images = datasets.load("mnist", options.data, split="train")
    assert images.labels is not None
    training.train(
        networks.build("mnist_convnet"),
        images.images,
        images.labels,
        training.Semantic(),
        mean=[0.0],
        std=[1.0],
        epochs=1,
        checkpoint=semantic,
        name="mnist_convnet",
        progress=False,
    )
    files = {
        "cross_entropy": file,
        "prior_network": file,
        "variational_dirichlet": file,
        "semantic": semantic,
    }
    lines = experiment.run("trained", replace(options, weights=files))
    random = "Semantic (random label codes)"
    assert {line.method for line in lines} == {"MSP", "Gram", "DPN", "VD", random}
    assert sum(line.summary for line in lines) == 5
    assert all(line.ours is not None for line in lines)
    page = (options.output / "trained-mnist_convnet.md").read_text(encoding="utf-8")
    assert "Trained with outliers: DPN." in page
    assert "random label codes, not the paper's" in page
    assert "reverse-KL" not in page  # what is no file of ours does not say how it was trained
    with pytest.raises(InputError, match="no objective 'nonsense'"):
        experiment.run("trained", replace(options, weights={"nonsense": file}))
