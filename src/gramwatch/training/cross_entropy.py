"""Cross-entropy: the usual training of classifiers, which Gram and most other methods expect."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from gramwatch.methods.msp import MSP
from gramwatch.training.base import Network, Objective


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """`-log softmax(z)_y`."""

    name = "cross_entropy"
    detector = MSP

    def loss(
        self, network: Network, images: Tensor, labels: Tensor, outliers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy."""
        logits = network(images).float()
        return F.cross_entropy(logits, labels), logits
