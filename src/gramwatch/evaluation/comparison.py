"""Tables of shades: methods x sets, darker where a metric is higher, each method's worst set framed.

With many sets the table is turned: a row for each set, a column for each method.
"""

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from gramwatch.evaluation.evaluate import Evaluation
from gramwatch.explain.frame import (
    BAND,
    INK,
    OURS,
    OUTSIDE,
    SMALL,
    Words,
    framed,
    plain,
    pyplot,
    text_width,
    wrapped,
)
from gramwatch.numerics.metrics import METRICS

BEST = 12
"""How many of the best methods have a row."""
NAMES, ROW, CELL = 1.85, 0.23, 7.2
"""Width of the names and height of a row in inches; size of the figures' letters in points."""
HEAD, LOW_ROW = 1.7, 0.19
"""In a turned table: the length of a line of a head, and the height of a row, in inches."""
MOST_COLUMNS = 22
"""With more sets than this, a set has a row instead of a column."""
SLANT = 50
"""Of the heads, in degrees."""

Figures = Mapping[str, Mapping[str, float]]
"""A metric in percent, by method and set."""


def draw_comparison(
    path: str | PathLike[str], evaluation: Evaluation, title: str, metric: str = "auroc", table: str = ""
) -> None:
    """Draw the best methods of an evaluation. `table` names the file that has all of them."""
    figures = dict(zip(evaluation.methods, 100 * evaluation.figures(metric), strict=True))
    shown = {name: dict(zip(evaluation.sets, values, strict=True)) for name, values in figures.items()}
    draw_shades(path, shown, Words.of(title, evaluation.protocol), metric, table)


def draw_shades(
    path: str | PathLike[str], figures: Figures, words: Words, metric: str = "auroc", table: str = ""
) -> None:
    """Draw the best methods by their mean over the sets, Guard and Gram; the best comes first."""
    ranks = ranked(figures)
    methods, sets = chosen(ranks), list(next(iter(figures.values())))
    turned = len(sets) > MOST_COLUMNS
    width, row = (HEAD, LOW_ROW) if turned else (NAMES, ROW)
    names = ["\n".join(wrapped(f"{ranks[method]}. {method}", SMALL, width)) for method in methods]
    heads, sides = (names, [*sets, "mean"]) if turned else ([*sets, "mean"], names)
    slanting = [line for name in names for line in name.splitlines()] if turned else sets
    caption = _caption(metric, ranks, methods, table)
    frame = framed(words, _room(slanting) + row * len(sides), caption=caption)
    axes, shade = frame.axes[0, 0], _shades(figures, methods)
    for i, method in enumerate(methods):
        values = [*(figures[method][ood] for ood in sets), _mean(figures[method])]
        for j, value in enumerate(values):
            bold = j == len(sets) or method == "Guard"
            _cell(axes, (i, j) if turned else (j, i), value, shade(value), bold)
        worst = values.index(min(values[:-1]))
        x, y = (i, worst) if turned else (worst, i)
        _frame(axes, (x - 0.46, y - 0.43), (0.92, 0.86), edgecolor=OUTSIDE, linewidth=1.1, zorder=3)
    axes.set(xlim=(-0.5, len(heads) - 0.5), ylim=(len(sides) - 0.5, -0.5))
    divide = axes.axhline if turned else axes.axvline
    divide(len(sets) - 0.5, color="white", linewidth=3)
    plain(axes)
    spacing = {} if turned else {"linespacing": 0.9}  # names of methods may have several lines
    axes.set_yticks(range(len(sides)), sides, fontsize=SMALL, **spacing)
    _heads(axes, heads)
    labels = axes.get_yticklabels(), axes.get_xticklabels()
    of_sets, of_methods = labels if turned else reversed(labels)
    of_sets[-1].set_weight("bold")
    for label, method in zip(of_methods, methods, strict=True):
        if method in OURS:
            label.set(color=OURS[method], weight="bold")
    if "Guard" in methods:
        start, length = methods.index("Guard") - 0.5, len(sets) + 1
        corner, size = ((start, -0.5), (1, length)) if turned else ((-0.5, start), (length, 1))
        _frame(axes, corner, size, edgecolor=OURS["Guard"], lw=1.8, zorder=4, clip_on=False)
    if not turned:
        _skipped(axes, ranks, methods)
    frame.write(path)


def ranked(figures: Figures) -> dict[str, int]:
    """The methods, the best mean first, with their places."""
    order = sorted(figures, key=lambda method: -_mean(figures[method]))
    return {method: place for place, method in enumerate(order, 1)}


def chosen(ranks: Mapping[str, int]) -> list[str]:
    """The methods that have a row: all where two more than the best would be left out at most."""
    if len(ranks) <= BEST + 2:
        return list(ranks)
    return [method for method, place in ranks.items() if place <= BEST or method in OURS]


def _mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)


def _shades(figures: Figures, methods: Sequence[str]) -> Any:
    """From a figure to its colour. The lowest figure of these methods, or 50, is the lightest."""
    lowest = min(50.0, *(min(figures[method].values()) for method in methods))
    colours = pyplot().get_cmap("Blues")
    # Up to 108 of a hundred: the darkest blue would hide nothing, but tires the eye.
    return lambda value: colours((value - lowest) / (108 - lowest))


def _cell(axes: Any, place: tuple[int, int], value: float, colour: Sequence[float], bold: bool) -> None:
    x, y = place
    axes.add_patch(pyplot().Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="none"))
    red, green, blue, *_ = colour
    text = f"{value:.1f}"
    axes.text(
        x,
        y,
        "100" if text == "100.0" else text,
        ha="center",
        va="center",
        color="white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.55 else INK,
        fontsize=CELL,
        weight="bold" if bold else "normal",
    )


def _frame(axes: Any, corner: tuple[float, float], size: tuple[float, float], **style: Any) -> None:
    axes.add_patch(pyplot().Rectangle(corner, *size, fill=False, **style))


def _heads(axes: Any, columns: Sequence[str]) -> None:
    """The names of columns, slanting so that they take no more width than a figure."""
    axes.set_xticks(range(len(columns)), columns)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    for label in axes.get_xticklabels():
        label.set(rotation=SLANT, ha="left", va="bottom", rotation_mode="anchor", fontsize=SMALL)


def _room(sets: Sequence[str]) -> float:
    """How high the heads are, in inches."""
    return 0.15 + max(text_width(name, SMALL) for name in sets) * math.sin(math.radians(SLANT))


def _skipped(axes: Any, ranks: Mapping[str, int], rows: Sequence[str]) -> None:
    """A gap wherever methods are left out."""
    for y, method in enumerate(rows[1:], 1):
        if ranks[method] > ranks[rows[y - 1]] + 1:
            axes.axhline(y - 0.5, color="white", linewidth=4, zorder=2)
            axes.axhline(y - 0.5, color=BAND, linewidth=1, linestyle=(0, (4, 3)), zorder=2)


def _caption(metric: str, ranks: Mapping[str, int], rows: Sequence[str], table: str) -> str:
    named = f"{METRICS[metric].replace('%', ' %')} in percent; 100 is 99.95 or more. "
    named += "Red frame: the method's worst set."
    if len(rows) == len(ranks):
        return named
    more = "".join(f" and {method}" for method in rows if ranks[method] > BEST)
    where = f" All are in {table}." if table else ""
    return f"{named} Shown: the best {BEST} of {len(ranks)} by the mean{more}.{where}"
