"""Early Mahalanobis: unit Mahalanobis without the network's last stage."""

from collections.abc import Sequence

from torch import Tensor

from gramwatch.methods.base import Record
from gramwatch.methods.unit_mahalanobis import UnitMahalanobis
from gramwatch.observation import Observation


class EarlyMahalanobis(UnitMahalanobis):
    """Unit Mahalanobis where all stages but the last end: whether an input looks like a class on the way.

    Made to be joined with a method that looks at the last stage, as `ClassRatio`. A network with one stage
    has no other: that one counts.

    Args:
        model: any classifier that returns logits.
        taps: where to look, as for `GramDetector`; the last of them is left out.
        options: those of every `Method`.

    """

    name = "early_mahalanobis"
    record = Record(
        title="early Mahalanobis",
        paper="part of Guard; after Müller & Hein: Mahalanobis++: Improving OOD Detection via Feature "
        "Normalization. ICML 2025",
        equation="mean over l but the last of sqrt(min_c (u_l - mu_lc)^T S_l^-1 (u_l - mu_lc) / rank(S_l)), "
        "u_l = f_l / ||f_l||",
        fitted=True,
        cost="a product with a matrix of channels x channels at the end of each stage but the last",
        limits="Sees little of what an image means: that is made in the last stage.",
    )

    def _looked_at(self, observation: Observation) -> Sequence[Tensor]:
        means = observation.channel_means
        return means[:-1] if len(means) > 1 else means
