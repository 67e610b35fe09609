"""The base of methods that change the features, or the last layer, and then take the energy."""

from abc import abstractmethod

from torch import Tensor

from gramwatch.methods.energy import energy
from gramwatch.methods.features import HeadMethod, features_of, head_of
from gramwatch.observation import Head, Observation


class Shaping(HeadMethod):
    """The energy of the logits after a change of the features or of the last layer."""

    @abstractmethod
    def logits(self, features: Tensor, head: Head) -> Tensor:
        """The logits after the change, from features in float64."""

    def score(self, observation: Observation) -> Tensor:
        """The energy of the changed logits."""
        head = head_of(observation, self.name)
        return energy(self.logits(features_of(observation, self.name).double(), head))


def kept(features: int, percentile: float) -> int:
    """How many features lie above a percentile: at least one."""
    return max(1, features - round(features * percentile / 100))


def checked_percentile(percentile: float) -> float:
    """The percentile, which must lie in [0, 100)."""
    if not 0 <= percentile < 100:
        raise ValueError(f"percentile must lie in [0, 100), got {percentile}")
    return float(percentile)


def sharpening(features: Tensor, largest: Tensor) -> Tensor:
    """`exp(sum of all / sum of the largest)` of each example, `(N, 1)`. It is 1 if the largest sum to 0."""
    total, top = features.sum(1, keepdim=True), largest.sum(1, keepdim=True)
    empty = top == 0
    return (total / top.masked_fill(empty, 1)).masked_fill(empty, 0).exp()
