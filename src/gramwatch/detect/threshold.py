"""Threshold (Eq. 6) and p-value: from in-distribution scores to a decision with a stated false-alarm rate.

The `n` calibration scores belong to examples that the score was not fitted on. Then a new in-distribution
example is equally likely to have any of the `n + 1` ranks. So `p = (1 + #{calibration >= score}) / (n + 1)`
is at most `alpha` with a probability of at most `alpha`, for every distribution of scores.

A network rounds differently in batches of another size, so copies of one input have scores that differ a
little. Without a tolerance their order would depend on the batch. So each calibration score is raised by a
tolerance before new scores are compared with it: `p = (1 + #{calibration >= score - tolerance}) / (n + 1)`.
This p-value is never smaller, so the bound holds for every tolerance.
"""

import math
from dataclasses import dataclass, fields
from fractions import Fraction

import torch
from torch import Tensor

from gramwatch.errors import CalibrationError

LEAST_OF_A_CLASS = 100
"""A class is ranked by itself only if it has at least this many of the examples that do not rank."""


ROUNDING = 128 * torch.finfo(torch.float32).eps
"""The relative rounding of a score that is assumed where it cannot be measured: 128 units of float32."""


def rounding_of(scores: Tensor) -> Tensor:
    """The tolerance that rounding to float32 needs, of each kind of score: `(n, kinds)` to `(kinds,)`.

    It is `ROUNDING` times the magnitude that nine of ten scores do not exceed.
    """
    return ROUNDING * scores.abs().quantile(0.9, 0)


def rank_of_threshold(examples: int, level: float) -> int:
    """`ceil((n + 1) level)`: the threshold is the calibration score with this rank, counted from below."""
    return math.ceil((examples + 1) * _exact(level))


def examples_needed(level: float) -> int:
    """The smallest number of calibration scores that allows a threshold of this level."""
    return math.ceil(_exact(level) / (1 - _exact(level)))


def range_of_rates(examples: int, level: float, share: float = 0.9) -> tuple[float, float]:
    """The rates of false alarms between which this share of calibrations lies, with so many ranking scores.

    The rate of one calibration has a beta distribution if no two scores are equal.
    """
    from scipy.stats import beta

    rank = rank_of_threshold(examples, level)
    low, high = beta.ppf([(1 - share) / 2, (1 + share) / 2], examples + 1 - rank, rank)
    return float(low), float(high)


def _exact(level: float) -> Fraction:
    """The level as the fraction that the user means. The float 0.9 is above 9/10: ten times 0.9 exceeds 9."""
    exact = Fraction(float(level))
    simple = exact.limit_denominator(10**7)
    return simple if 0 < simple < 1 else exact


def threshold(scores: Tensor, level: float) -> float:
    """The score above which an input is out-of-distribution, with a false-alarm rate of `1 - level`."""
    return float(scores.kthvalue(_rank(scores, level)).values)


def _rank(scores: Tensor, level: float) -> int:
    rank = rank_of_threshold(len(scores), level)
    if rank > len(scores):
        raise CalibrationError(
            f"{len(scores)} calibration scores cannot support level {level}: "
            f"at least {examples_needed(level)} are needed"
        )
    return rank


def p_value(scores: Tensor, calibration: Tensor) -> Tensor:
    """The share of scores that are at least as high, among the calibration scores and the example's own."""
    ascending = calibration.to(scores.device).sort().values
    below = torch.searchsorted(ascending, scores.to(ascending), side="left")
    return (1 + len(ascending) - below).double() / (len(ascending) + 1)


def class_groups(predicted: Tensor, classes: int, level: float) -> Tensor:
    """The group of each class, `(classes,)`. Classes of one group are ranked together.

    `predicted` are the classes of examples that do not rank. The examples that rank must not decide: a class
    near the limit would then be merged exactly when few of its examples rank, and the ranks of a new example
    would no longer be equally likely.

    A class with enough examples is a group of its own. Enough is 100, or twice the number that the level
    needs if that is more. All rarer classes are one group. If that group is too small, the smallest class
    that has enough examples joins it.
    """
    counts = predicted.bincount(minlength=classes)
    least = max(LEAST_OF_A_CLASS, 2 * examples_needed(level))
    large, rare = (counts >= least).nonzero().flatten(), counts < least
    groups = torch.zeros(classes, dtype=torch.int64)
    if len(large):
        groups[large] = torch.arange(len(large))
        enough = int(counts[rare].sum()) >= least
        groups[rare] = len(large) if enough else groups[large[counts[large].argmin()]]
    return groups


@dataclass(frozen=True)
class Ranks:
    """Calibration scores of one or several kinds. New scores are ranked among them, together or in groups.

    In groups (Mondrian calibration), an example is ranked among the calibration examples whose predicted
    classes belong to its group (see `class_groups`). Then p-values are valid in every group, not only on
    average.

    No function here waits for a GPU. Examples of all groups are ranked at once, by keys that sort first by
    group and then by score.
    """

    ascending: Tensor
    """All calibration scores, sorted, `(kinds, n)`."""
    keys: Tensor
    """The sorted keys, one group after the other, `(kinds, m)`.

    The key of a score is `group * (n + 1) + lower`, where `lower` counts the calibration scores below it."""
    group_of: Tensor
    """The group of each class, `(classes,)`."""
    starts: Tensor
    """The index of the first key of each group, `(groups,)`."""
    sizes: Tensor
    """The number of examples in each group, `(groups,)`."""
    needed: Tensor
    """An input is an outlier if at least this many scores of its group are lower, `(groups,)`: Eq. 6."""

    @staticmethod
    def of(scores: Tensor, level: float, predicted: Tensor, group_of: Tensor) -> "Ranks":
        """The ranks of calibration scores `(n, kinds)` of examples with these predicted classes, `(n,)`."""
        _rank(scores, level)
        count = int(group_of.max()) + 1
        groups = [(group_of[predicted] == group).nonzero().flatten() for group in range(count)]
        ascending = scores.T.contiguous().sort(1).values
        lower = torch.searchsorted(ascending, scores.T.contiguous())
        keys = [lower[:, group].sort(1).values + i * (len(scores) + 1) for i, group in enumerate(groups)]
        sizes = torch.tensor([len(group) for group in groups])
        needed = torch.tensor([rank_of_threshold(len(group), level) for group in groups])
        return Ranks(ascending, torch.cat(keys, 1), group_of, sizes.cumsum(0) - sizes, sizes, needed)

    def among(self, predicted: Tensor) -> Tensor:
        """The number of calibration examples among which inputs of these classes are ranked, `(N,)`."""
        predicted = predicted.to(self.sizes.device)
        return self.sizes[self.group_of[predicted] if len(self.sizes) > 1 else torch.zeros_like(predicted)]

    def to(self, device: torch.device) -> "Ranks":
        """The same on another device."""
        return Ranks(*(getattr(self, field.name).to(device) for field in fields(self)))

    def judged(self, scores: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """The p-values of scores `(N, kinds)`, and whether the first one is at most `1 - level`, `(N,)`."""
        lower = torch.searchsorted(self.ascending, scores.T.contiguous())
        if len(self.sizes) == 1:  # one group needs no keys
            count = self.ascending.shape[1]
            among = torch.tensor(count + 1, dtype=torch.float64)
            return (1 + count - lower.T) / among, lower[0] >= self.needed
        group = self.group_of[predicted]
        keys = lower + group * (self.ascending.shape[1] + 1)
        below = (torch.searchsorted(self.keys, keys) - self.starts[group]).T
        size = self.sizes[group].unsqueeze(1)
        return (1 + size - below).double() / (size + 1), below[:, 0] >= self.needed[group]
