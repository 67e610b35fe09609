"""The facts on the page before an image is given, and the images to try."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gramwatch.errors import DataError
from gramwatch.inputs import decoding
from gramwatch.inputs.files import Files
from gramwatch.inputs.preprocessing import Preprocessing

KINDS = {"JPEG": "jpeg", "MPO": "jpeg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
"""The formats that browsers show."""
MOST_EXAMPLES = 12
MOST_BYTES = 8 * 2**20
"""Bytes of an example. They stay in memory."""


@dataclass(frozen=True)
class Example:
    """An image to try: its name, and its file."""

    name: str
    data: bytes
    kind: str = "image/png"


@dataclass(frozen=True)
class Shown:
    """The facts about the guard on the page."""

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


def examples_of(files: Files) -> Iterator[Example]:
    """Images of a folder, evenly spread. Those that a browser does not show are left out."""
    count = min(MOST_EXAMPLES, len(files))
    for number in [i * len(files) // count for i in range(count)]:
        path = Path(files.paths[number])
        try:
            with decoding.begun(path) as image:
                kind = KINDS.get(image.format)
            if kind is not None and path.stat().st_size <= MOST_BYTES:
                name = path.name if files.labels is None else f"{files.labels[number]}: {path.name}"
                yield Example(name, path.read_bytes(), f"image/{kind}")
        except (DataError, OSError):
            continue


def made_up(preprocessing: Preprocessing) -> Iterator[Example]:
    """Images that no network was trained on: grey, noise and stripes."""
    from PIL import Image

    height, width = preprocessing.size
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3))
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    stripes = (across + down) // max(1, min(height, width) // 8) % 2 * 255
    images = {"plain grey": np.full((height, width), 128), "coloured noise": noise, "stripes": stripes}
    for name, pixels in images.items():
        file = BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).convert("RGB").save(file, "PNG")
        yield Example(name, file.getvalue())
