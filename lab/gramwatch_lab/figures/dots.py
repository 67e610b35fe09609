"""Ours and the published figures side by side: one row for each set, one panel for each metric."""

from collections.abc import Sequence
from os import PathLike
from typing import Any

from gramwatch.explain.frame import BAND, FAINT, INK, SOFT, TEXT, Words, plain, wrapped
from gramwatch.numerics.metrics import METRICS
from gramwatch_lab.figures.looks import Look, framed_with_legend, key, keys, looks_of
from gramwatch_lab.figures.table import Cell

NAMES = 1.9
"""Widest name of a set, in inches."""


def draw_dots(
    path: str | PathLike[str],
    cells: Sequence[Cell],
    words: Words,
    metrics: Sequence[str] = ("tnr", "auroc"),
) -> None:
    """Draw our figures as filled marks, published ones as hollow marks.

    A set without data has no row, unless there are no data at all.
    """
    shown = [cell for cell in cells if cell.ours] or [cell for cell in cells if cell.published]
    sets = list(dict.fromkeys(cell.ood for cell in shown))
    looks = looks_of(cell.method for cell in shown)
    legend = keys(looks)
    if any(cell.published for cell in shown):
        legend.append(key(Look(SOFT, "o"), "published (hollow)", mfc="white"))
    height = 0.45 + len(sets) * (0.13 + 0.045 * len(looks))
    noted = {cell.ood for cell in shown if cell.note}
    frame = framed_with_legend(
        words, height, 1, len(metrics), legend=legend, caption=_notes(shown), sharey=True
    )
    for axes, metric in zip(frame.axes[0], metrics, strict=True):
        _panel(axes, shown, sets, looks, metric)
    names = ["\n".join(wrapped(f"{name} *" if name in noted else name, TEXT, NAMES)) for name in sets]
    frame.axes[0, 0].set_yticks(range(len(sets)), names, fontsize=TEXT)
    frame.write(path)


def _is_mean(ood: str) -> bool:
    """Whether a row sums up the others."""
    return ood == "mean" or ood.startswith("mean,")


def _notes(cells: Sequence[Cell]) -> str:
    """What is to be said of sets with a star: of which methods, and what."""
    methods: dict[str, list[str]] = {}
    for cell in cells:
        if cell.note and cell.method not in methods.setdefault(cell.note, []):
            methods[cell.note].append(cell.method)
    return " ".join(f"* {note}: {', '.join(names)}." for note, names in methods.items())


def _panel(
    axes: Any, cells: Sequence[Cell], sets: Sequence[str], looks: dict[str, Look], metric: str
) -> None:
    for row in range(0, len(sets), 2):
        axes.axhspan(row - 0.5, row + 0.5, color=BAND, lw=0)
    places = {method: 0.7 * ((i + 0.5) / len(looks) - 0.5) for i, method in enumerate(looks)}
    for cell in cells:
        y = sets.index(cell.ood) + places[cell.method]
        # A published mean is over other sets.
        theirs = None if _is_mean(cell.ood) else cell.published.get(metric)
        _marks(axes, y, cell.ours.get(metric), theirs, looks[cell.method])
    axes.set(ylim=(len(sets) - 0.5, -0.5))
    axes.set_title(f"{METRICS[metric].replace('%', ' %')}, percent", fontsize=TEXT, loc="left", color=INK)
    axes.set_xlim(right=100)
    axes.grid(axis="x", color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    plain(axes)
    for summary in (i for i, name in enumerate(sets) if _is_mean(name)):
        axes.axhline(summary - 0.5, color=SOFT, lw=0.8)


def _marks(axes: Any, y: float, ours: float | None, theirs: float | None, look: Look) -> None:
    """Our figure, the published one, and a line between them."""
    style = {"ls": "", "marker": look.mark, "ms": 5, "clip_on": False}
    if ours is not None and theirs is not None:
        axes.plot([ours, theirs], [y, y], color=look.colour, lw=1, alpha=0.6, zorder=2)
    if theirs is not None:
        axes.plot(theirs, y, mfc="white", mec=look.colour, zorder=3, **style)
    if ours is not None:
        axes.plot(ours, y, color=look.colour, mew=0, zorder=4, **style)
