"""Tables of shades: methods x sets, darker where a metric is higher, each method's worst set framed.

With many sets the table is turned: a row for each set, a column for each method.
"""

import math
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from gramwatch.evaluation.evaluate import Evaluation
from gramwatch.explain.frame import SMALL, Words, framed, plain, pyplot, text_width, wrapped
from gramwatch.explain.palette import BAND, INK, LOOKS, OUTSIDE, family
from gramwatch.numerics.metrics import METRICS

BEST = 12
"""How many of the best methods have a row."""
ALWAYS = ("Guard", "Gram")
"""Methods that have a row wherever they stand."""
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
    rows = chosen(ranks)
    sets = list(next(iter(figures.values())))
    if len(sets) > MOST_COLUMNS:
        _draw_turned(path, figures, words, ranks, rows, _caption(metric, ranks, rows, table))
        return
    frame = framed(words, _room(sets) + ROW * len(rows), caption=_caption(metric, ranks, rows, table))
    axes = frame.axes[0, 0]
    shade = _shades(figures, rows)
    for y, method in enumerate(rows):
        values = [*(figures[method][ood] for ood in sets), _mean(figures[method])]
        for x, value in enumerate(values):
            _cell(axes, x, y, value, shade(value), bold=x == len(sets) or method == "Guard")
        worst = values.index(min(values[:-1]))
        _box(axes, worst, y, fill=False, edgecolor=OUTSIDE, linewidth=1.1)
    axes.set(xlim=(-0.5, len(sets) + 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.axvline(len(sets) - 0.5, color="white", linewidth=3)
    _names(axes, ranks, rows)
    _heads(axes, [*sets, "mean"])
    axes.get_xticklabels()[-1].set_weight("bold")
    _skipped(axes, ranks, rows)
    frame.write(path)


def _draw_turned(
    path: str | PathLike[str],
    figures: Figures,
    words: Words,
    ranks: Mapping[str, int],
    columns: Sequence[str],
    caption: str,
) -> None:
    """Draw a row for each set, and a column for each method."""
    sets = list(next(iter(figures.values())))
    heads = ["\n".join(wrapped(f"{ranks[method]}. {method}", SMALL, HEAD)) for method in columns]
    lines = [line for head in heads for line in head.splitlines()]
    frame = framed(words, _room(lines) + LOW_ROW * (len(sets) + 1), caption=caption)
    axes = frame.axes[0, 0]
    shade = _shades(figures, columns)
    for x, method in enumerate(columns):
        values = [*(figures[method][ood] for ood in sets), _mean(figures[method])]
        for y, value in enumerate(values):
            _cell(axes, x, y, value, shade(value), bold=y == len(sets) or method == "Guard")
        _box(axes, x, values.index(min(values[:-1])), fill=False, edgecolor=OUTSIDE, linewidth=1.1)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(sets) + 0.5, -0.5))
    axes.axhline(len(sets) - 0.5, color="white", linewidth=3)
    plain(axes)
    axes.set_yticks(range(len(sets) + 1), [*sets, "mean"], fontsize=SMALL)
    axes.get_yticklabels()[-1].set_weight("bold")
    _heads(axes, heads)
    _marked(axes.get_xticklabels(), columns)
    if "Guard" in columns:
        _outline(axes, (columns.index("Guard") - 0.5, -0.5), 1, len(sets) + 1)
    frame.write(path)


def ranked(figures: Figures) -> dict[str, int]:
    """The methods, the best mean first, with their places."""
    order = sorted(figures, key=lambda method: -_mean(figures[method]))
    return {method: place for place, method in enumerate(order, 1)}


def chosen(ranks: Mapping[str, int]) -> list[str]:
    """The methods that have a row: all where two more than the best would be left out at most."""
    if len(ranks) <= BEST + 2:
        return list(ranks)
    return [method for method, place in ranks.items() if place <= BEST or method in ALWAYS]


def _mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)


def _shades(figures: Figures, methods: Sequence[str]) -> Any:
    """From a figure to its colour. The lowest figure of these methods, or 50, is the lightest."""
    lowest = min(50.0, *(min(figures[method].values()) for method in methods))
    colours = pyplot().get_cmap("Blues")
    # Up to 108 of a hundred: the darkest blue would hide nothing, but tires the eye.
    return lambda value: colours((value - lowest) / (108 - lowest))


def _cell(axes: Any, x: int, y: int, value: float, colour: Sequence[float], bold: bool) -> None:
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


def _box(axes: Any, x: int, y: int, **how: Any) -> None:
    axes.add_patch(pyplot().Rectangle((x - 0.46, y - 0.43), 0.92, 0.86, zorder=3, **how))


def _names(axes: Any, ranks: Mapping[str, int], rows: Sequence[str]) -> None:
    """The methods with their places; Guard's row is marked, Gram's name has its colour."""
    labels = [f"{ranks[method]}. {method}" for method in rows]
    plain(axes)
    lines = ["\n".join(wrapped(label, SMALL, NAMES)) for label in labels]
    axes.set_yticks(range(len(rows)), lines, fontsize=SMALL, linespacing=0.9)
    _marked(axes.get_yticklabels(), rows)
    if "Guard" in rows:
        _outline(axes, (-0.5, rows.index("Guard") - 0.5), axes.get_xlim()[1] + 0.5, 1)


def _marked(labels: Sequence[Any], methods: Sequence[str]) -> None:
    """Give the names of Guard and Gram their colours."""
    for label, method in zip(labels, methods, strict=True):
        if method in ALWAYS:
            label.set(color=LOOKS[family(method)].colour, weight="bold")


def _outline(axes: Any, corner: tuple[float, float], width: float, height: float) -> None:
    """The frame around Guard's figures."""
    style = {"fill": False, "edgecolor": LOOKS["Guard"].colour, "lw": 1.8, "zorder": 4, "clip_on": False}
    axes.add_patch(pyplot().Rectangle(corner, width, height, **style))


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
