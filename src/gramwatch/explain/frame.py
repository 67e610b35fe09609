"""How pictures are drawn and written: width, letters, colours, and the lines of text above the drawing.

Pages show a picture about 800 pixels wide. At `WIDTH` inches, a letter of `SMALL` points
is ten pixels high there.
"""

import io
import re
from dataclasses import dataclass
from os import PathLike
from typing import Any

from gramwatch.errors import MissingExtraError
from gramwatch.files.writing import replacing

INK, SOFT, FAINT, BAND = "#22262c", "#5b6470", "#dcdfe4", "#f3f4f6"
"""Text, captions, grids and stripes."""
INSIDE, OUTSIDE = "#5f7d8c", "#b3261e"
"""The colours of in-distribution and flagged images, where no method is meant."""
OURS = {"Guard": "#111111", "Gram": "#0072B2"}
"""The colours of our methods."""
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
    """A figure with room for words and caption. The rest belongs to `axes`."""

    figure: Any
    axes: Any
    """Rows x columns of axes."""
    top: float
    """Where the words end, as a share of the height."""

    def write(self, path: str | PathLike[str] | None) -> Any:
        """Write the picture. Without a path, return the figure."""
        return self.figure if path is None else write_picture(self.figure, path)


def framed(
    words: Words,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    room: float = 0.0,
    caption: str = "",
    **how: Any,
) -> Frame:
    """A picture with a grid of axes.

    Args:
        words: above it.
        height: of the axes with their labels, in inches.
        rows: of axes.
        columns: of axes.
        room: below the words, kept free for a legend, in inches.
        caption: below the axes.
        how: handed on to `pyplot.subplots`.

    """
    lines = _lines(words)
    below = wrapped(caption, SMALL) if caption else []
    above = sum(size * _LEADING / 72 for _, size, _ in lines) + 2 * MARGIN
    foot = len(below) * SMALL * _LEADING / 72 + MARGIN
    total = above + room + height + foot
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(WIDTH, total), dpi=DPI, squeeze=False, layout="constrained", **how
    )
    side = MARGIN / WIDTH
    figure.get_layout_engine().set(rect=(side, foot / total, 1 - 2 * side, height / total))
    y = total - MARGIN
    for text, size, style in lines:
        figure.text(side, y / total, text, va="top", fontsize=size, **style)
        y -= size * _LEADING / 72
    for number, text in enumerate(reversed(below)):
        bottom = (MARGIN + number * SMALL * _LEADING / 72) / total
        figure.text(side, bottom, text, va="bottom", fontsize=SMALL, color=SOFT)
    return Frame(figure, axes, (total - above) / total)


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
