"""One picture of the verdicts of a detector on several sets: examples, their scores, and the threshold."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gramwatch.detect.measurement import Detection
from gramwatch.explain.frame import (
    DPI,
    INK,
    INSIDE,
    OUTSIDE,
    SMALL,
    SOFT,
    TEXT,
    TITLE,
    WIDTH,
    pyplot,
    wrapped,
    write_picture,
)
from gramwatch.guard.guard import Guard
from gramwatch.methods.gram import GramDetector

EXAMPLES = 6


def draw_overview(
    path: str | PathLike[str],
    detector: GramDetector | Guard,
    sets: Mapping[str, tuple[Tensor, Detection]],
    title: str,
) -> None:
    """Draw one row per set: a few of its images, and the histogram of its scores beside the threshold.

    The first set is taken to be in-distribution. Images are `(N, 1 or 3, H, W)` with pixels in [0, 1].
    """
    if detector.threshold_ <= 0:
        raise ValueError(
            f"scores are drawn in units of the threshold, but that is {detector.threshold_:.3g}: "
            "confidence='subtract' cannot be drawn like this"
        )
    plt = pyplot()
    scores = {name: _place(detection.score, detector.threshold_) for name, (_, detection) in sets.items()}
    low = min(float(s.min()) for s in scores.values())
    high = max(2.0, *(float(np.quantile(s, 0.995)) for s in scores.values()))
    high += 0.17 * (high - low)  # room for the share that was flagged
    bins = np.linspace(low, high, 70)

    figure = plt.figure(figsize=(WIDTH, 0.78 * len(sets) + 1.15), dpi=DPI)
    height = figure.get_figheight()
    grid = figure.add_gridspec(
        len(sets), EXAMPLES + 1, width_ratios=[1] * EXAMPLES + [8.5], hspace=0.35, wspace=0.08
    )
    figure.subplots_adjust(left=0.165, right=0.985, top=1 - 0.62 / height, bottom=0.65 / height)
    figure.text(0.0125, 1 - 0.1 / height, title, va="top", fontsize=TITLE, weight="bold", color=INK)
    for row, (name, (images, detection)) in enumerate(sets.items()):
        _examples(figure, grid, row, name, images, detection)
        axes = figure.add_subplot(grid[row, EXAMPLES])
        axes.hist(scores[name].clip(low, high), bins=bins, color=INSIDE if row == 0 else OUTSIDE, alpha=0.85)
        axes.axvspan(1, high, color=OUTSIDE, alpha=0.06, lw=0)
        axes.axvline(1, color=INK, lw=1, ls="--")
        axes.set(xlim=(low, high), yticks=[])
        axes.spines[["top", "left", "right"]].set_visible(False)
        share = f"{float(detection.is_ood.double().mean()):.0%} flagged"
        axes.text(
            0.995, 0.95, share, transform=axes.transAxes, ha="right", va="top", fontsize=TEXT, color=INK
        )
        axes.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
        axes.xaxis.set_major_formatter(
            lambda value, _: f"{value:.0f}" if value < 1 else f"{10 ** (value - 1):,.0f}"
        )
        axes.tick_params(labelbottom=row == len(sets) - 1, labelsize=SMALL, length=3)
        if row == 0:
            axes.text(
                1,
                1.08,
                "threshold: flagged beyond →",
                transform=axes.get_xaxis_transform(),
                fontsize=SMALL,
                color=INK,
                ha="left" if (low + high) / 2 > 1 else "right",
            )
    axes.set_xlabel("score, in units of the threshold; logarithmic beyond it", fontsize=SMALL, color=INK)
    figure.text(
        0.0125,
        0.1 / height,
        "Six of each set, from its lowest score to its highest; a red frame = flagged.",
        fontsize=SMALL,
        color=SOFT,
    )
    write_picture(figure, path)


def _examples(figure: Any, grid: Any, row: int, name: str, images: Tensor, detection: Detection) -> None:
    """A few images of a set, and its name at the left."""
    for column, example in enumerate(_spread(detection.score)):
        axes = figure.add_subplot(grid[row, column])
        _thumbnail(axes, images[example], bool(detection.is_ood[example]))
        if column == 0:
            lines = "\n".join(wrapped(name, TEXT, 1.05))
            axes.text(
                -0.2, 0.5, lines, transform=axes.transAxes, ha="right", va="center", fontsize=TEXT, color=INK
            )


def _place(score: Tensor, threshold: float) -> Any:
    """Where scores stand on the axis: linear up to the threshold, which is at one, logarithmic beyond."""
    times = (score.nan_to_num(posinf=1e30) / threshold).cpu().numpy()
    size = np.abs(times)
    return np.sign(times) * np.where(size > 1, 1 + np.log10(size.clip(1)), size)


def _spread(score: Tensor) -> list[int]:
    """Examples that stand for the whole set: evenly spaced from the lowest score to the highest."""
    order = score.argsort()
    places = torch.linspace(0, len(order) - 1, min(EXAMPLES, len(order))).round().long()
    return [int(i) for i in order[places]]


def _thumbnail(axes: Any, image: Tensor, flagged: bool) -> None:
    pixels = image.detach().cpu().clamp(0, 1).permute(1, 2, 0).numpy()
    axes.imshow(pixels.squeeze(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(color=OUTSIDE if flagged else "#bbbbbb", linewidth=1.4 if flagged else 0.6)
