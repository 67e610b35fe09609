"""The table of MLPs, on a small made-up MNIST."""

from dataclasses import replace

import pytest
import torch

from gramwatch import GramDetector
from gramwatch_lab.paper import experiment, mlp
from lab.tests.paper.made_up import NOISE

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


def test_mlp(options: experiment.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "RECIPE", {**mlp.RECIPE, "epochs": 4})
    options = replace(options, network="mlp_300_150_50", weights={})
    lines = experiment.run("mlp", options)
    result = {(line.ood, line.method): line for line in lines}
    assert result["KMNIST", "Gram"].their("auroc") == 99.11
    assert result["KMNIST", "Gram"].our("auroc") > 50
    assert result["Fashion-MNIST", "Gram"].ours is None
    told: list[str] = []
    experiment.run("mlp", replace(options, say=told.append))
    assert not any("trained on" in text or "fitted" in text or "judged" in text for text in told)


def test_one_order_stands_for_all_where_nothing_is_negative(options: experiment.Options) -> None:
    loaded = mlp.trained(replace(options, network="mlp_300"), "mlp_300", epochs=1)
    study = options.study(loaded, "mnist")
    batches = [batch[0] for batch in study.training_batches()]
    images = next(iter(study.test_batches(NOISE[0])))
    one, ten = (
        GramDetector(loaded.network, taps="paper", statistic="triangle", orders=orders)
        .fit(batches, progress=False)
        .measure(images)
        .deviations
        for orders in ([1], range(1, 11))
    )
    assert torch.allclose(10 * one, ten, rtol=1e-4)
