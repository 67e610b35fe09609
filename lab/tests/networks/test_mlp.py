"""MLPs: sizes and taps."""

import pytest
import torch

import gramwatch
from gramwatch.inputs import networks


@pytest.mark.parametrize(
    ("name", "count", "taps"),
    [
        ("mlp_300", 238_510, ["relu1"]),
        ("mlp_300_150", 282_160, ["relu1", "relu2"]),
        ("mlp_300_150_50", 288_710, ["relu1", "relu2", "relu3"]),
    ],
)
def test_mlps(name, count, taps):
    network = networks.build(name)
    assert sum(p.numel() for p in network.parameters()) == count
    result = gramwatch.find_taps(network, torch.rand(2, 1, 28, 28), "paper")
    assert [tap.name.removeprefix("layers.") for tap in result] == taps
