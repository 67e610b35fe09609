"""Unit Mahalanobis: the distance of the features' direction to the nearest class, where stages end."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gramwatch.methods.base import Record
from gramwatch.methods.gaussians import ClassDistances
from gramwatch.observe.observation import Observation


class UnitMahalanobis(ClassDistances):
    """The Mahalanobis distance of features scaled to length one, where the network's stages end.

    Müller & Hein (2025) scale the penultimate features, because lengths vary more than in a normal
    distribution. This method scales the channel means at the last tensor of each size. It divides the squared
    distance at a tap by the rank of the covariance, which is its expectation. The score is the mean of the
    square roots. Classes are the predicted classes, as for Gram. Labels are ignored.

    Args:
        model: any classifier that returns logits.
        taps: the watched taps, as for `GramDetector`.
        options: the arguments of every `Method`.

    """

    name = "unit_mahalanobis"
    record = Record(
        title="unit Mahalanobis",
        paper="after Müller & Hein: Mahalanobis++: Improving OOD Detection via Feature Normalization. "
        "ICML 2025",
        equation="mean_l sqrt(min_c (u_l - mu_lc)^T S_l^-1 (u_l - mu_lc) / rank(S_l)), u_l = f_l / ||f_l||",
        fitted=True,
        cost="a product with a matrix of channels x channels at the end of each stage",
        limits="Sees directions only. Takes every class to be one normal distribution, all of one "
        "covariance.",
    )

    unit = True
    classes_by = "predictions"

    def __init__(self, model: nn.Module, *, taps: str | Iterable[str] = "ends", **options: Any) -> None:
        super().__init__(model, taps=taps, **options)

    def score(self, observation: Observation) -> Tensor:
        """The mean over the taps of the distance per direction, in standard deviations."""
        return self._over_expectation(self.distances(observation)).sqrt().mean(1)

    def terms(self, observation: Observation) -> Tensor | None:
        """What each tap adds to that mean."""
        roots = self._over_expectation(self.distances(observation)).sqrt()
        return roots / roots.shape[1]
