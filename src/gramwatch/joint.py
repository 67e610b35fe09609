"""Joining: from what several members say of an input to one score and its p-value.

    gram = mean over taps of sqrt(delta_l / E[delta_l]),    other members: their scores as they are
    score = sum over members of (max(s, quartile(s)) - median(s)) / (99th percentile(s) - median(s))

E, lower quartile, median and percentile are taken over in-distribution data alone; those that rank are
others (see `threshold`).
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gramwatch.deviation import TotalDeviation
from gramwatch.errors import CalibrationError
from gramwatch.measurement import Measurement


@dataclass
class Standard:
    """Each member's scores less their median, divided by how far the 99th percentile lies above it.

    There a member alone would be all but sure: all have the same say. Where the percentile is
    nearer to the median than one standard deviation, as where most scores are equal, that serves instead. A
    member that says the same of all examples is left out: its standardised score is zero.

    No member finds an input more normal than a quarter of the examples. Else energy may vouch for an input of
    huge activations so strongly that no other member is heard.
    """

    floor = 0.25
    """A score below this quantile counts as this quantile."""
    tail = 0.99
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
        self.lowest_ = scores.quantile(self.floor, 0)
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
        return (scores.maximum(self.lowest_) - self.median_) / self.tail_


@dataclass
class JointRule:
    """How what the members of a guard measure becomes one score.

    Args:
        totals: for each member that measures deviations, how they are totalled.
        standard: how scores are made comparable.

    """

    totals: Mapping[str, TotalDeviation]
    standard: Standard = field(default_factory=Standard)
    standardises = True

    def fit(self, measured: Measurement) -> "JointRule":
        """The rule with expectations, medians and tails of in-distribution examples, all finite."""
        parts = measured.parts
        totals = {
            name: replace(total).fit(parts[name].deviations, measured.probability)
            for name, total in self.totals.items()
        }
        rule = replace(self, totals=totals)
        return replace(rule, standard=copy(self.standard).fit(rule.member_scores(measured)))

    def member_scores(self, measured: Measurement) -> Tensor:
        """The score of each member, not standardised, `(N, members)`, in float64."""
        assert measured.columns is not None
        scores = [
            self.totals[name].mean_of_roots(measured.values[:, columns], measured.probability)
            if name in self.totals
            else measured.values[:, columns.start].double()
            for name, columns in measured.columns.items()
        ]
        return torch.stack(scores, 1)

    def joined(self, scores: Tensor) -> Tensor:
        """The joint score of members' scores `(N, members)`."""
        return self.standard(scores).sum(1)

    def __call__(self, measured: Measurement) -> Tensor:
        """The joint score, then each member's: `(N, 1 + members)`; infinite where something is not finite."""
        scores = self.member_scores(measured)
        every = torch.cat([self.joined(scores).unsqueeze(1), scores], 1)
        return torch.where(measured.finite.unsqueeze(1), every, torch.inf)

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
