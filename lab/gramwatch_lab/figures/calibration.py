"""What a calibration does, in two pictures: `python -m gramwatch_lab.figures.calibration docs/images`.

`p_value.png`: from calibration scores to the p-values of two new images. The scores are made up.
`calibration.png`: how far the rate of false alarms lies from the stated one, by the number of images.
"""

import sys
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramwatch.detect.threshold import p_value, range_of_rates, threshold
from gramwatch.explain.frame import FAINT, INK, INSIDE, OUTSIDE, SMALL, TEXT, Words, framed, plain

LEVEL = 0.95
SCORES = 59
"""The number of calibration scores in the picture of p-values."""
NEW = {"an ordinary image": 0.55, "an outlier": 2.05}
"""The scores of two new images."""
RIGHT = 3.0
"""The score at the right edge."""
IMAGES = (38, 100, 200, 500, 1000, 2000, 5000, 10_000)
"""The numbers of calibration images in the other picture."""


def made_up_scores() -> Tensor:
    """Calibration scores: many low ones, a few high ones."""
    uniform = (torch.arange(SCORES, dtype=torch.float64) + 0.5) / SCORES
    return -(1 - uniform).log() * 0.42


def draw_p_values(path: str | PathLike[str]) -> None:
    """Draw calibration scores, the threshold, and two new images with their p-values."""
    scores = made_up_scores()
    limit = threshold(scores, LEVEL)
    caption = (
        f"p = (1 + number of calibration scores at least as high) / ({SCORES} + 1). Flagged: p at most "
        f"{1 - LEVEL:.2f}. The scores are made up."
    )
    frame = framed(Words("From a score to a verdict"), 2.3, caption=caption)
    axes = frame.axes[0, 0]
    plain(axes)
    axes.set(xlim=(-0.05, RIGHT), ylim=(-0.12, 1.05), yticks=[])
    axes.axvspan(limit, RIGHT, color=OUTSIDE, alpha=0.07, lw=0)
    axes.axvline(limit, color=OUTSIDE, lw=1, ls="--")
    axes.text(limit + 0.03, 0.96, "threshold: flagged beyond", fontsize=SMALL, color=OUTSIDE)
    heights = _stacked(scores)
    axes.plot(scores, heights, "o", color=INSIDE, ms=4.5)
    axes.text(0.72, 0.15, f"{SCORES} calibration images", fontsize=SMALL, color=INSIDE)
    for (name, score), height in zip(NEW.items(), (0.68, 0.42), strict=True):
        _new_image(axes, scores, name, score, height, flagged=score > limit)
    axes.axhline(0, color=FAINT, lw=0.8, zorder=0)
    axes.set_xlabel("score: higher is more unusual", fontsize=TEXT, color=INK)
    frame.write(path)


def _stacked(scores: Tensor) -> list[float]:
    """The height of each score's mark. Marks that would touch stand above each other."""
    counts: dict[int, int] = {}
    heights = []
    for score in scores.tolist():
        place = int(score / 0.045)
        counts[place] = counts.get(place, 0) + 1
        heights.append(0.06 * counts[place])
    return heights


def _new_image(axes: Any, scores: Tensor, name: str, score: float, height: float, flagged: bool) -> None:
    """A new image above the scores, with a bracket over those that are at least as high."""
    colour = OUTSIDE if flagged else INK
    higher = int((scores >= score).sum())
    p = float(p_value(torch.tensor([score]), scores))
    axes.plot([score, score], [0, height], color=colour, lw=1)
    axes.plot(score, height, "D", color=colour, ms=5)
    how = "flagged" if flagged else "not flagged"
    lines = (
        f"{name}: {how}",
        f"{higher} of {SCORES} are at least as high",
        f"p = {higher + 1} / {SCORES + 1} = {p:.2f}",
    )
    axes.text(
        score + 0.05, height, "\n".join(lines), va="center", fontsize=TEXT, color=colour, linespacing=1.35
    )


def draw_sizes(path: str | PathLike[str]) -> None:
    """Draw the range of the rate of false alarms against the number of calibration images."""
    caption = (
        "Nine of ten calibrations lie in the bar, for any network (scores without ties). Half of the images "
        "rank. 38 images are the fewest for this level."
    )
    words = Words("How many calibration images", protocol=f"Level {LEVEL}: 5 % false alarms on average.")
    frame = framed(words, 2.4, caption=caption)
    axes = frame.axes[0, 0]
    plain(axes)
    axes.grid(axis="y", color=FAINT, lw=0.6)
    axes.set(xlim=(-0.6, len(IMAGES) - 0.4), ylim=(-0.8, 16.5))
    axes.axhline(100 * (1 - LEVEL), color=INK, lw=1, zorder=1)
    for place, images in enumerate(IMAGES):
        low, high = range_of_rates(images - images // 2, LEVEL)
        axes.vlines(place, 100 * low, 100 * high, color=INSIDE, lw=9, zorder=2)
        axes.text(place, 100 * high + 0.4, f"{high:.1%}", ha="center", fontsize=SMALL, color=INK)
        axes.text(place, 100 * low - 0.4, f"{low:.1%}", ha="center", va="top", fontsize=SMALL, color=INK)
    axes.set_xticks(range(len(IMAGES)), [f"{n:,}" for n in IMAGES])
    axes.set_yticks([0, 5, 10, 15])
    axes.set_xlabel("calibration images", fontsize=TEXT, color=INK)
    axes.set_ylabel("false alarms, percent", fontsize=TEXT, color=INK)
    frame.write(path)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    draw_p_values(folder / "p_value.png")
    draw_sizes(folder / "calibration.png")
