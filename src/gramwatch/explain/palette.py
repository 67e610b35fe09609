"""One look for each method, the same in every picture: a colour and a mark.

Colours are Okabe & Ito's and Tol's: people with a colour deficiency tell them apart. Two methods of a picture
differ by their marks, too.
"""

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

INK, SOFT, FAINT, BAND = "#22262c", "#5b6470", "#dcdfe4", "#f3f4f6"
"""Text, captions, grids and stripes."""
INSIDE, OUTSIDE = "#5f7d8c", "#b3261e"
"""The colours of in-distribution and flagged images, where no method is meant."""
OTHER = "#8a6d3b"
"""The colour of any other method that a picture names."""


@dataclass(frozen=True)
class Look:
    """How a method is drawn."""

    colour: str
    mark: str


LOOKS = {
    "Guard": Look("#111111", "o"),
    "Gram": Look("#0072B2", "s"),
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
