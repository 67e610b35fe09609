"""Class ratio: how near the nearest class is, compared with the middle of all classes, at the last stage."""

from torch import Tensor

from gramwatch.methods.base import Record
from gramwatch.methods.features import TINY
from gramwatch.methods.unit_mahalanobis import UnitMahalanobis
from gramwatch.observe.observation import Observation


class ClassRatio(UnitMahalanobis):
    """The Mahalanobis distance to the nearest class, over the distance to the middle, at the last stage.

    Features are scaled to length one, as in `UnitMahalanobis`. An input of a class lies near that class
    and far from the middle of all classes. An input of no class lies about as far from its nearest class as
    from the middle. The middle is the mean of the class means.

    Args:
        model: any classifier that returns logits.
        taps: the watched taps, as for `GramDetector`. Only the last one is used.
        options: the arguments of every `Method`.

    """

    name = "class_ratio"
    record = Record(
        title="class ratio",
        paper="part of Guard; after Ren et al.: A Simple Fix to Mahalanobis Distance for Improving Near-OOD "
        "Detection. 2021; and Müller & Hein: Mahalanobis++. ICML 2025",
        equation="min_c ||u - mu_c|| / ||u - mean_c mu_c||, ||v||^2 = v^T S^-1 v, u = f / ||f||",
        fitted=True,
        cost="a product with a matrix of channels x channels at the end of the last stage",
        limits="Needs two classes at least. Sees nothing that the last stage has lost.",
    )

    which = (-1, None)

    sees = "the nearest class"
    why_no_parts = "it is the ratio of two distances, and a ratio has no parts"

    def terms(self, observation: Observation) -> None:
        """None: a ratio has no terms."""

    def score(self, observation: Observation) -> Tensor:
        """The ratio of the two distances."""
        (last,) = self._at_taps(observation)
        return (last.nearest / last.middle.clamp_min(TINY)).sqrt()
