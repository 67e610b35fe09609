"""The MNIST ConvNet: its taps."""

import torch

import gramwatch
from gramwatch.inputs import networks


def test_the_mnist_convnet_watches_every_layer_before_and_after_its_activation():
    taps = gramwatch.find_taps(networks.build("mnist_convnet"), torch.rand(2, 1, 28, 28), "paper")
    assert [tap.name for tap in taps] == ["conv1", "silu", "conv2", "silu#2", "fc1", "silu#3"]
