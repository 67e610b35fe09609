"""The picture of several methods."""

import pytest
import torch

from gramwatch import evaluate
from gramwatch.evaluation.comparison import draw_comparison
from gramwatch.methods import METHODS
from tests.compared import made, outliers
from tests.drawings import size_of_drawing


@pytest.fixture
def sets():
    return outliers()


@pytest.fixture
def net():
    return made()


def test_the_picture_is_drawn(net, sets, tmp_path):
    detectors = {"energy": METHODS["energy"](net), "MSP": METHODS["msp"](net)}
    result = evaluate(detectors, [torch.randn(60, 1, 6, 6)], sets, progress=False)
    draw_comparison(tmp_path / "a.png", result, "a title")
    assert min(size_of_drawing(tmp_path / "a.png")) > 200
