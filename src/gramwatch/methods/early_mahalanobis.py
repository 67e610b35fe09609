"""Early Mahalanobis: unit Mahalanobis without the network's last stage."""

from gramwatch.methods.base import Record
from gramwatch.methods.unit_mahalanobis import UnitMahalanobis


class EarlyMahalanobis(UnitMahalanobis):
    """Unit Mahalanobis at the end of every stage but the last.

    It is made to be joined with a method that looks at the last stage, such as `ClassRatio`. In a network
    with one stage, that stage is used.

    Args:
        model: any classifier that returns logits.
        taps: the watched taps, as for `GramDetector`. The last one is left out.
        options: the arguments of every `Method`.

    """

    name = "early_mahalanobis"
    record = Record(
        title="early Mahalanobis",
        paper="part of an earlier rule of Guard; after Müller & Hein: Mahalanobis++: Improving OOD Detection "
        "via Feature Normalization. ICML 2025",
        equation="mean over l but the last of sqrt(min_c (u_l - mu_lc)^T S_l^-1 (u_l - mu_lc) / rank(S_l)), "
        "u_l = f_l / ||f_l||",
        fitted=True,
        cost="a product with a matrix of channels x channels at the end of each stage but the last",
        limits="Sees little of what an image means: that is made in the last stage.",
    )
    which = (0, -1)
