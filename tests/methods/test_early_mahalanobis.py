"""Early Mahalanobis: a network of one stage."""

import torch
from torch import nn

from gramwatch.methods import METHODS
from tests.guarded import CLASSES, images


def test_a_network_of_one_stage_has_no_earlier_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(125, CLASSES)).eval()
    early, unit = (
        METHODS[name](net).fit(images(300, 0).split(64), progress=False).score_inputs(images(9, 1))[1]
        for name in ("early_mahalanobis", "unit_mahalanobis")
    )
    assert torch.equal(early, unit)
