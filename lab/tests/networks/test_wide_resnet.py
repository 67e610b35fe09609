"""Wide ResNet: the tensors that the paper watches."""

import torch

import gramwatch
from gramwatch_lab.networks import wide_resnet_40_2


def paper_taps(make):
    return gramwatch.find_taps(make(), torch.randn(2, 3, 32, 32), "paper")


def test_wide_resnet_has_73_tensors():
    taps = paper_taps(wide_resnet_40_2)
    assert len(taps) == 73
    assert taps[0].name == "conv1"
    assert [t.name.rpartition(".")[2] for t in taps[1:5]] == ["relu1", "conv1", "relu2", "conv2"]
    assert not any("Shortcut" in tap.name for tap in taps)
