"""The bases of methods that change the features, or the last layer, and then take the energy."""

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from gramwatch.methods.energy import energy
from gramwatch.methods.features import HeadMethod, features_of, head_of
from gramwatch.observe.observation import Head, Observation

WIDE = 1024
"""The features from which a network counts as wide: those of ImageNet, for which most methods were tuned."""


class Shaping(HeadMethod):
    """The energy of the logits after a change of the features or of the last layer."""

    @abstractmethod
    def logits(self, features: Tensor, head: Head) -> Tensor:
        """The logits after the change, from features in float64."""

    def score(self, observation: Observation) -> Tensor:
        """The energy of the changed logits."""
        head = head_of(observation, self.name)
        return energy(self.logits(features_of(observation, self.name).double(), head))


class PercentileShaping(Shaping):
    """A method with a percentile. The default depends on the number of features.

    Files hold `None` for the default. So files of the day when the default was one number keep that number.
    """

    settings: ClassVar[tuple[str, ...]] = ("percentile",)
    narrow: ClassVar[float]
    """The default percentile for fewer than `WIDE` features."""
    wide: ClassVar[float]
    """The default percentile for `WIDE` features or more."""

    def __init__(self, model: nn.Module, *, percentile: float | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        self.percentile = None if percentile is None else checked_percentile(percentile)

    def percentile_of(self, width: int) -> float:
        """The percentile for a number of features."""
        if self.percentile is not None:
            return self.percentile
        return self.narrow if width < WIDE else self.wide

    def largest(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The features of each example above the percentile, and their places, `(N, kept)` each."""
        width = features.shape[1]
        values, places = features.topk(kept(width, self.percentile_of(width)))
        return values, places


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
