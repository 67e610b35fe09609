"""Why methods are joined, in one picture: `python -m gramwatch.report.why PICTURE.png RESULT.csv ...`.

Each CSV is one network's, as `gramwatch study guard` writes it.
"""

import csv
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from gramwatch.methods import METHODS
from gramwatch.report import pyplot, write_picture

GRAM, GUARD, MEAN = "Gram", "Guard", "mean"
# Told apart by shape as well as colour (Okabe & Ito's, which the colour-blind tell apart).
LOOKS = {
    GRAM: {"marker": "s", "color": "#0072B2", "ms": 5},
    "other": {"marker": "D", "color": "#E69F00", "ms": 5},
    GUARD: {"marker": "o", "color": "#1a1a1a", "ms": 7.5},
}
BEST = 99.99
"""Where the axis ends, in percent: what is better stands there."""
TICKS = (10, 50, 75, 90, 97, 99, 99.7, 99.9, 99.97)

Figures = Mapping[str, Mapping[str, float]]
"""AUROC in percent by set and method."""


@dataclass(frozen=True)
class Marks:
    """One row of the picture."""

    ood: str
    gram: float
    other: float
    """Of the best single method besides Gram."""
    others_name: str
    guard: float


def marks_of(figures: Figures) -> list[Marks]:
    """A row for every set, where Gram is best first, and one for the mean."""
    others = [method.record.title for method in METHODS.values()]
    methods = [name for name in next(iter(figures.values())) if name in (GRAM, GUARD, *others)]
    mean = {name: sum(figures[ood][name] for ood in figures) / len(figures) for name in methods}

    def marks(ood: str, found: Mapping[str, float]) -> Marks:
        best = max((name for name in methods if name in others), key=lambda name: found[name])
        return Marks(ood, found[GRAM], found[best], best, found[GUARD])

    rows = [marks(ood, found) for ood, found in figures.items()]
    return [*sorted(rows, key=lambda row: -row.gram), marks(MEAN, mean)]


def read_figures(path: str | PathLike[str]) -> tuple[str, Figures]:
    """A network's title and its figures, from the CSV of the study; sets whose data were absent left out."""
    figures: dict[str, dict[str, float]] = {}
    title = ""
    with Path(path).open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            title = f"{line['network']}, {line['in_distribution']}"
            if line["auroc"]:
                figures.setdefault(line["ood"], {})[line["method"]] = float(line["auroc"])
    return title, figures


def draw_why(path: str | PathLike[str], networks: Mapping[str, Figures]) -> None:
    """Draw one panel per network, one row per set: AUROC of Gram, of the best other method, of Guard.

    The axis is logarithmic in the distance to 100, so that 99 and 99.9 are as far apart as 0 and 90.
    """
    plt = pyplot()
    panels = {title: marks_of(figures) for title, figures in networks.items()}
    lowest = min(min(row.gram, row.other, row.guard) for rows in panels.values() for row in rows)
    limits = (1.25 * max(_left(lowest), 25), _left(BEST) / 1.25)
    columns = min(2, len(panels))
    bands = [list(panels.items())[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [max(len(rows) for _, rows in band) + 2.6 for band in bands]
    figure, axes = plt.subplots(
        len(bands),
        columns,
        figsize=(5.6 * columns + (1.6 if columns == 1 else 0), 0.9 + 0.22 * sum(heights)),
        dpi=160,
        squeeze=False,
        layout="constrained",
        gridspec_kw={"height_ratios": heights},
    )
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    for band, row in zip(bands, axes, strict=True):
        for (title, rows), panel in zip(band, row, strict=False):
            panel.set(xscale="log", xlim=limits)
            _panel(panel, title, rows)
        for panel in row[len(band) :]:
            panel.set_axis_off()
    names = {GRAM: "Gram", "other": "best other single method (named at the right)", GUARD: "Guard"}
    handles = [plt.Line2D([], [], ls="", label=names[name], **look) for name, look in LOOKS.items()]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=3, frameon=False, fontsize=9.5, handletextpad=0.2
    )
    caption = (
        "AUROC in percent, the further right the better. "
        f"The axis is logarithmic in the distance to 100; what is above {BEST} stands at its end."
    )
    figure.supxlabel(
        textwrap.fill(caption, round(13 * figure.get_figwidth())),
        x=0.01,
        ha="left",
        fontsize=8.5,
        color="#444444",
    )
    write_picture(figure, path)


def _panel(axes: Any, title: str, rows: Sequence[Marks]) -> None:
    for y, row in enumerate(rows):
        at = {GRAM: _left(row.gram), "other": _left(row.other), GUARD: _left(row.guard)}
        if y % 2 == 0:
            axes.axhspan(y - 0.5, y + 0.5, color="#f3f4f6", lw=0, zorder=0)
        axes.plot([min(at.values()), max(at.values())], [y, y], color="#b5bac2", lw=1.6, zorder=1)
        for name, look in LOOKS.items():
            # Guard lies below the smaller two, which stand a little apart: all are seen where they meet.
            off = {GRAM: -0.17, "other": 0.17, GUARD: 0.0}[name]
            axes.plot(
                at[name], y + off, ls="", mec="white", mew=0.6, zorder=2 if name == GUARD else 3, **look
            )
        axes.text(
            1.01,
            y,
            row.others_name,
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=7.5,
            color="#9a6a00",
        )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row.ood for row in rows], fontsize=8.5)
    axes.get_yticklabels()[-1].set_weight("bold")
    axes.axhline(len(rows) - 1.5, color="#555555", lw=0.8)
    ticks = [tick for tick in TICKS if _left(tick) <= axes.get_xlim()[0]]
    axes.set_xticks([_left(tick) for tick in ticks], [f"{tick:g}" for tick in ticks], fontsize=8.5)
    axes.minorticks_off()
    axes.grid(axis="x", color="#dddddd", lw=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10.5, weight="bold")


def _left(auroc: float) -> float:
    """How far it is from 100."""
    return 100 - min(auroc, BEST)


if __name__ == "__main__":
    draw_why(sys.argv[1], dict(map(read_figures, sys.argv[2:])))
