"""Threshold (Eq. 6) and p-value: from in-distribution scores to a decision with a stated false-alarm rate.

With `n` calibration scores that did not take part in making the score, a fresh in-distribution example is
equally likely to take any of the `n + 1` ranks. So `p = (1 + #{calibration >= score}) / (n + 1)` is at most
`alpha` with a probability of at most `alpha`, whatever the distribution of scores.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from gramwatch.errors import CalibrationError


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
