"""Joining: from what several members say of an input to one score and its p-value.

    gram = mean over taps of sqrt(delta_l / E[delta_l]),    other members: their scores as they are
    score = sum over members of (max(s, quartile(s)) - median(s)) / (99th percentile(s) - median(s))

E, lower quartile, median and percentile are taken over in-distribution data alone; those that rank are
others (see `threshold`).
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor

from gramwatch.batches import all_finite
from gramwatch.detector import Measurement, halves
from gramwatch.deviation import TotalDeviation
from gramwatch.errors import CalibrationError
from gramwatch.threshold import Ranks, class_groups

Part = Measurement | Tensor
"""What one member says of a set: Gram its deviations, the others their scores."""


@dataclass(frozen=True)
class JointMeasurement:
    """What all members say of N inputs, before any calibration."""

    logits: Tensor
    parts: Mapping[str, Part]

    @cached_property
    def predicted(self) -> Tensor:
        """The predicted class, D_c."""
        return self.logits.argmax(1)

    @cached_property
    def finite(self) -> Tensor:
        """Which examples, and all that was seen of them, are free of NaN and infinity, `(N,)`."""
        found = [part.finite for part in self.parts.values() if isinstance(part, Measurement)]
        scores = [part for part in self.parts.values() if isinstance(part, Tensor)]
        if scores:
            found.append(all_finite(torch.stack(scores, 1)))
        return reduce(torch.logical_and, found)

    def __getitem__(self, index: Any) -> "JointMeasurement":
        """The measurement of some examples."""
        return JointMeasurement(self.logits[index], {name: part[index] for name, part in self.parts.items()})

    @staticmethod
    def joined(batches: "Sequence[JointMeasurement]") -> "JointMeasurement":
        """Several batches together, on the CPU."""
        parts = {name: joined_parts([each.parts[name] for each in batches]) for name in batches[0].parts}
        return JointMeasurement(torch.cat([each.logits.cpu() for each in batches]), parts)


def joined_parts(parts: Sequence[Part]) -> Part:
    """What one member says of several batches, on the CPU."""
    if isinstance(parts[0], Measurement):
        return Measurement.joined(parts)  # type: ignore[arg-type]
    return torch.cat([part.cpu() for part in parts])  # type: ignore[union-attr]


# --- the rule ----------------------------------------------------------------------------------------


def gram_score(total: TotalDeviation, measured: Measurement) -> Tensor:
    """`mean over taps of sqrt(delta_l / E[delta_l])`.

    A Gram matrix is made of products of two activations; its root is on the scale of one, as what the other
    members look at. It also keeps a few taps that are far off from drowning everything else.
    """
    return mean_over_taps(total, measured, torch.sqrt)


def mean_over_taps(
    total: TotalDeviation, measured: Measurement, change: Callable[[Tensor], Tensor]
) -> Tensor:
    """The mean of what `change` makes of `delta_l / E[delta_l]`, for which 0 must stay 0.

    Taps whose expectation is zero are left out.
    """
    terms = total.terms(measured.deviations, measured.probability)
    if total.confidence == "divide_total":
        terms = terms / measured.probability[:, None]
    return change(terms).sum(1) / total.counted(terms)


def sum_of_members(standardised: Tensor) -> Tensor:
    """From `(N, members)` to `(N,)`."""
    return standardised.sum(1)


@dataclass
class Standard:
    """Each member's scores less their median, divided by how far the 99th percentile lies above it.

    There a member alone would be all but sure: all have the same say. Where the percentile is
    nearer to the median than one standard deviation, as where most scores are equal, that serves instead. A
    member that says the same of all examples is left out: its standardised score is zero.

    Args:
        floor: no member finds an input more normal than this share of the examples; None: it may. Without
            it, energy may vouch for an input of huge activations so strongly that nobody else is heard.
        tail: which percentile.

    """

    floor: float | None = 0.25
    tail: float = 0.99
    median_: Tensor | None = None
    tail_: Tensor | None = None
    """`(members,)` each, after `fit`; an infinite tail: that member is left out."""
    lowest_: Tensor | None = None
    """The lowest score of each member that counts, `(members,)`, after `fit`."""

    def fit(self, scores: Tensor) -> "Standard":
        """Take median and tail from scores `(N, members)`."""
        self.median_ = scores.quantile(0.5, 0)
        tail = torch.maximum(scores.quantile(self.tail, 0) - self.median_, scores.std(0, correction=0))
        rounding = 1e-9 * scores.abs().amax(0)
        self.tail_ = torch.where(tail > rounding, tail, torch.inf)
        self.lowest_ = scores.quantile(self.floor or 0.0, 0)
        if self.tail_.isinf().all():
            raise CalibrationError(
                f"every member says the same of all {len(scores)} examples: there is nothing to standardise "
                "by. Use more, and different, in-distribution examples"
            )
        return self

    def __call__(self, scores: Tensor) -> Tensor:
        """The standardised scores, `(N, members)`."""
        assert self.median_ is not None
        assert self.tail_ is not None
        assert self.lowest_ is not None
        if self.floor is not None:
            scores = scores.maximum(self.lowest_)
        return (scores - self.median_) / self.tail_


@dataclass
class JointRule:
    """How the scores of the members become one.

    Args:
        totals: for each member that measures deviations, how they are totalled.
        standard: how scores are made comparable; it has `fit` and call like `Standard`.
        join: how comparable scores become one.
        gram: the score of a member that measures deviations.

    """

    totals: Mapping[str, TotalDeviation]
    standard: Standard = field(default_factory=Standard)
    join: Callable[[Tensor], Tensor] = sum_of_members
    gram: Callable[[TotalDeviation, Measurement], Tensor] = gram_score

    def fit(self, measured: JointMeasurement) -> "JointRule":
        """Take expectations, medians and tails from in-distribution examples, all finite."""
        self.totals = {
            name: replace(total).fit(part.deviations, part.probability)
            for name, total in self.totals.items()
            if isinstance(part := measured.parts[name], Measurement)
        }
        self.standard = copy(self.standard).fit(self.member_scores(measured))
        return self

    def member_scores(self, measured: JointMeasurement) -> Tensor:
        """The score of each member, not standardised, `(N, members)`, in float64."""
        scores = [
            self.gram(self.totals[name], part) if isinstance(part, Measurement) else part.double()
            for name, part in measured.parts.items()
        ]
        return torch.stack(scores, 1)

    def all_scores(self, measured: JointMeasurement) -> Tensor:
        """The joint score, then each member's: `(N, 1 + members)`; infinite where something is not finite."""
        scores = self.member_scores(measured)
        every = torch.cat([self.join(self.standard(scores)).unsqueeze(1), scores], 1)
        return torch.where(measured.finite.unsqueeze(1), every, torch.inf)

    def __call__(self, measured: JointMeasurement) -> Tensor:
        """The score of each example, `(N,)`: higher is more out-of-distribution."""
        return self.all_scores(measured)[:, 0]

    def to(self, device: torch.device) -> "JointRule":
        """The same on another device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        totals = {
            name: replace(total, expectation_=moved(total.expectation_))
            for name, total in self.totals.items()
        }
        standard = copy(self.standard)
        for name, value in vars(standard).items():
            if isinstance(value, Tensor):
                setattr(standard, name, value.to(device))
        return replace(self, totals=totals, standard=standard)


@dataclass(frozen=True)
class Calibration:
    """A rule that was fitted, and the in-distribution scores that rank."""

    rule: JointRule
    scores: Tensor
    """The joint score, then each member's, of the examples that rank: `(n, 1 + members)`."""
    predicted: Tensor
    """Their predicted classes, `(n,)`."""
    ranks: Ranks

    @staticmethod
    def of(
        measured: JointMeasurement,
        rule: JointRule,
        level: float,
        *,
        per_class: bool = False,
        split: bool = True,
        seed: int = 0,
    ) -> "Calibration":
        """From in-distribution examples, all finite: half of them fit the rule, the others rank.

        With `per_class`, the half that fits the rule also decides which classes are ranked together.
        """
        every = torch.arange(len(measured.logits))
        normalising, ranking = halves(len(every), seed) if split else (every, every)
        standard, ranked = measured[normalising], measured[ranking]
        rule, classes = replace(rule).fit(standard), measured.logits.shape[1]
        groups = (
            class_groups(standard.predicted, classes, level) if per_class else torch.zeros(classes).long()
        )
        scores, predicted = rule.all_scores(ranked), ranked.predicted
        return Calibration(rule, scores, predicted, Ranks.of(scores, level, predicted, groups))

    def judged(self, measured: JointMeasurement) -> tuple[Tensor, Tensor, Tensor]:
        """The joint score `(N,)`, the p-values of it and of each member `(N, 1 + members)`, the verdict."""
        scores = self.rule.all_scores(measured)
        return scores[:, 0], *self.ranks.judged(scores, measured.predicted)

    def to(self, device: torch.device) -> "Calibration":
        """The same on another device; the scores that were ranked stay."""
        return replace(self, rule=self.rule.to(device), ranks=self.ranks.to(device))
