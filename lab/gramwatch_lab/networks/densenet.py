"""DenseNet-BC: bottleneck layers whose outputs are all concatenated, with compression between blocks.

Huang et al., "Densely Connected Convolutional Networks" (2017). The paper's "DenseNet3" has depth 100 and
growth 12. Parameter names are those of the published CIFAR checkpoints.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.watch import mark


class Bottleneck(nn.Module):
    """A 1 x 1 and a 3 x 3 convolution. The result is concatenated to the input."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The input, followed by the new channels."""
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat([x, out], 1)


class DenseBlock(nn.Module):
    """A chain of bottlenecks."""

    def __init__(self, count: int, width: int, growth: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(Bottleneck(width + i * growth, growth) for i in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        """The input, followed by the channels of all bottlenecks."""
        return mark(self.layer(x), "output")


class Transition(nn.Module):
    """A 1 x 1 convolution that halves the channels, then 2 x 2 pooling."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The reduced map."""
        return F.avg_pool2d(self.conv1(F.relu(self.bn1(x))), 2)


class DenseNet(nn.Module):
    """Three dense blocks for 32 x 32 images."""

    # Both convolutions of each bottleneck, the transitions' convolutions, the dense blocks' outputs.
    paper_taps = ("block*.layer.*.conv?", "trans?.conv1", "block?.output")

    def __init__(self, depth: int = 100, growth: int = 12, classes: int = 10) -> None:
        super().__init__()
        count = (depth - 4) // 6
        width = 2 * growth
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.block1 = DenseBlock(count, width, growth)
        width += count * growth
        self.trans1 = Transition(width, width // 2)
        self.block2 = DenseBlock(count, width // 2, growth)
        width = width // 2 + count * growth
        self.trans2 = Transition(width, width // 2)
        self.block3 = DenseBlock(count, width // 2, growth)
        width = width // 2 + count * growth
        self.bn1 = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out = self.trans1(self.block1(self.conv1(x)))
        out = self.block3(self.trans2(self.block2(out)))
        out = F.relu(self.bn1(out))
        logits: Tensor = self.fc(F.avg_pool2d(out, 8).flatten(1))
        return logits


def densenet_bc_100_12(classes: int = 10) -> DenseNet:
    """The paper's DenseNet: 48 bottlenecks; `taps="paper"` gives 101 tensors."""
    return DenseNet(100, 12, classes)
