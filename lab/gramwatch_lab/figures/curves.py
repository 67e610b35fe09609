"""Curves of depth and order, ours beside the published ones (Fig. 1 and 2): one panel for each set."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from gramwatch.explain.frame import FAINT, INK, SMALL, TEXT, Words, plain, wrapped
from gramwatch_lab.figures.looks import Look, framed_with_legend, key, looks_of
from gramwatch_lab.figures.table import Cell

COLUMNS = 4
AXES = {"stage": "stage or dense block", "order": "order of the Gram matrix"}


@dataclass(frozen=True)
class Panel:
    """What is known of one set: TNR in percent."""

    curves: Mapping[str, Sequence[float]]
    """By metric, one point for each part."""
    whole: Mapping[str, float]
    """Methods that see the whole network, by name."""
    published: Mapping[str, Sequence[float]]
    """The curves in print, by metric."""


def panels_of(
    cells: Sequence[Cell], published: Mapping[str, Sequence[float]] | None = None
) -> dict[str, Panel]:
    """The panels of a table whose methods are called "Min/Max, order 3", or by their names if they see all.

    Args:
        cells: the table.
        published: curves of Min/Max by set, in place of what the table has as published.

    """
    panels = {}
    for ood in dict.fromkeys(cell.ood for cell in cells if cell.ours):
        curves: dict[str, list[float]] = {}
        theirs: dict[str, list[float]] = {}
        whole = {}
        for cell in (cell for cell in cells if cell.ood == ood):
            metric, part = _part(cell.method)
            if part:
                curves.setdefault(metric, []).append(cell.ours["tnr"])
                theirs.setdefault(metric, []).append(cell.published.get("tnr", math.nan))
            else:
                whole[cell.method] = cell.ours["tnr"]
        if published is not None:
            theirs = {"Min/Max": list(published[ood])} if ood in published else {}
        in_print = {metric: points for metric, points in theirs.items() if not all(map(math.isnan, points))}
        panels[ood] = Panel(curves, whole, in_print)
    return panels


def draw_curves(
    path: str | PathLike[str],
    cells: Sequence[Cell],
    words: Words,
    published: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Draw TNR by stage or order. Ours is solid, a published curve dotted and hollow, a whole method dashed.

    `published` has curves of Min/Max by set, in place of those in the table.
    """
    panels = panels_of(cells, published)
    kind = next(part for cell in cells if (part := _part(cell.method)[1])).split()[0]
    first = next(iter(panels.values()))
    looks, whole = looks_of(first.curves), looks_of(first.whole)
    rows = math.ceil(len(panels) / COLUMNS)
    frame = framed_with_legend(
        words,
        0.3 + 1.35 * rows,
        rows,
        COLUMNS,
        legend=_legend(looks, whole, any(panel.published for panel in panels.values())),
        sharex=True,
        sharey=True,
    )
    for axes, (ood, panel) in zip(frame.axes.flat, panels.items(), strict=False):
        _panel(axes, ood, panel, looks | whole)
    for axes in frame.axes.flat[len(panels) :]:
        axes.set_axis_off()
    frame.figure.supylabel("TNR at TPR 95 %, percent", fontsize=TEXT, color=INK)
    frame.figure.supxlabel(AXES[kind], fontsize=TEXT, color=INK)
    frame.write(path)


def _part(method: str) -> tuple[str, str]:
    """The metric of a part and the part's name; of a whole method, its name and nothing."""
    match = re.fullmatch(r"(.*), ((?:stage|order) \d+)", method)
    return (match.group(1), match.group(2)) if match else (method, "")


def _panel(axes: Any, ood: str, panel: Panel, looks: Mapping[str, Look]) -> None:
    x = range(1, 1 + max(map(len, panel.curves.values())))
    for method, value in panel.whole.items():
        axes.axhline(value, color=looks[method].colour, ls="--", lw=1)
    for metric, points in panel.published.items():
        look = looks[metric]
        axes.plot(x, points, color=INK, marker=look.mark, ls=":", mfc="white", ms=4, lw=1, zorder=4)
    for metric, points in panel.curves.items():
        look = looks[metric]
        axes.plot(x, points, color=look.colour, marker=look.mark, ms=3, lw=1.4, zorder=3)
    plain(axes)
    axes.set(ylim=(-4, 104), xlim=(0.7, x[-1] + 0.3))
    axes.set_xticks(x)
    axes.set_yticks((0, 50, 100))
    axes.tick_params(labelsize=SMALL, labelbottom=True, pad=1)
    axes.grid(color=FAINT, lw=0.6)
    axes.set_title("\n".join(wrapped(ood, SMALL, 1.75)), fontsize=SMALL, loc="left", color=INK, pad=3)


def _legend(looks: Mapping[str, Look], whole: Mapping[str, Look], published: bool) -> list[Any]:
    keys = [key(look, f"Gram, {metric}", ls="-", ms=4) for metric, look in looks.items()]
    if published:
        keys.append(key(Look(INK, "s"), "published curve", ls=":", mfc="white", ms=4.5))
    return keys + [key(look, f"{name}, whole", ls="--", marker="") for name, look in whole.items()]
