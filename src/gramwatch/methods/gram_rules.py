"""The rules of Gram: Eq. 5 by itself, the mean of roots in a guard, and what numbers its files may hold."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from gramwatch.detect.measurement import FittedRule, Measurement
from gramwatch.files import artifact
from gramwatch.files.artifact import Field
from gramwatch.numerics.bounds import EXPONENTS
from gramwatch.numerics.deviation import TotalDeviation

SHRINK = 50
"""Weight of the mean over all taps in the expectations of a member, counted in calibration examples: see
`TotalDeviation`."""
BOUNDS_RULES: dict[str, dict[str, artifact.Rule]] = {
    "min_max": {
        "minimum": artifact.NO_NAN,
        "maximum": artifact.NO_NAN,
        "exponent": artifact.within(*EXPONENTS),
    },
    "mean_variance": {
        "count": artifact.NOT_NEGATIVE,
        "mean": artifact.FINITE,
        "squares": artifact.NOT_NEGATIVE,
    },
}
"""The rules for the numbers of saved bounds."""
_R = TypeVar("_R", bound="_OfDeviations")


@dataclass(frozen=True)
class _OfDeviations(FittedRule):
    """A rule that divides the deviation of each tap by its expectation."""

    total: TotalDeviation = field(default_factory=TotalDeviation)
    kept: ClassVar[artifact.Shapes] = {
        "expectation_": Field(("values",), torch.float64, artifact.NOT_NEGATIVE)
    }

    in_file: ClassVar[Mapping[str, str]] = {"expectation_": "expectation"}

    def fit(self: _R, measured: Measurement) -> _R:
        """The rule with the expectations of in-distribution examples."""
        return replace(self, total=replace(self.total).fit(measured.values, measured.probability))

    def tensors(self) -> dict[str, Tensor]:
        """The expectations."""
        assert self.total.expectation_ is not None
        return {"expectation_": self.total.expectation_}

    def restored(self: _R, tensors: Mapping[str, Tensor]) -> _R:
        """The rule with these expectations."""
        return replace(self, total=replace(self.total, expectation_=tensors["expectation_"]))


@dataclass(frozen=True)
class GramRule(_OfDeviations):
    """Eq. 5: the sum over taps of the deviation divided by its expectation.

    An example has little part in the expectations, and the paper leaves none out.
    """

    def __call__(self, measured: Measurement) -> Tensor:
        """The score, `(N, 1)`."""
        score = self.total(measured.values, measured.probability)
        return torch.where(measured.finite, score, torch.inf).unsqueeze(1)

    def terms(self, measured: Measurement) -> Tensor:
        """The terms of Eq. 5, `(N, taps)`. With `confidence="subtract"`, the probability is no term."""
        return self.total.shares(measured.values, measured.probability)


@dataclass(frozen=True)
class MeanOfRoots(_OfDeviations):
    """The score of Gram in a guard: the mean over taps of `sqrt(delta_l / E[delta_l])`.

    A Gram matrix is made of products of two activations. Its root is on the scale of one activation, as are
    the scores of other members. The root also keeps a few taps from outweighing all others. Taps whose
    expectation is zero are left out.
    """

    total: TotalDeviation = field(default_factory=lambda: TotalDeviation(shrink=SHRINK))

    def __call__(self, measured: Measurement) -> Tensor:
        """The score, `(N, 1)`."""
        terms = self.total.terms(measured.values, measured.probability)
        if self.total.confidence == "divide_total":
            terms = terms / measured.probability[:, None]
        roots = terms.sqrt()
        return torch.where(measured.finite, roots.sum(1) / self.total.counted, torch.inf).unsqueeze(1)

    def terms(self, measured: Measurement) -> Tensor:
        """What each tap adds to the mean, `(N, taps)`."""
        return self.total.shares(measured.values, measured.probability).sqrt() / self.total.counted
