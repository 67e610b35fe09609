"""The description of a set of images, and the result of its reader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gramwatch.errors import MissingDataError


@dataclass(frozen=True)
class Download:
    """One file as its publisher offers it."""

    url: str
    md5: str | None
    """None: unknown."""
    cited: str = ""
    """The publication that has the checksums."""
    folder: str = ""
    """The folder of the file, below the root. An archive is unpacked there."""
    sha256: str | None = None
    """None: unknown. If it is known, the file is compared with it and not with the MD5."""
    size: int | None = None
    """The size in bytes. None: unknown."""

    @property
    def has_checksum(self) -> bool:
        """Whether a checksum is known."""
        return self.md5 is not None or self.sha256 is not None

    @property
    def file(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Raw:
    """A set as it is on disk: images in memory, or the paths of image files."""

    images: Tensor | Sequence[Path]
    """uint8 of shape N x C x H x W, or paths of image files."""
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def of_classes(self, labels: Sequence[int]) -> "Raw":
        """The images of these classes. The new label of a class is its position in `labels`."""
        assert self.labels is not None
        of_class = [(self.labels == label).nonzero().flatten() for label in labels]
        chosen = torch.cat(of_class)
        renumbered = torch.cat([torch.full_like(indices, new) for new, indices in enumerate(of_class)])
        if isinstance(self.images, Tensor):
            return Raw(self.images[chosen], renumbered)
        return Raw([self.images[i] for i in chosen.tolist()], renumbered)


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
    downloads: tuple[Download, ...] = ()
    reduce: str = "antialiased"
    """The default way of reducing larger images."""
    classes: tuple[str, ...] = ()
    """The names of the classes in the order of their labels. Empty if they are not known."""


def missing(path: Path, what: str = "") -> MissingDataError:
    """The error for a missing file. `load` adds what to do."""
    return MissingDataError(f"there is no {what or 'file'} {path}")


def first_present(candidates: Sequence[Path]) -> Path:
    """The first path that exists. If none exists, the error names the first candidate."""
    for path in candidates:
        if path.exists():
            return path
    raise missing(candidates[0], "file or folder")
