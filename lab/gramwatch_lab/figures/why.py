"""Why methods are joined, in one picture: `python -m gramwatch_lab.figures.why PICTURE.png RESULT.csv ...`.

Each CSV is one network's, as `gramwatch study guard` writes it.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from gramwatch.explain.frame import BAND, FAINT, INK, SMALL, SOFT, TEXT, WIDTH, Words, plain, wrapped
from gramwatch.methods import METHODS
from gramwatch_lab.figures.looks import LOOKS, OTHER, Look, framed_with_legend, key
from gramwatch_lab.figures.table import APART

GRAM, GUARD, MEAN = "Gram", "Guard", "mean"
SHOWN = {GRAM: LOOKS[GRAM], "best other": Look(OTHER, "D"), GUARD: LOOKS[GUARD]}
SIZES = {GRAM: 4.5, "best other": 4.5, GUARD: 6.5}
BEST = 99.99
"""Where the axis ends, in percent: what is better stands there."""
TICKS = (10, 50, 75, 90, 97, 99, 99.7, 99.9, 99.97)
FEW_TICKS = (10, 75, 90, 99, 99.9)
"""For panels side by side."""
WORDS = Words("AUROC of Gram, of the best other single method, and of Guard", "No method saw an outlier.")
CAPTION = (
    "AUROC in percent, the further right the better. The axis is logarithmic in the distance to 100; "
    f"what is above {BEST} stands at its end. The best other method is named at the right."
)

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

    def marks(ood: str, aurocs: Mapping[str, float]) -> Marks:
        best = max((name for name in methods if name in others), key=lambda name: aurocs[name])
        return Marks(ood, aurocs[GRAM], aurocs[best], best, aurocs[GUARD])

    rows = [marks(ood, aurocs) for ood, aurocs in figures.items()]
    return [*sorted(rows, key=lambda row: -row.gram), marks(MEAN, mean)]


def read_figures(path: str | PathLike[str]) -> tuple[str, Figures]:
    """A network's title and its figures, from the CSV of the study.

    Sets without data, and sets that are shown apart, are left out.
    """
    figures: dict[str, dict[str, float]] = {}
    title = ""
    with Path(path).open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            title = f"{line['network']}, {line['in_distribution']}"
            if line["auroc"] and line.get("note") != APART:
                figures.setdefault(line["ood"], {})[line["method"]] = float(line["auroc"])
    return title, figures


def draw_why(path: str | PathLike[str], networks: Mapping[str, Figures]) -> None:
    """Draw one panel per network, one row per set: AUROC of Gram, of the best other method, of Guard.

    The axis is logarithmic in the distance to 100, so that 99 and 99.9 are as far apart as 0 and 90.
    """
    panels = {title: marks_of(figures) for title, figures in networks.items()}
    lowest = min(min(row.gram, row.other, row.guard) for rows in panels.values() for row in rows)
    limits = (1.25 * max(_left(lowest), 25), _left(BEST) / 1.25)
    columns = min(2, len(panels))
    bands = [list(panels.items())[i : i + columns] for i in range(0, len(panels), columns)]
    heights = [0.6 + 0.22 * max(len(rows) for _, rows in band) for band in bands]
    legend = [key(look, name, ms=SIZES[name]) for name, look in SHOWN.items()]
    frame = framed_with_legend(
        WORDS,
        sum(heights),
        len(bands),
        columns,
        legend=legend,
        caption=CAPTION,
        gridspec_kw={"height_ratios": heights},
    )
    for axes in frame.axes.flat:
        axes.set_axis_off()
    for band, row in zip(bands, frame.axes, strict=True):
        for (title, rows), axes in zip(band, row, strict=False):
            axes.set_axis_on()
            axes.set(xscale="log", xlim=limits)
            _panel(axes, title, rows, WIDTH / columns, TICKS if columns == 1 else FEW_TICKS)
    frame.write(path)


def _panel(axes: Any, title: str, rows: Sequence[Marks], width: float, marked: Sequence[float]) -> None:
    plain(axes)
    for y, row in enumerate(rows):
        if y % 2 == 0:
            axes.axhspan(y - 0.5, y + 0.5, color=BAND, lw=0, zorder=0)
        _row(axes, y, row)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names = ["\n".join(wrapped(row.ood, SMALL, 0.35 * width)) for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=SMALL, linespacing=0.9)
    axes.get_yticklabels()[-1].set_weight("bold")
    axes.axhline(len(rows) - 1.5, color=SOFT, lw=0.8)
    ticks = [tick for tick in marked if _left(tick) <= axes.get_xlim()[0]]
    axes.set_xticks([_left(tick) for tick in ticks], [f"{tick:g}" for tick in ticks], fontsize=SMALL - 0.5)
    axes.minorticks_off()
    axes.grid(axis="x", color=FAINT, lw=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.set_title(title, loc="left", fontsize=TEXT, weight="bold", color=INK)


def _row(axes: Any, y: int, row: Marks) -> None:
    """The three marks of a set, and the name of the best other method."""
    at = {GRAM: _left(row.gram), "best other": _left(row.other), GUARD: _left(row.guard)}
    axes.plot([min(at.values()), max(at.values())], [y, y], color="#b5bac2", lw=1.4, zorder=1)
    for name, look in SHOWN.items():
        # Guard lies below the smaller two, which stand a little apart: all are seen where they meet.
        off = {GRAM: -0.17, "best other": 0.17, GUARD: 0.0}[name]
        style = {"marker": look.mark, "color": look.colour, "ms": SIZES[name], "mec": "white", "mew": 0.5}
        axes.plot(at[name], y + off, ls="", zorder=2 if name == GUARD else 3, **style)
    place = axes.get_yaxis_transform()
    axes.text(1.01, y, row.others_name, transform=place, va="center", fontsize=SMALL - 0.5, color=OTHER)


def _left(auroc: float) -> float:
    """How far it is from 100."""
    return 100 - min(auroc, BEST)


if __name__ == "__main__":
    draw_why(sys.argv[1], dict(map(read_figures, sys.argv[2:])))
