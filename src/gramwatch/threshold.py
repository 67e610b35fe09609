"""Threshold (Eq. 6) and p-value: from in-distribution scores to a decision with a stated false-alarm rate.

With `n` calibration scores that did not take part in making the score, a fresh in-distribution example is
equally likely to take any of the `n + 1` ranks. So `p = (1 + #{calibration >= score}) / (n + 1)` is at most
`alpha` with a probability of at most `alpha`, whatever the distribution of scores.
"""

import math
from dataclasses import dataclass, fields
from fractions import Fraction

import torch
from torch import Tensor

from gramwatch.errors import CalibrationError

LEAST_OF_A_CLASS = 100
"""A class with fewer standardising examples than this is not ranked by itself."""


def rank_of_threshold(examples: int, level: float) -> int:
    """`ceil((n + 1) level)`: the threshold is the calibration score with this rank, counted from below."""
    return math.ceil((examples + 1) * _exact(level))


def examples_needed(level: float) -> int:
    """The fewest calibration scores from which a threshold of this level can be taken."""
    return math.ceil(_exact(level) / (1 - _exact(level)))


def _exact(level: float) -> Fraction:
    """The fraction that is meant: in floating point 20 * 0.95 may ask for one rank too many."""
    exact = Fraction(float(level))
    simple = exact.limit_denominator(10**7)
    return simple if 0 < simple < 1 else exact


def threshold(scores: Tensor, level: float) -> float:
    """The score above which an input is out-of-distribution, with a false-alarm rate of `1 - level`."""
    return float(scores.kthvalue(_rank(scores, level)).values)


def is_above_threshold(scores: Tensor, ascending: Tensor, level: float) -> Tensor:
    """Whether each score is above the threshold of ascending ones; a GPU is not waited for."""
    return scores > ascending[_rank(ascending, level) - 1]


def _rank(scores: Tensor, level: float) -> int:
    rank = rank_of_threshold(len(scores), level)
    if rank > len(scores):
        raise CalibrationError(
            f"{len(scores)} calibration scores cannot support level {level}: "
            f"at least {examples_needed(level)} are needed"
        )
    return rank


def p_value(scores: Tensor, calibration: Tensor) -> Tensor:
    """The share of calibration scores at least as high, the example itself counted in."""
    ascending = calibration.to(scores.device).sort().values
    below = torch.searchsorted(ascending, scores.to(ascending), side="left")
    return (1 + len(ascending) - below).double() / (len(ascending) + 1)


def class_groups(predicted: Tensor, classes: int, level: float) -> Tensor:
    """Which classes are ranked together: the group of each class, `(classes,)`.

    `predicted` are the classes of examples that do not rank. If the examples that rank decided, a class near
    the limit would be merged just when it has few of them, and ranks would no longer be equally likely.

    A class with at least 100 examples, or twice as many as the level needs, is a group of its own. All rarer
    classes are one group. If even that group is too small, the smallest large class joins it.
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
    """Calibration scores of one or several kinds, to rank new ones among, all together or group by group.

    Group by group (Mondrian calibration), an example is ranked among those that were predicted to be of the
    classes of its group (see `class_groups`), so that its p-value holds for each group and not just on the
    whole.

    Nothing here waits for a GPU: examples of all groups are ranked at once, by keys that sort first by group
    and then by score.
    """

    ascending: Tensor
    """`(kinds, n)`"""
    keys: Tensor
    """Of each group in turn, `group * (n + 1) +` how many of all scores are lower: `(kinds, m)`."""
    group_of: Tensor
    """The group that each class is ranked in, `(classes,)`."""
    starts: Tensor
    """Where the keys of each group begin, `(groups,)`."""
    sizes: Tensor
    """How many examples each group has, `(groups,)`."""
    needed: Tensor
    """How many scores of the group must be lower than that of an outlier, `(groups,)`: Eq. 6."""

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

    def to(self, device: torch.device) -> "Ranks":
        """The same on another device."""
        return Ranks(*(getattr(self, field.name).to(device) for field in fields(self)))

    def judged(self, scores: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """The p-values of scores `(N, kinds)`; whether that of the first is at most `1 - level`, `(N,)`."""
        lower = torch.searchsorted(self.ascending, scores.T.contiguous())
        if len(self.sizes) == 1:  # all together: short work
            count = self.ascending.shape[1]
            among = torch.tensor(count + 1, dtype=torch.float64)
            return (1 + count - lower.T) / among, lower[0] >= self.needed
        group = self.group_of[predicted]
        keys = lower + group * (self.ascending.shape[1] + 1)
        below = (torch.searchsorted(self.keys, keys) - self.starts[group]).T
        size = self.sizes[group].unsqueeze(1)
        return (1 + size - below).double() / (size + 1), below[:, 0] >= self.needed[group]
