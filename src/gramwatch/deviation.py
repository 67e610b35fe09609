"""Deviation: how far the statistics of an input lie outside what training data looked like (Eq. 3-5)."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gramwatch import kernels
from gramwatch.bounds import Bounds, MinMax

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
        deviations = kernels.deviations(statistics, rows, minimum, maximum, layout.starts, layout.weights)
        if deviations is not None:
            return deviations
    delta = outside_range if isinstance(bounds, MinMax) else squared_distance
    sums = []
    for part in (slice(*edges) for edges in itertools.pairwise(layout.starts.tolist())):
        outside = delta(statistics[:, part], *bounds.rows(predicted, part))
        sums.append((outside * layout.weights[part]).sum(1))
    return torch.stack(sums, 1)


class _Divisors(NamedTuple):
    """The divisors of the deviations, on a device."""

    expectation: Tensor
    """The expectations from which the divisors were computed."""
    per_tap: Tensor
    """The divisor of every tap, `(taps,)`: infinite for a tap that is left out."""
    counted: Tensor
    """The number of taps that are not left out, at least one."""


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
    _cached_divisors: "_Divisors | None" = field(default=None, init=False, repr=False, compare=False)

    def fit(self, deviations: Tensor, probability: Tensor) -> "TotalDeviation":
        """Set the expectations from validation data: deviations `(N, taps)`, probability `(N,)`."""
        mean = self._with_confidence(deviations, probability).mean(0)
        if self.shrink:
            mean = (len(deviations) * mean + self.shrink * mean.mean()) / (len(deviations) + self.shrink)
        self.expectation_ = mean
        self.maximum_ = self._sum(deviations, probability).max().item()
        if self.confidence == "subtract" and not self.maximum_ > 0:
            raise ValueError("confidence='subtract' divides by the largest deviation, which is zero")
        return self

    def __call__(self, deviations: Tensor, probability: Tensor) -> Tensor:
        """The score of each example, `(N,)`: higher is more out-of-distribution."""
        total = self._sum(deviations, probability)
        if self.confidence == "divide_total":
            return total / probability
        if self.confidence == "subtract":
            assert self.maximum_ is not None
            return total / self.maximum_ - probability
        return total

    def _with_confidence(self, deviations: Tensor, probability: Tensor) -> Tensor:
        deviations = deviations.double()
        return deviations / probability[:, None] if self.confidence == "divide" else deviations

    def terms(self, deviations: Tensor, probability: Tensor) -> Tensor:
        """The terms of the sum, one per tap, `(N, taps)`."""
        values = self._with_confidence(deviations, probability)
        if not self.normalise:
            return values
        return values / self._divisors(values).per_tap

    def shares(self, deviations: Tensor, probability: Tensor) -> Tensor:
        """What each tap adds to the score, `(N, taps)`. `"subtract"` takes the probability off their sum."""
        terms = self.terms(deviations, probability)
        if self.confidence == "divide_total":
            return terms / probability[:, None]
        return terms / self.maximum_ if self.confidence == "subtract" and self.maximum_ else terms

    def mean_of_roots(self, deviations: Tensor, probability: Tensor) -> Tensor:
        """The score of a guard's member, `(N,)`: `mean over taps of sqrt(delta_l / E[delta_l])`.

        A Gram matrix is made of products of two activations. Its root is on the scale of one activation, as
        are the scores of other members. The root also keeps a few taps from outweighing all others. Taps
        whose expectation is zero are left out.
        """
        return self.mean_over_taps(deviations, probability, torch.sqrt)

    def mean_over_taps(
        self, deviations: Tensor, probability: Tensor, change: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """The mean of `change(delta_l / E[delta_l])` over the taps that count; `change` must keep zero."""
        changed, counted = self._changed(deviations, probability, change)
        return changed.sum(1) / counted

    def roots(self, deviations: Tensor, probability: Tensor) -> Tensor:
        """What each tap adds to `mean_of_roots`, `(N, taps)`."""
        changed, counted = self._changed(deviations, probability, torch.sqrt)
        return changed / counted

    def _changed(
        self, deviations: Tensor, probability: Tensor, change: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | int]:
        """The changed terms, `(N, taps)`, and the number of taps that count."""
        terms = self.terms(deviations, probability)
        if self.confidence == "divide_total":
            terms = terms / probability[:, None]
        assert self.expectation_ is not None
        counted = self._divisors(terms).counted if self.normalise else len(self.expectation_)
        return change(terms), counted

    def _divisors(self, like: Tensor) -> "_Divisors":
        """The divisors on the device of `like`. They are cached: on a GPU, every launch costs time."""
        assert self.expectation_ is not None
        cached = self._cached_divisors
        if (
            cached is None
            or cached.expectation is not self.expectation_
            or cached.per_tap.device != like.device
        ):
            expectation = self.expectation_.to(like)
            per_tap = torch.where(expectation > 0, expectation + 1e-7, torch.inf)
            counted = (expectation > 0).sum().clamp_min(1).to(like)
            self._cached_divisors = cached = _Divisors(self.expectation_, per_tap, counted)
        return cached

    def _sum(self, deviations: Tensor, probability: Tensor) -> Tensor:
        return self.terms(deviations, probability).sum(1)
