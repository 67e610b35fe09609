"""Unit Mahalanobis: how far the direction of the features lies from every class, where stages end."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gramwatch.methods.base import Record
from gramwatch.methods.features import TINY
from gramwatch.methods.mahalanobis import ClassDistances
from gramwatch.observation import Observation


class UnitMahalanobis(ClassDistances):
    """The Mahalanobis distance of features scaled to length one, where the network's stages end.

    Müller & Hein (2025) scale the penultimate features so: lengths vary much more than a normal distribution
    has it. Here the channel means at the last tensor of each size are scaled, too. A tap's squared distance
    is divided by the number of its directions, which is what to expect of it; the score is the mean of the
    roots. Classes are the predicted ones, as for Gram: labels are ignored.

    Args:
        model: any classifier that returns logits.
        taps: where to look, as for `GramDetector`.
        options: those of every `Method`.

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

    def __init__(self, model: nn.Module, *, taps: str | Iterable[str] = "ends", **options: Any) -> None:
        super().__init__(model, taps=taps, **options)

    def _classes(self, observation: Observation) -> Tensor:
        return observation.predicted

    def _features(self, observation: Observation) -> list[Tensor]:
        return [f / f.norm(dim=1, keepdim=True).clamp_min(TINY) for f in super()._features(observation)]

    def score(self, observation: Observation) -> Tensor:
        """The mean over the taps of the distance for each direction, in standard deviations."""
        return self._over_expectation(self.distances(observation)).sqrt().mean(1)
