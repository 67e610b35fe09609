"""The facts about the paper's networks: how they are built, and how their inputs are normalised."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from gramwatch.inputs.foreign import Channels, NetworkRecord
from gramwatch.inputs.synthetic import OUTLIER_EXPOSURE
from gramwatch_lab.networks.cifar_resnet import CifarResNet
from gramwatch_lab.networks.convnet import MnistConvNet
from gramwatch_lab.networks.densenet import densenet_bc_100_12
from gramwatch_lab.networks.mlp import MLP
from gramwatch_lab.networks.resnet import resnet18, resnet34
from gramwatch_lab.networks.wide_resnet import wide_resnet_40_2


def _cifar(title: str, make: Callable[[int], nn.Module], mean: Channels, std: Channels) -> NetworkRecord:
    return NetworkRecord(title, make, (3, 32, 32), mean, std)


def _mnist(title: str, make: Callable[[int], nn.Module]) -> NetworkRecord:
    return NetworkRecord(title, make, (1, 28, 28), (0.0,), (1.0,))


def _mlp(*hidden: int) -> NetworkRecord:
    return _mnist("MLP " + "-".join(map(str, hidden)), partial(MLP, hidden))


CIFAR = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

NETWORKS: Mapping[str, NetworkRecord] = {
    "resnet34": _cifar("ResNet-34", resnet34, *CIFAR),
    "resnet18": _cifar("ResNet-18", resnet18, *CIFAR),
    "densenet": _cifar("DenseNet-BC-100-12", densenet_bc_100_12, *CIFAR),
    "wrn40_2": _cifar("WRN-40-2", wide_resnet_40_2, *OUTLIER_EXPOSURE),
    **{
        f"resnet{depth}": _cifar(f"ResNet-{depth}", partial(CifarResNet, depth), *IMAGENET)
        for depth in (20, 32, 44, 56, 110)
    },
    "mlp_300": _mlp(300),
    "mlp_300_150": _mlp(300, 150),
    "mlp_300_150_50": _mlp(300, 150, 50),
    "mnist_convnet": _mnist("MNIST ConvNet", MnistConvNet),
}
"""The networks by name."""
