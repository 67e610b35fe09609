"""What the page says before an image is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Example:
    """An image to try: its name, and a PNG."""

    name: str
    png: bytes


@dataclass(frozen=True)
class Shown:
    """What the page says about its guard."""

    title: str
    about: str = ""
    """A sentence or two under the title."""
    facts: Sequence[tuple[str, str]] = ()
    """Names and values: the network, what it was fitted on, ..."""
    examples: Sequence[Example] = ()
    fill: bool = False
    """Whether a drawing is cut out and enlarged before it is judged, so that it fills the image."""

    def to_json(self) -> dict[str, Any]:
        """Plain values. The images of the examples are left out."""
        return {
            "title": self.title,
            "about": self.about,
            "facts": [list(fact) for fact in self.facts],
            "examples": [example.name for example in self.examples],
            "fill": self.fill,
        }
