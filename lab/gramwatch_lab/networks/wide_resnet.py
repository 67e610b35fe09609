"""Wide ResNet: residual blocks with normalisation and ReLU before each convolution.

Zagoruyko & Komodakis, "Wide Residual Networks" (2016). The paper's Outlier Exposure tables use WRN-40-2.
Parameter names are those of the checkpoints of Hendrycks et al., "Deep Anomaly Detection with Outlier
Exposure".
"""

import torch.nn.functional as F
from torch import Tensor, nn


class WideBlock(nn.Module):
    """Two convolutions, each after normalisation and a ReLU, and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int, drop_rate: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.drop_rate = drop_rate
        self.convShortcut = nn.Conv2d(width_in, width, 1, stride, bias=False) if width_in != width else None

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        out = self.relu1(self.bn1(x))
        # If the width changes, the shortcut also starts from the normalised input.
        shortcut = x if self.convShortcut is None else self.convShortcut(out)
        out = self.relu2(self.bn2(self.conv1(out)))
        out = F.dropout(out, self.drop_rate, self.training)
        result: Tensor = shortcut + self.conv2(out)
        return result


class WideStage(nn.Module):
    """A chain of blocks of one width."""

    def __init__(self, count: int, width_in: int, width: int, stride: int, drop_rate: float) -> None:
        super().__init__()
        self.layer = nn.Sequential(
            *(
                WideBlock(width_in if i == 0 else width, width, stride if i == 0 else 1, drop_rate)
                for i in range(count)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """The stage's output."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """Three stages of wide blocks for 32 x 32 images."""

    # The first convolution, then both ReLUs and both convolutions of each block.
    paper_taps = ("conv1", "block?.layer.*.relu?", "block?.layer.*.conv?")

    def __init__(
        self, depth: int = 40, widen_factor: int = 2, classes: int = 10, drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        count = (depth - 4) // 6
        widths = (16, 16 * widen_factor, 32 * widen_factor, 64 * widen_factor)
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.block1 = WideStage(count, widths[0], widths[1], 1, drop_rate)
        self.block2 = WideStage(count, widths[1], widths[2], 2, drop_rate)
        self.block3 = WideStage(count, widths[2], widths[3], 2, drop_rate)
        self.bn1 = nn.BatchNorm2d(widths[3])
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(widths[3], classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out = self.block3(self.block2(self.block1(self.conv1(x))))
        out = self.relu(self.bn1(out))
        logits: Tensor = self.fc(F.avg_pool2d(out, 8).flatten(1))
        return logits


def wide_resnet_40_2(classes: int = 10, drop_rate: float = 0.0) -> WideResNet:
    """The paper's Wide ResNet; `taps="paper"` gives 73 tensors."""
    return WideResNet(40, 2, classes, drop_rate)
