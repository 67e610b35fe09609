"""Deviation: how far the statistics of an input lie outside what training data looked like (Eq. 3-5)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from gramwatch.numerics import kernels
from gramwatch.numerics.bounds import Bounds, MinMax

Confidence = Literal["none", "divide", "divide_total", "subtract"]
CONFIDENCES: tuple[str, ...] = get_args(Confidence)


def outside_range(statistics: Tensor, minimum: Tensor, maximum: Tensor) -> Tensor:
    """Eq. 3: zero within the range. Outside, the distance from the crossed bound, relative to that bound.

    The published figures were computed with 1e-6 in the denominators: `|min + 1e-6|` and `|max + 1e-6|`.
    """
    below = (minimum - statistics).clamp_min(0) / (minimum + 1e-6).abs()
    above = (statistics - maximum).clamp_min(0) / (maximum + 1e-6).abs()
    return below + above


def squared_distance(statistics: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """App. C: the squared distance from the mean in units of the variance."""
    return (statistics - mean).square() / variance


@dataclass(frozen=True)
class Layout:
    """The place and the weight of every tap's statistics, which lie side by side."""

    starts: Tensor
    """The index of every tap's first feature, then the number of features: `(taps + 1,)`."""
    weights: Tensor
    """The weight of every feature, `(features,)`: the number of orders that it stands for."""

    @staticmethod
    def of(sizes: Sequence[int], weights: Tensor | None = None) -> "Layout":
        """The layout of taps with these numbers of features. Without weights, every feature counts once."""
        starts = torch.tensor([0, *itertools.accumulate(sizes)])
        return Layout(
            starts, torch.ones(int(starts[-1]), dtype=torch.float32) if weights is None else weights
        )

    def to(self, device: torch.device) -> "Layout":
        """The layout on another device."""
        return Layout(self.starts.to(device), self.weights.to(device))


def tap_deviations(statistics: Tensor, predicted: Tensor, bounds: Bounds, layout: Layout) -> Tensor:
    """Eq. 4, delta_l: the deviations summed over the statistics and orders of each tap, `(N, taps)`.

    Args:
        statistics: the statistics of all taps side by side, `(N, features)`.
        predicted: the predicted classes, `(N,)`.
        bounds: the bounds of the same features.
        layout: which features belong to which tap.

    """
    if bounds.at_once is not None and len(statistics) > bounds.at_once:
        pieces = zip(statistics.split(bounds.at_once), predicted.split(bounds.at_once), strict=True)
        return torch.cat([tap_deviations(*piece, bounds, layout) for piece in pieces])
    if isinstance(bounds, MinMax):
        minimum, maximum, rows = bounds.lookup(predicted)
        signature = (statistics.device.type, "deviations", statistics.dtype, minimum.dtype)
        arguments = (statistics, rows, minimum, maximum, layout.starts, layout.weights)
        if by_kernel := kernels.attempt(signature, *arguments):
            deviations: Tensor = by_kernel[0]
            return deviations
    delta = outside_range if isinstance(bounds, MinMax) else squared_distance
    sums = []
    for part in (slice(*edges) for edges in itertools.pairwise(layout.starts.tolist())):
        outside = delta(statistics[:, part], *bounds.rows(predicted, part))
        sums.append((outside * layout.weights[part]).sum(1))
    return torch.stack(sums, 1)


@dataclass
class TotalDeviation:
    """Eq. 5, Delta: the sum over taps of the deviation divided by its expectation on validation data.

    `confidence` says how the maximum softmax probability enters:

    - `"none"`: not at all;
    - `"divide"`: every delta_l is divided by the probability, before the expectation (published tables);
    - `"divide_total"`: the sum is divided by the probability;
    - `"subtract"`: `Delta / max_Va(Delta) - probability`.

    Few in-distribution examples deviate at a given tap. So a small validation set says little about the
    expectation of a tap, and a tap that happens to deviate little would outweigh all others. `shrink` is the
    weight of the mean over all taps, counted in validation examples. The paper has no such weight.
    """

    normalise: bool = True
    confidence: Confidence = "divide"
    expectation_: Tensor | None = None
    """E_Va[delta_l], `(taps,)`, after `fit`. A tap whose expectation is zero is left out of the sum."""
    maximum_: float | None = None
    """max_Va(Delta), after `fit`."""
    shrink: int = 0
    _divisor: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    """The divisor of every tap, `(taps,)`: infinite for a tap that is left out."""
    counted: Tensor | int = field(default=0, init=False, repr=False, compare=False)
    """The number of taps that are not left out, at least one, after `fit`."""

    def __post_init__(self) -> None:
        if self.expectation_ is not None:
            self._prepare(self.expectation_)

    def _prepare(self, expectation: Tensor) -> None:
        """Compute once what every batch needs: on a GPU, every launch costs time."""
        if not self.normalise:
            self.counted = len(expectation)
            return
        expectation = expectation.double()
        self._divisor = torch.where(expectation > 0, expectation + 1e-7, torch.inf)
        self.counted = (expectation > 0).sum().clamp_min(1).double()

    def fit(self, deviations: Tensor, probability: Tensor) -> "TotalDeviation":
        """Set the expectations from validation data: deviations `(N, taps)`, probability `(N,)`."""
        values = deviations.double()
        mean = (values / probability[:, None] if self.confidence == "divide" else values).mean(0)
        if self.shrink:
            mean = (len(deviations) * mean + self.shrink * mean.mean()) / (len(deviations) + self.shrink)
        self.expectation_ = mean
        self._prepare(mean)
        self.maximum_ = self.terms(deviations, probability).sum(1).max().item()
        if self.confidence == "subtract" and not self.maximum_ > 0:
            raise ValueError("confidence='subtract' divides by the largest deviation, which is zero")
        return self

    def __call__(self, deviations: Tensor, probability: Tensor) -> Tensor:
        """The score of each example, `(N,)`: higher is more out-of-distribution."""
        total = self.terms(deviations, probability).sum(1)
        if self.confidence == "divide_total":
            return total / probability
        if self.confidence == "subtract":
            assert self.maximum_ is not None
            return total / self.maximum_ - probability
        return total

    def terms(self, deviations: Tensor, probability: Tensor) -> Tensor:
        """The terms of the sum, one per tap, `(N, taps)`."""
        values = deviations.double()
        if self.confidence == "divide":
            values = values / probability[:, None]
        return values if self._divisor is None else values / self._divisor

    def shares(self, deviations: Tensor, probability: Tensor) -> Tensor:
        """What each tap adds to the score, `(N, taps)`. `"subtract"` takes the probability off their sum."""
        terms = self.terms(deviations, probability)
        if self.confidence == "divide_total":
            return terms / probability[:, None]
        return terms / self.maximum_ if self.confidence == "subtract" and self.maximum_ else terms
