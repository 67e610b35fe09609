"""Outlier Exposure: cross-entropy, and on auxiliary outliers cross-entropy to the uniform distribution.

Hendrycks, Mazeika & Dietterich, "Deep Anomaly Detection with Outlier Exposure" (ICLR 2019), section 3:

    L = E_in[-log softmax(z)_y] + weight * E_out[-mean_c log softmax(z)_c]

A batch has twice as many outliers as images, and the weight is 0.5, as in that paper's image experiments.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from gramwatch.errors import TrainingError
from gramwatch_lab.methods.outlier_exposure import OutlierExposureScore
from gramwatch_lab.training.base import Network, Objective, both_logits


@dataclass(frozen=True)
class OutlierExposure(Objective):
    """Train a network to be sure of images and unsure of outliers, from scratch or by fine-tuning.

    Args:
        weight: the weight of the outliers' part, lambda.

    """

    weight: float = 0.5

    name = "outlier_exposure"
    detector = OutlierExposureScore
    needs_outliers = True
    outliers_per_image = 2

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise TrainingError(f"outlier_exposure: weight must be positive, got {self.weight}")

    def loss(
        self, network: Network, images: Tensor, labels: Tensor, outliers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of a batch of images and a batch of outliers."""
        logits, strange = both_logits(network, images, outliers)
        to_uniform = -strange.log_softmax(1).mean(1).mean()
        return F.cross_entropy(logits, labels) + self.weight * to_uniform, logits
