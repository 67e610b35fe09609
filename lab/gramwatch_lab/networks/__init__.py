"""The paper's networks, with the tensors that the published figures were computed from.

A class lists its watched tensors in `paper_taps`, which `taps="paper"` chooses. Parameter names are those of
the published checkpoints. `gramwatch.inputs.networks.load` reads such a checkpoint, and knows the input
normalisation of the network.
"""

from gramwatch_lab.networks.cifar_resnet import CifarResNet
from gramwatch_lab.networks.convnet import MnistConvNet
from gramwatch_lab.networks.densenet import DenseNet, densenet_bc_100_12
from gramwatch_lab.networks.mlp import MLP
from gramwatch_lab.networks.records import NETWORKS
from gramwatch_lab.networks.resnet import ResNet, resnet18, resnet34
from gramwatch_lab.networks.wide_resnet import WideResNet, wide_resnet_40_2

__all__ = [
    "MLP",
    "NETWORKS",
    "CifarResNet",
    "DenseNet",
    "MnistConvNet",
    "ResNet",
    "WideResNet",
    "densenet_bc_100_12",
    "resnet18",
    "resnet34",
    "wide_resnet_40_2",
]
