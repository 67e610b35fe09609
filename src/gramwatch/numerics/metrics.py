"""How well scores separate in- from out-of-distribution inputs: the paper's five figures, as fractions.

A higher score is more out-of-distribution. As in the paper, in-distribution is "positive". The true positive
rate (TPR) is the share of in-distribution inputs that are kept. The true negative rate (TNR) is the share of
out-of-distribution inputs that are caught. An infinite score is higher than all other scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

METRICS = {
    "tnr": "TNR at TPR 95%",
    "auroc": "AUROC",
    "dtacc": "detection accuracy",
    "auin": "AUPR, in-distribution positive",
    "auout": "AUPR, out-of-distribution positive",
}
"""The figures of `all_metrics`, with their names in words."""


def tnr_at_tpr(in_scores: ArrayLike, out_scores: ArrayLike, tpr: float = 0.95) -> float:
    """The share of out-of-distribution inputs caught at the threshold whose TPR is nearest to `tpr`.

    An input is kept if its score is at most the threshold. Ties count against the detector: an
    out-of-distribution input with exactly the threshold as its score is missed. If two TPRs are equally near,
    the lower TNR counts.
    """
    kept, caught = _rates(in_scores, out_scores)
    distance = np.abs(kept - tpr)
    nearest = distance <= distance.min() + 1e-12
    return float(caught[nearest].min())


def auroc(in_scores: ArrayLike, out_scores: ArrayLike) -> float:
    """The probability that an out-of-distribution input scores higher than an in-distribution input."""
    from sklearn.metrics import roc_auc_score

    ranks, is_out = _ranks(in_scores, out_scores)
    return float(roc_auc_score(is_out, ranks))


def detection_accuracy(in_scores: ArrayLike, out_scores: ArrayLike) -> float:
    """The best mean of TPR and TNR over all thresholds."""
    kept, caught = _rates(in_scores, out_scores)
    # A threshold below every score keeps nothing and catches everything: one half.
    return float(max(0.5, (0.5 * (kept + caught)).max()))


def aupr_in(in_scores: ArrayLike, out_scores: ArrayLike) -> float:
    """Area under the precision-recall curve (average precision) with in-distribution as positive."""
    from sklearn.metrics import average_precision_score

    ranks, is_out = _ranks(in_scores, out_scores)
    return min(1.0, float(average_precision_score(~is_out, -ranks)))  # rounding can exceed 1


def aupr_out(in_scores: ArrayLike, out_scores: ArrayLike) -> float:
    """Area under the precision-recall curve (average precision) with out-of-distribution as positive."""
    from sklearn.metrics import average_precision_score

    ranks, is_out = _ranks(in_scores, out_scores)
    return min(1.0, float(average_precision_score(is_out, ranks)))


def all_metrics(in_scores: ArrayLike, out_scores: ArrayLike) -> dict[str, float]:
    """The paper's five figures by the keys of `METRICS`. They equal the functions above, from one sort."""
    ranks, is_out = _ranks(in_scores, out_scores)
    inside, outside = (np.bincount(ranks[part], minlength=ranks.max() + 1) for part in (~is_out, is_out))
    inside_below, outside_below = inside.cumsum(), outside.cumsum()
    most_in, most_out = inside_below[-1], outside_below[-1]
    kept, caught = inside_below / most_in, 1 - outside_below / most_out
    thresholds = slice(int(inside.nonzero()[0][-1]) + 1)
    distance = np.abs(kept - 0.95)[thresholds]
    nearest = distance <= distance.min() + 1e-12
    inside_above, outside_above = (
        n.sum() - below + n for n, below in zip((inside, outside), (inside_below, outside_below), strict=True)
    )
    precision_in = inside_below / (inside_below + outside_below)
    precision_out = outside_above / (inside_above + outside_above)
    return {
        "tnr": float(caught[thresholds][nearest].min()),
        "auroc": float((outside * (inside_below - inside / 2)).sum() / (most_in * most_out)),
        "dtacc": float(max(0.5, (0.5 * (kept + caught))[thresholds].max())),
        "auin": min(1.0, float((inside * precision_in).sum() / most_in)),
        "auout": min(1.0, float((outside * precision_out).sum() / most_out)),
    }


@dataclass(frozen=True)
class Difference:
    """The difference of two figures, and its confidence interval."""

    value: float
    low: float
    high: float


def auroc_difference(
    ours: tuple[ArrayLike, ArrayLike],
    theirs: tuple[ArrayLike, ArrayLike],
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """The AUROC of one detector minus that of another on the same inputs, by a paired bootstrap.

    In- and out-of-distribution inputs are resampled separately. Both detectors judge the same resample, so
    inputs that are hard for both cancel. The interval lies between percentiles of the differences.

    Args:
        ours: the in- and the out-of-distribution scores of one detector.
        theirs: the scores of the other detector, for the same inputs in the same order.
        resamples: the number of resamples.
        level: the share of the differences inside the interval.
        seed: the seed of the resamples.

    """
    (first, inside, outside), (second, *sizes) = _weighted_auroc(*ours), _weighted_auroc(*theirs)
    if [inside, outside] != sizes:
        raise ValueError(f"the two judge different inputs: {inside} and {outside}, {sizes[0]} and {sizes[1]}")
    random = np.random.default_rng(seed)
    differences = np.empty(resamples)
    for i in range(resamples):
        times = [np.bincount(random.integers(n, size=n), minlength=n) for n in (inside, outside)]
        differences[i] = first(*times) - second(*times)
    once = [np.ones(n, dtype=np.int64) for n in (inside, outside)]
    low, high = np.quantile(differences, [(1 - level) / 2, (1 + level) / 2])
    return Difference(first(*once) - second(*once), float(low), float(high))


def _weighted_auroc(
    in_scores: ArrayLike, out_scores: ArrayLike
) -> tuple[Callable[[NDArray[Any], NDArray[Any]], float], int, int]:
    """A function from how often each input counts to the AUROC, and the number of inputs of both kinds."""
    inside, outside = _checked(in_scores, "in-distribution"), _checked(out_scores, "out-of-distribution")
    order = inside.argsort()
    below, up_to = (np.searchsorted(inside[order], outside, side) for side in ("left", "right"))

    def auroc(in_times: NDArray[Any], out_times: NDArray[Any]) -> float:
        lower = np.concatenate([[0], in_times[order].cumsum()])
        pairs = out_times @ (lower[below] + lower[up_to]) / 2
        return float(pairs / (in_times.sum() * out_times.sum()))

    return auroc, inside.size, outside.size


def _checked(scores: ArrayLike, whose: str) -> NDArray[Any]:
    values = np.asarray(scores, dtype=np.float64).ravel()
    if values.size == 0:
        raise ValueError(f"there are no {whose} scores")
    if np.isnan(values).any():
        raise ValueError(f"{np.isnan(values).sum()} {whose} scores are NaN")
    return values


def _rates(in_scores: ArrayLike, out_scores: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
    """TPR and TNR with every distinct score as the threshold, up to the highest in-distribution score.

    A higher threshold keeps no more in-distribution inputs, and catches fewer outliers. With ten
    in-distribution inputs or fewer, the TPR nearest to 95 % is 100 %: a threshold above all scores would
    have that TPR and catch nothing.
    """
    inside = np.sort(_checked(in_scores, "in-distribution"))
    outside = np.sort(_checked(out_scores, "out-of-distribution"))
    thresholds = np.unique(np.concatenate([inside, outside[outside < inside[-1]]]))
    kept = np.searchsorted(inside, thresholds, side="right") / inside.size
    caught = 1 - np.searchsorted(outside, thresholds, side="right") / outside.size
    return kept, caught


def _ranks(in_scores: ArrayLike, out_scores: ArrayLike) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The ranks of all scores, and which of them are out-of-distribution. Equal scores have equal ranks."""
    inside = _checked(in_scores, "in-distribution")
    outside = _checked(out_scores, "out-of-distribution")
    _, ranks = np.unique(np.concatenate([inside, outside]), return_inverse=True)
    return ranks.ravel(), np.repeat([False, True], [inside.size, outside.size])
