"""The paper's networks, with the tensors that the published figures were computed from.

A class lists its watched tensors in `paper_taps`, which `taps="paper"` chooses. Parameter names are those of
the published checkpoints. `load` reads such a checkpoint, and knows the input normalisation of the network.
Nothing in a file is executed. `timm:NAME` and `torchvision:NAME` are networks of these packages.
"""

from gramwatch.networks.cifar_resnet import CifarResNet
from gramwatch.networks.convnet import MnistConvNet
from gramwatch.networks.densenet import DenseNet, densenet_bc_100_12
from gramwatch.networks.loading import NETWORKS, Loaded, NetworkRecord, build, load, record_of
from gramwatch.networks.mlp import MLP
from gramwatch.networks.resnet import ResNet, resnet18, resnet34
from gramwatch.networks.wide_resnet import WideResNet, wide_resnet_40_2

__all__ = [
    "MLP",
    "NETWORKS",
    "CifarResNet",
    "DenseNet",
    "Loaded",
    "MnistConvNet",
    "NetworkRecord",
    "ResNet",
    "WideResNet",
    "build",
    "densenet_bc_100_12",
    "load",
    "record_of",
    "resnet18",
    "resnet34",
    "wide_resnet_40_2",
]
