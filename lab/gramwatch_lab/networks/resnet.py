"""ResNet-34 in its CIFAR form: a 3 x 3 first convolution, no pooling before the four stages.

He et al., "Deep Residual Learning for Image Recognition" (2016). Parameter names are those of the checkpoints
of Lee et al., "A Simple Unified Framework for Detecting Out-of-Distribution Samples" (2018).
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.watch import mark


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, added and passed through a ReLU."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = mark(self.shortcut(x), "shortcut")
        return F.relu(mark(out + shortcut, "sum"))


class ResNet(nn.Module):
    """Four stages of basic blocks for 32 x 32 images."""

    # In each block: conv1, relu(bn1), conv2, the shortcut, the sum before and after the last ReLU.
    paper_taps = (
        "layer*.*.conv1",
        "layer*.*.relu",
        "layer*.*.conv2",
        "layer*.*.shortcut",
        "layer*.*.sum",
        "layer*.*.relu#2",
    )

    def __init__(self, blocks: Sequence[int], classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        stages = []
        for stage, count in enumerate(blocks):
            sizes = [widths[stage], *[widths[stage + 1]] * count]
            strides = [1 if stage == 0 else 2, *[1] * (count - 1)]
            stages.append(
                nn.Sequential(*(BasicBlock(sizes[i], sizes[i + 1], strides[i]) for i in range(count)))
            )
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.linear = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        logits: Tensor = self.linear(F.avg_pool2d(out, 4).flatten(1))
        return logits


def resnet18(classes: int = 10) -> ResNet:
    """Two blocks in each of four stages, as benchmarks of CIFAR-10 use it."""
    return ResNet((2, 2, 2, 2), classes)


def resnet34(classes: int = 10) -> ResNet:
    """The paper's ResNet: 3, 4, 6 and 3 blocks; `taps="paper"` gives 96 tensors."""
    return ResNet((3, 4, 6, 3), classes)
