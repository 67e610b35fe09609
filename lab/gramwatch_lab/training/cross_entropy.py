"""Cross-entropy: the usual training of classifiers, which Gram and most other methods expect."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Beta

from gramwatch.errors import TrainingError
from gramwatch.methods.msp import MSP
from gramwatch_lab.training.base import Network, Objective


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """`-log softmax(z)_y`.

    With `mixup`, batches are mixed as in Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018).
    """

    name = "cross_entropy"
    detector = MSP
    smoothing: float = 0.0
    """The share of the label that is spread evenly over all classes."""
    mixup: float = 0.0
    """Both parameters of the beta distribution of the mixing weight. 0: images are not mixed."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1 or self.mixup < 0:
            raise TrainingError(
                "smoothing must be at least 0 and below 1, mixup must not be negative: got "
                f"{self.smoothing} and {self.mixup}"
            )

    def loss(
        self, network: Network, images: Tensor, labels: Tensor, outliers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy."""
        if not self.mixup:
            logits = network(images).float()
            return F.cross_entropy(logits, labels, label_smoothing=self.smoothing), logits
        # Drawn on the CPU: nothing waits for the GPU.
        share = float(Beta(self.mixup, self.mixup).sample())
        order = torch.randperm(len(images), device=images.device)
        logits = network(share * images + (1 - share) * images[order]).float()
        own, other = (
            F.cross_entropy(logits, target, label_smoothing=self.smoothing)
            for target in (labels, labels[order])
        )
        return share * own + (1 - share) * other, logits
