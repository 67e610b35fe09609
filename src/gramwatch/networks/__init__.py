"""The paper's networks, with the tensors the published figures were computed from.

Each class names its watched tensors in `paper_taps`, which is what `taps="paper"` chooses, and uses the
parameter names of the published checkpoints.
"""

from gramwatch.networks.densenet import DenseNet, densenet_bc_100_12
from gramwatch.networks.resnet import ResNet, resnet34
from gramwatch.networks.wide_resnet import WideResNet, wide_resnet_40_2

__all__ = [
    "DenseNet",
    "ResNet",
    "WideResNet",
    "densenet_bc_100_12",
    "resnet34",
    "wide_resnet_40_2",
]
