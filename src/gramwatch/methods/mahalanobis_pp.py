"""Mahalanobis++: the distance of the penultimate features' direction to the nearest class."""

from torch import Tensor

from gramwatch.methods.base import Record
from gramwatch.methods.gaussians import ClassDistances
from gramwatch.observe.observation import Observation


class MahalanobisPP(ClassDistances):
    """The Mahalanobis distance of penultimate features scaled to length one (Müller & Hein, 2025).

    Classes are the labels. If the loader has none, they are the predicted classes. A class without examples
    is left out, and so are directions in which the training examples do not vary.

    Args:
        model: any classifier that returns logits.
        options: the arguments of every `Method`.

    """

    name = "mahalanobis_pp"
    record = Record(
        title="Mahalanobis++",
        paper="Müller & Hein: Mahalanobis++: Improving OOD Detection via Feature Normalization. ICML 2025",
        equation="min_c (u - m_c)^T S^-1 (u - m_c), u = h / ||h||",
        fitted=True,
        cost="a product with a D x D matrix, one with the means of the classes",
        limits="Sees directions only, and only those of the last features. Takes every class to be one "
        "normal distribution, all of one covariance.",
    )
    looks_at = frozenset({"features"})
    unit = True

    def score(self, observation: Observation) -> Tensor:
        """The squared distance to the nearest class."""
        (only,) = self._at_taps(observation)
        return only.nearest
