"""Dirichlet Prior Networks: a sharp Dirichlet distribution for images, a flat one for outliers.

Malinin & Gales, "Predictive Uncertainty Estimation via Prior Networks" (NeurIPS 2018): the network predicts
`alpha = exp(z)` and is trained on

    L = E_in[KL(Dir(target) || Dir(alpha))] + weight * E_out[KL(Dir(1) || Dir(alpha))]
    target_c = precision * (1 - (classes - 1) * smoothing) for the label, precision * smoothing for the rest

With `reverse=True`, both divergences are reversed (Malinin & Gales, "Reverse KL-Divergence Training of Prior
Networks", NeurIPS 2019). Then the network need not predict a distribution with several modes if labels
conflict. The gradients of the reversed loss grow with the precision. So that loss is divided by the
precision, as in the authors' later code.

Gradients are clipped to norm 1. This is our own choice: usual learning rates then work for both losses.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gramwatch.errors import TrainingError
from gramwatch_lab.methods.dirichlet import concentrations, kl_divergence
from gramwatch_lab.methods.prior_network import PriorNetworkScore
from gramwatch_lab.training.base import Network, Objective, both_logits

MOST = 1e6
"""The largest concentration in training, far above every target: float32 sums stay finite."""


@dataclass(frozen=True)
class PriorNetwork(Objective):
    """A Dirichlet distribution that is sharp for images and flat for outliers.

    Args:
        precision: alpha_0 of the target distributions of images.
        smoothing: the share of a wrong class in these distributions.
        weight: the weight of the outliers' part.
        reverse: whether to reverse both divergences.

    """

    precision: float = 100.0
    smoothing: float = 0.01
    weight: float = 1.0
    reverse: bool = False

    name = "prior_network"
    detector = PriorNetworkScore
    needs_outliers = True
    gradient_norm = 1.0

    def __post_init__(self) -> None:
        if not (self.precision > 0 and self.smoothing > 0 and self.weight > 0):
            raise TrainingError(f"prior_network: precision, smoothing and weight must be positive: {self}")

    def loss(
        self, network: Network, images: Tensor, labels: Tensor, outliers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The loss of a batch of images and a batch of outliers."""
        logits, strange = both_logits(network, images, outliers)
        inside = self._divergence(logits, self.targets(labels, logits))
        outside = self._divergence(strange, torch.ones_like(strange))
        loss = inside.mean() + self.weight * outside.mean()
        return loss / self.precision if self.reverse else loss, logits

    def targets(self, labels: Tensor, like: Tensor) -> Tensor:
        """The target concentrations of images with these labels, `(N, classes)`."""
        classes = like.shape[1]
        largest = 1 - (classes - 1) * self.smoothing
        if largest <= self.smoothing:
            raise TrainingError(
                f"prior_network: with smoothing {self.smoothing} and {classes} classes the label itself "
                f"would have a share of {largest:.3g}: choose a smoothing below {1 / classes:.3g}"
            )
        shares = torch.full_like(like, self.smoothing).scatter(1, labels[:, None], largest)
        return self.precision * shares

    def _divergence(self, logits: Tensor, target: Tensor) -> Tensor:
        alpha = concentrations(logits, MOST)
        return kl_divergence(alpha, target) if self.reverse else kl_divergence(target, alpha)
