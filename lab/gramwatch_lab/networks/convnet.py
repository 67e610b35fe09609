"""A small convolutional network for MNIST, in the form for which Outlier Exposure checkpoints are published.

Hendrycks et al., "Deep Anomaly Detection with Outlier Exposure" (2019). Parameter names are those of the
authors' checkpoints. Pixels are in [0, 1]. Pooling comes before the activation, and the activation is the
sigmoid form of the GELU. The test accuracies of the checkpoints confirm this: they are 99.06, 98.97 and
99.08 % only in this form.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def _gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)`, the GELU's quick approximation."""
    return F.silu(1.702 * x) / 1.702


class MnistConvNet(nn.Module):
    """Two 5 x 5 convolutions, each followed by pooling and a GELU, and two linear layers."""

    # Both convolutions and the first linear layer, before and after their activation.
    paper_taps = ("conv?", "fc1", "silu*")

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        out = _gelu(F.max_pool2d(self.conv1(x), 2))
        out = _gelu(F.max_pool2d(self.dropout(self.conv2(out)), 2))
        logits: Tensor = self.fc2(_gelu(self.fc1(out.flatten(1))))
        return logits
