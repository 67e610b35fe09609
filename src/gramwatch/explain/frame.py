"""How pictures are drawn and written: width, letters, and the lines of text above the drawing.

Pages show a picture about 800 pixels wide. At `WIDTH` inches, a letter of `SMALL` points
is ten pixels high there.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from gramwatch.errors import MissingExtraError
from gramwatch.explain.palette import INK, SOFT, Look
from gramwatch.files.writing import replacing

WIDTH, DPI = 8.0, 200
TITLE, TEXT, SMALL = 10.5, 8.0, 7.0
"""Sizes of letters, in points."""
MARGIN = 0.1
"""In inches, on all sides."""
_LEADING = 1.35
"""Height of a line, in letters."""


def pyplot() -> Any:
    """Matplotlib's pyplot with a backend that needs no screen, or an error that names the extra."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError(
            "pictures need matplotlib: install it with pip install 'gramwatch[plot]'"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def write_picture(figure: Any, path: str | PathLike[str]) -> None:
    """Write a figure as a PNG of 256 colours, a third as large as one of all colours, and close it."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    pyplot().close(figure)
    picture = Image.open(drawn).convert("RGB")
    with replacing(path) as beside:
        picture.quantize(256, dither=Image.Dither.NONE).save(beside, "PNG", optimize=True)


@dataclass(frozen=True)
class Words:
    """The lines of text above a picture."""

    title: str
    seen: str = ""
    """Which methods saw outliers or were tuned, and on what."""
    protocol: str = ""
    """Network, images fitted on, draws."""

    @classmethod
    def of(cls, title: str, protocol: str) -> "Words":
        """Take the sentences on outliers and tuning out of a protocol. Pictures show no spread over draws."""
        sentences = re.split(r"(?<=\.)\s+(?=[A-Z(])", protocol.replace(" ± standard deviation", ""))
        seen = [sentence for sentence in sentences if re.search(r"\b(outliers?|tuned|saw)\b", sentence)]
        return cls(
            title, " ".join(seen), " ".join(sentence for sentence in sentences if sentence not in seen)
        )


@dataclass
class Frame:
    """A figure with room for words, legend and caption. The rest belongs to `axes`."""

    figure: Any
    axes: Any
    """Rows x columns of axes."""

    def write(self, path: str | PathLike[str]) -> None:
        """Write the picture."""
        write_picture(self.figure, path)


def framed(
    words: Words,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    legend: Sequence[Any] = (),
    caption: str = "",
    **how: Any,
) -> Frame:
    """A picture with a grid of axes.

    Args:
        words: above it.
        height: of the axes with their labels, in inches.
        rows: of axes.
        columns: of axes.
        legend: handles, below the words.
        caption: below the axes.
        how: handed on to `pyplot.subplots`.

    """
    lines = _lines(words)
    below = wrapped(caption, SMALL) if caption else []
    above = sum(size * _LEADING / 72 for _, size, _ in lines) + 2 * MARGIN
    keys = _legend_height(legend)
    foot = len(below) * SMALL * _LEADING / 72 + MARGIN
    total = above + keys + height + foot
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(WIDTH, total), dpi=DPI, squeeze=False, layout="constrained", **how
    )
    side = MARGIN / WIDTH
    figure.get_layout_engine().set(rect=(side, foot / total, 1 - 2 * side, height / total))
    y = total - MARGIN
    for text, size, style in lines:
        figure.text(side, y / total, text, va="top", fontsize=size, **style)
        y -= size * _LEADING / 72
    if legend:
        figure.legend(
            handles=legend,
            loc="upper left",
            bbox_to_anchor=(side, (total - above + MARGIN / 2) / total),
            ncols=_keys_per_line(legend),
            frameon=False,
            fontsize=TEXT,
            borderaxespad=0,
            borderpad=0.2,
            handletextpad=0.4,
            columnspacing=1.4,
        )
    for number, text in enumerate(reversed(below)):
        bottom = (MARGIN + number * SMALL * _LEADING / 72) / total
        figure.text(side, bottom, text, va="bottom", fontsize=SMALL, color=SOFT)
    return Frame(figure, axes)


def key(look: Look, label: str, **how: Any) -> Any:
    """An entry of a legend: a mark in the method's look."""
    style = {"ls": "", "marker": look.mark, "color": look.colour, "ms": 5.5, **how}
    return pyplot().Line2D([], [], label=label, **style)


def keys(looks: Mapping[str, Look], **how: Any) -> list[Any]:
    """An entry for each method."""
    return [key(look, method, **how) for method, look in looks.items()]


def plain(axes: Any) -> None:
    """Axes without ticks and frames, with letters of the usual size."""
    axes.tick_params(length=0, labelsize=TEXT, labelcolor=INK)
    axes.spines[:].set_visible(False)


def wrapped(text: str, size: float, inches: float = WIDTH - 2 * MARGIN, weight: str = "normal") -> list[str]:
    """Lines of a text that are no wider than some inches."""
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size, weight) <= inches:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def text_width(text: str, size: float, weight: str = "normal") -> float:
    """How wide a text is, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=size, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def _lines(words: Words) -> list[tuple[str, float, dict[str, Any]]]:
    """The lines above a picture, with the size of their letters and their style."""
    bold = {"weight": "bold", "color": INK}
    parts = [(line, TITLE, bold) for line in wrapped(words.title, TITLE, weight="bold")]
    parts += [(line, TEXT, {"color": INK}) for line in wrapped(words.seen, TEXT)]
    return parts + [(line, SMALL, {"color": SOFT}) for line in wrapped(words.protocol, SMALL)]


def _keys_per_line(legend: Sequence[Any]) -> int:
    """The number of columns that fit side by side. Each column is as wide as its widest entry."""
    widths = [text_width(handle.get_label(), TEXT) + 0.45 for handle in legend]  # with the mark and the gap
    for columns in range(len(widths), 1, -1):
        lines = -(-len(widths) // columns)
        if sum(max(widths[i : i + lines]) for i in range(0, len(widths), lines)) <= WIDTH - 2 * MARGIN:
            return columns
    return 1


def _legend_height(legend: Sequence[Any]) -> float:
    if not legend:
        return 0.0
    lines = -(-len(legend) // _keys_per_line(legend))
    return lines * TEXT * 1.6 / 72 + MARGIN
