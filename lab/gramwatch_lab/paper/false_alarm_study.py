"""How often Guard flags fresh in-distribution images of a real network: `gramwatch study false_alarms`.

The test images are split at random, many times: some calibrate, as `Guard.calibrate` does, the others are
fresh. Whatever the images, the share of fresh ones with a p-value of at most alpha follows a beta-binomial
distribution if the p-value holds what it says; so it is known how far a share may be from alpha by chance.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from gramwatch.detect.joint import JointRule
from gramwatch.detect.measurement import Calibration, Measurement
from gramwatch_lab.paper.beside import markdown
from gramwatch_lab.paper.experiment import Options, command, methods_of, surroundings
from gramwatch_lab.paper.false_alarms import ALPHAS
from gramwatch_lab.paper.guard_study import GRAM, GUARD, LEAN, VARIANTS

CALIBRATION = 1000
"""Images to calibrate on, or half of all where that is less; half of all besides, as classes need more."""
SPLITS = 1000
LEAST = 100
"""The mean number of fresh images below which a class gets no figure of its own."""
LEGEND = (
    "The share of fresh images with a p-value of at most alpha: its mean over the splits, and between what "
    "it lies in 95 % of them. By chance: where it would lie if the p-value held exactly. Highest class: the "
    "mean over the splits of the predicted class where it is highest; for images ranked together nothing is "
    "promised for a class."
)


@dataclass(frozen=True)
class Shares:
    """The share of fresh images with a p-value of at most alpha, in percent."""

    ranked: str
    calibration: int
    """Images to calibrate on; half of them rank."""
    fresh: int
    alpha: float
    mean: float
    """The mean over the splits."""
    low: float
    high: float
    """The lower end of the range of 95 % of the splits."""
    chance_low: float
    chance_high: float
    """The lower end of that range by chance, if the p-value holds exactly."""
    highest_class: float | None
    """The highest mean of a predicted class over the splits. None if all classes are rare."""
    chance_class: float | None
    """Its limit by chance, if alpha is promised for each class. One study in forty exceeds it."""


def run(options: Options) -> list[Shares]:
    """Split the test images many times, and count the fresh ones that are flagged."""
    subject = options.subject()
    guard = next(variant for variant in VARIANTS if variant.title == GUARD)
    methods = [LEAN, *(m for m in methods_of(subject, "all") if m.title in guard.members and m.title != GRAM)]
    inside = guard.measured(subject.measure(methods, [])[subject.inside_title])
    inside = inside[inside.finite]
    half = len(inside) // 2
    sizes = dict.fromkeys([(False, min(CALIBRATION, half)), (False, half), (True, half)])
    rows = [row for per_class, size in sizes for row in shares(inside, guard.rule(), size, per_class)]
    name = f"false_alarms-{subject.label}"
    title = f"{subject.title}, {subject.inside_title}: false alarms"
    page = (
        f"## {title}\n\n    {command()}\n\n"
        f"Guard on {len(inside):,} test images, split at random {SPLITS} times; half of those that "
        f"calibrate rank. {surroundings(options)}\n\n{table(rows)}\n\n{LEGEND}\n"
    )
    (options.output / f"{name}.md").write_text(page, encoding="utf-8")
    _write_csv(options.output / f"{name}.csv", rows)
    options.say(f"\n{table(rows)}")
    return rows


def shares(
    measured: Measurement, rule: JointRule, size: int, per_class: bool, splits: int = SPLITS
) -> list[Shares]:
    """The flagged shares of fresh images when `size` images calibrate, for each of `ALPHAS`."""
    total, classes = measured.logits.shape
    alphas = torch.tensor(ALPHAS, dtype=torch.float64)
    flagged = torch.zeros(splits, classes, len(ALPHAS), dtype=torch.float64)
    counts = torch.zeros(splits, classes, 1, dtype=torch.float64)
    for i in range(splits):
        order = torch.randperm(total, generator=torch.Generator().manual_seed(i))
        calibrating, fresh = measured[order[:size]], measured[order[size:]]
        calibration = Calibration.of(calibrating, rule, 0.95, per_class=per_class)
        low = calibration.judged(fresh)[1][:, :1] <= alphas
        flagged[i].index_add_(0, fresh.predicted, low.double())
        counts[i, :, 0] = fresh.predicted.bincount(minlength=classes)
    overall = flagged.sum(1) / counts.sum(1)
    # The last split stands for all: its groups, and their sizes.
    ranking, group_of = calibration.ranks.sizes, calibration.ranks.group_of
    judged = group_of[fresh.predicted].bincount(minlength=len(ranking))
    often = counts.mean(0)[:, 0] >= LEAST
    if per_class:
        often &= group_of.bincount()[group_of] == 1  # the promise is the group's, not that of a class in it
    by_class = (flagged.sum(0) / counts.sum(0))[often]
    rows = []
    for i, alpha in enumerate(ALPHAS):
        chance = _drawn_by_chance(alpha, ranking, judged)
        deviation = max(float(group_shares.std()) for group_shares in chance) / splits**0.5
        most = alpha + deviation * NormalDist().inv_cdf(1 - 0.025 / max(1, len(by_class)))
        figures = [
            float(overall[:, i].mean()),
            *_middle(overall[:, i]),
            *_middle((chance * judged[judged > 0].unsqueeze(1)).sum(0) / judged.sum()),
            float(by_class[:, i].max()) if len(by_class) else None,
            most if per_class and len(by_class) else None,
        ]
        ranked = "per class" if per_class else "together"
        percent = [None if figure is None else 100 * figure for figure in figures]
        rows.append(Shares(ranked, size, total - size, alpha, *percent))  # type: ignore[arg-type]
    return rows


def _drawn_by_chance(alpha: float, ranking: Tensor, judged: Tensor, times: int = 20_000) -> Tensor:
    """The shares flagged in each group that has any, `(groups, times)`, if p-values hold exactly.

    The chance of a fresh example to be flagged is beta-distributed over calibrations.
    """
    random = np.random.default_rng(0)
    drawn = []
    for n, fresh in zip(ranking.tolist(), judged.tolist(), strict=True):
        if fresh:
            rank = int(alpha * (n + 1) + 1e-9)
            rates = random.beta(rank, n + 1 - rank, times) if rank else np.zeros(times)
            drawn.append(random.binomial(fresh, rates) / fresh)
    return torch.from_numpy(np.stack(drawn))


def _middle(values: Tensor) -> list[float]:
    """The range of 95 % of the values."""
    ends: list[float] = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return ends


def table(shares_of: Sequence[Shares]) -> str:
    """The shares in Markdown."""
    head = ["ranked", "calibrated on", "alpha", "all images", "95 % of the splits", "by chance"]
    rows = [[*head, "highest class", "by chance at most"]]
    for row in shares_of:
        highest = "" if row.highest_class is None else f"{row.highest_class:.2f} %"
        most = "" if row.chance_class is None else f"{row.chance_class:.2f} %"
        rows.append(
            [
                "`per_class=True`" if row.ranked == "per class" else row.ranked,
                f"{row.calibration:,}",
                f"{100 * row.alpha:.0f} %",
                f"{row.mean:.2f} %",
                f"{row.low:.2f} to {row.high:.2f} %",
                f"{row.chance_low:.2f} to {row.chance_high:.2f} %",
                highest,
                most,
            ]
        )
    return markdown(rows)


def _write_csv(path: Path, shares_of: Sequence[Shares]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(Shares))
        for row in shares_of:
            values = (getattr(row, field.name) for field in fields(Shares))
            writer.writerow(f"{v:.4f}" if isinstance(v, float) else v for v in values)
