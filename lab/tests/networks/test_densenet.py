"""DenseNet: the tensors that the paper watches."""

import torch

import gramwatch
from gramwatch_lab.networks import densenet_bc_100_12


def paper_taps(make):
    return gramwatch.find_taps(make(), torch.randn(2, 3, 32, 32), "paper")


def test_densenet_has_101_tensors_and_no_relu():
    taps = paper_taps(densenet_bc_100_12)
    assert len(taps) == 101
    assert {tap.operation for tap in taps} == {"conv2d", "mark"}
    assert sum(".layer." in tap.name for tap in taps) == 96
    assert [t.name for t in taps if t.name.startswith("trans")] == ["trans1.conv1", "trans2.conv1"]
    outputs = [tap for tap in taps if tap.name.endswith(".output")]
    assert [(tap.channels, tap.shape[2]) for tap in outputs] == [(216, 32), (300, 16), (342, 8)]
    transition = next(tap for tap in taps if tap.name == "trans1.conv1")
    assert transition.shape[2] == 32  # before pooling
