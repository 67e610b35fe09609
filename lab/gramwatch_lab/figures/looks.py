"""One look for each method, the same in every picture: a colour and a mark.

Colours are Okabe & Ito's and Tol's: people with a colour deficiency tell them apart. Two methods of a picture
differ by their marks, too.
"""

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gramwatch.explain.frame import MARGIN, OURS, TEXT, WIDTH, Frame, Words, framed, pyplot, text_width

OTHER = "#8a6d3b"
"""The colour of any other method that a picture names."""


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    colour: str
    mark: str


LOOKS = {
    "Guard": Look(OURS["Guard"], "o"),
    "Gram": Look(OURS["Gram"], "s"),
    "MSP": Look("#9AA0A8", "o"),
    "ODIN": Look("#E69F00", "^"),
    "Mahalanobis": Look("#009E73", "D"),
    "OE": Look("#882255", "v"),
    "DPN": Look("#B07AFF", "P"),
    "VD": Look("#D55E00", "X"),
    "Semantic": Look("#999933", "h"),
}
"""The methods of the paper, and Guard."""
ALIASES = {
    "Outlier Exposure": "OE",
    "Prior Network": "DPN",
    "Variational Dirichlet": "VD",
    # Forms of Gram that tables call by their own names.
    "row sums": "Gram",
    "full triangle": "Gram",
    "diagonal": "Gram",
    "off-diagonal": "Gram",
    "complete": "Gram",
    "Min/Max": "Gram",
    "Mean/Var": "Gram",
}
SPARE = tuple(
    Look(colour, mark)
    for mark in ("p", "<", ">", "d", "*")
    for colour in ("#C44E52", "#117733", "#AA4499", "#661100", "#44AA99", "#6F4E9C", "#B8860B", "#A0522D")
)
"""For methods without an entry in `LOOKS`. The name alone decides: other methods do not change it."""
FORMS = (("", 0.0), ("^", 0.45), ("D", -0.4), ("v", 0.25), ("P", -0.2), ("X", 0.6))
"""Further forms of a method in one picture: another mark, and the colour lighter or darker by a share.

Of a light colour, darker and lighter change places.
"""


def family(method: str) -> str:
    """The method of a name in a table: "Gram" of "Gram less MSP". An unknown name is its own method."""
    known = {_plain(name): name for name in (*LOOKS, *ALIASES)}
    words = _plain(method)
    starts = [name for name in known if re.match(re.escape(name) + r"(?![\w-])", words)]
    if not starts:
        return method.partition(",")[0]
    known_name = known[max(starts, key=len)]
    return ALIASES.get(known_name, known_name)


def look_of(method: str) -> Look:
    """The look of a method, or of the method that it is a form of."""
    method_family = family(method)
    return LOOKS.get(method_family) or SPARE[zlib.crc32(_plain(method_family).encode()) % len(SPARE)]


def looks_of(methods: Iterable[str]) -> dict[str, Look]:
    """The looks of all methods of a picture. Forms of a method have shades of its colour and other marks."""
    methods = list(dict.fromkeys(methods))
    count: dict[str, int] = {}
    looks = {}
    for method in sorted(methods, key=lambda name: name != family(name)):  # the method itself comes first
        number = count.get(family(method), 0)
        count[family(method)] = number + 1
        base = look_of(method)
        mark, shade = FORMS[number % len(FORMS)]
        looks[method] = Look(_shaded(base.colour, shade), mark or base.mark)
    return {method: looks[method] for method in methods}


def _plain(name: str) -> str:
    return name.lower().replace("_", " ").replace("-", " ")


def _shaded(colour: str, share: float) -> str:
    """A colour mixed with white, or with black if the share is negative. Light colours: the other way."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    light = sum(parts) > 3 * 140
    towards = 255 if (share > 0) != light else 0
    return "#" + "".join(f"{round(part + abs(share) * (towards - part)):02X}" for part in parts)


# --- legends -----------------------------------------------------------------------------------------


def key(look: Look, label: str, **how: Any) -> Any:
    """An entry of a legend: a mark in the method's look."""
    style = {"ls": "", "marker": look.mark, "color": look.colour, "ms": 5.5, **how}
    return pyplot().Line2D([], [], label=label, **style)


def keys(looks: Mapping[str, Look], **how: Any) -> list[Any]:
    """An entry for each method."""
    return [key(look, method, **how) for method, look in looks.items()]


def framed_with_legend(words: Words, height: float, *axes: int, legend: Sequence[Any], **how: Any) -> Frame:
    """`framed`, with a legend of these handles below the words."""
    if not legend:
        return framed(words, height, *axes, **how)
    columns = _keys_per_line(legend)
    lines = -(-len(legend) // columns)
    frame = framed(words, height, *axes, room=lines * TEXT * 1.6 / 72 + MARGIN, **how)
    frame.figure.legend(
        handles=legend,
        loc="upper left",
        bbox_to_anchor=(MARGIN / WIDTH, frame.top + MARGIN / 2 / frame.figure.get_figheight()),
        ncols=columns,
        frameon=False,
        fontsize=TEXT,
        borderaxespad=0,
        borderpad=0.2,
        handletextpad=0.4,
        columnspacing=1.4,
    )
    return frame


def _keys_per_line(legend: Sequence[Any]) -> int:
    """The number of columns that fit side by side. Each column is as wide as its widest entry."""
    widths = [text_width(handle.get_label(), TEXT) + 0.45 for handle in legend]  # with the mark and the gap
    for columns in range(len(widths), 1, -1):
        lines = -(-len(widths) // columns)
        if sum(max(widths[i : i + lines]) for i in range(0, len(widths), lines)) <= WIDTH - 2 * MARGIN:
            return columns
    return 1
