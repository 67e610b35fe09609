"""The paper's networks: their published sizes."""

import pytest
import torch

from gramwatch_lab.networks import densenet_bc_100_12, resnet18, resnet34, wide_resnet_40_2

PARAMETERS = {
    resnet18: 11_173_962,
    resnet34: 21_282_122,
    densenet_bc_100_12: 769_162,
    wide_resnet_40_2: 2_243_546,
}


@pytest.mark.parametrize(
    ("make", "count"), list(PARAMETERS.items()), ids=lambda v: getattr(v, "__name__", "")
)
def test_sizes_are_the_published_ones(make, count):
    assert sum(p.numel() for p in make().parameters()) == count
    assert make(100)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)
