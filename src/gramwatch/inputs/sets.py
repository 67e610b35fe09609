"""Sets of images by name: what a source is, and the images of a set as a command reads them.

Published sets, and reading them in one size, come with `gramwatch-lab`. docs/datasets.md describes them.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gramwatch.errors import DataError, MissingDataError
from gramwatch.inputs import decoding, synthetic
from gramwatch.inputs.offered import Offered


@dataclass(frozen=True)
class Raw:
    """A set as it is on disk: images in memory, or the paths of image files."""

    images: Tensor | Sequence[Path]
    """uint8 of shape N x C x H x W, or paths of image files."""
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)


@dataclass(frozen=True)
class Source:
    """One set of images: its origin, its place on disk, and its reader."""

    title: str
    about: str
    place: str
    """The file or folder below the root that shows that the set is there. Empty for made-up sets."""
    read: Callable[[Path, str], Raw]
    """Reads the set, given the root and the split."""
    splits: tuple[str, ...] = ("train", "test")
    downloads: tuple[Any, ...] = ()
    """The files that its publisher offers: see `gramwatch_lab.datasets.download`."""
    reduce: str = "antialiased"
    """The default way of reducing larger images."""
    classes: tuple[str, ...] = ()
    """The names of the classes in the order of their labels. Empty if they are not known."""


def missing(path: Path, what: str = "") -> MissingDataError:
    """The error for a missing file. `read` adds what to do."""
    return MissingDataError(f"there is no {what or 'file'} {path}")


def _made_up(name: str) -> Source:
    title, about, _ = synthetic.MAKERS[name]

    def read(root: Path, split: str) -> Raw:
        return Raw(synthetic.outliers(name))

    return Source(title, f"made up: {about} (Hendrycks et al., 2019)", "", read, ("test",))


CATALOGUE: Mapping[str, Source] = Offered(
    "gramwatch.sets", {name: _made_up(name) for name in synthetic.MAKERS}
)
"""All sets by name: those of installed packages, such as `gramwatch-lab`, and made-up ones."""


def default_root() -> Path:
    """The default folder of sets: `$GRAMWATCH_DATA`, or else `~/.cache/gramwatch/data`."""
    return Path(os.environ.get("GRAMWATCH_DATA") or Path.home() / ".cache" / "gramwatch" / "data")


def read(name: str, source: Source, root: Path, split: str) -> Raw:
    """A set as it is on disk. If it is missing or damaged, an error says what to do."""
    try:
        return source.read(root, split)
    except DataError as error:
        absent = isinstance(error, MissingDataError)
        command = f"gramwatch data get {name}{'' if absent else ' --again'}"
        remedy = f"run '{command}'" if source.downloads else source.about
        raise type(error)(
            f"{source.title}: {error}. It belongs in {root / source.place}: {remedy}, or give another root"
        ) from None


@dataclass(frozen=True)
class NamedSet:
    """A set of the catalogue. Its images have keys such as `cifar10/test/00012`."""

    images: Tensor | Sequence[Path]
    keys: Sequence[str]

    @staticmethod
    def load(name: str, split: str) -> "NamedSet":
        """The images of a split, or of the only split that a set has."""
        source = CATALOGUE[name]
        chosen = split if split in source.splits else source.splits[0]
        images = read(name, source, default_root().absolute(), chosen).images
        return NamedSet(images, [f"{name}/{chosen}/{number:05d}" for number in range(len(images))])

    def open(self, key: str, grey: bool = False) -> tuple[Any, str]:
        """One image as Pillow has it, and a note of what was changed."""
        number = int(key.rpartition("/")[2])
        if not isinstance(self.images, Tensor):
            return decoding.opened(self.images[number], grey)
        image = decoding.pillow_image().fromarray(decoding.as_arrays(self.images[number : number + 1])[0])
        return image.convert("L" if grey else "RGB"), ""
