"""The CIFAR ResNets of He et al., "Deep Residual Learning for Image Recognition" (2016), Sec. 4.2.

Three stages of n basic blocks with 16, 32 and 64 channels: depth 6n + 2. Shortcuts have no parameters
(option A): every second pixel is taken and the new channels are zero. Parameter names are those of the
checkpoints published with Idelbayev's "Proper ResNet Implementation for CIFAR10/CIFAR100 in PyTorch".
"""

import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.watch import mark


class IdentityBlock(nn.Module):
    """Two convolutions and a shortcut without parameters, added and passed through a ReLU."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if width_in == width else 2
        self.new_channels = width - width_in
        self.conv1 = nn.Conv2d(width_in, width, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.new_channels:
            before = self.new_channels // 2
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.new_channels - before)
            )
        return F.relu(mark(out + mark(x, "shortcut"), "sum"))


class CifarResNet(nn.Module):
    """Three stages of basic blocks for 32 x 32 images."""

    # As in the paper's ResNet: conv1, relu(bn1), conv2, the shortcut, the sum before and after the last ReLU.
    paper_taps = (
        "layer?.*.conv1",
        "layer?.*.relu",
        "layer?.*.conv2",
        "layer?.*.shortcut",
        "layer?.*.sum",
        "layer?.*.relu#2",
    )

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        count, rest = divmod(depth - 2, 6)
        if rest or count < 1:
            raise ValueError(f"a CIFAR ResNet has a depth of 6 n + 2 (20, 32, 44, 56, 110, ...), not {depth}")
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(*(IdentityBlock(width_in if i == 0 else width, width) for i in range(count)))
            for width_in, width in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        logits: Tensor = self.linear(F.avg_pool2d(out, 8).flatten(1))
        return logits
