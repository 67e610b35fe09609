"""What every set of images is described by, and what its reader hands over."""

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
    """None: it is not known."""
    cited: str = ""
    """Where the checksums were published."""
    folder: str = ""
    """Where the file goes, below the root; an archive is unpacked there."""
    sha256: str | None = None
    """Where it is known, it is what the file is compared with; the MD5 is not."""
    size: int | None = None
    """In bytes, where it is known."""

    @property
    def has_checksum(self) -> bool:
        """Whether a file can be told from another."""
        return self.md5 is not None or self.sha256 is not None

    @property
    def file(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Raw:
    """A set as it lies on disk: images in memory, or the files they are in."""

    images: Tensor | Sequence[Path]
    """uint8 of shape N x C x H x W, or paths of image files."""
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def of_classes(self, labels: Sequence[int]) -> "Raw":
        """The images of these classes. Their new labels are the positions in `labels`."""
        assert self.labels is not None
        of_class = [(self.labels == label).nonzero().flatten() for label in labels]
        chosen = torch.cat(of_class)
        renumbered = torch.cat([torch.full_like(each, new) for new, each in enumerate(of_class)])
        if isinstance(self.images, Tensor):
            return Raw(self.images[chosen], renumbered)
        return Raw([self.images[i] for i in chosen.tolist()], renumbered)


@dataclass(frozen=True)
class Source:
    """One set of images: where it comes from, where it lies and what reads it."""

    title: str
    about: str
    place: str
    """The file or folder, below the root, by which its presence is told."""
    read: Callable[[Path, str], Raw]
    """From the root and the split."""
    splits: tuple[str, ...] = ("train", "test")
    downloads: tuple[Download, ...] = ()
    reduce: str = "antialiased"
    """How larger images are reduced unless something else is asked for."""
    classes: tuple[str, ...] = ()
    """The names of the classes in the order of their labels, where they are known."""


def missing(path: Path, what: str = "") -> MissingDataError:
    """The error for a file that is not there; `load` adds what to do."""
    return MissingDataError(f"there is no {what or 'file'} {path}")


def first_present(candidates: Sequence[Path]) -> Path:
    """The first of several places that exists; an error names the first one."""
    for path in candidates:
        if path.exists():
            return path
    raise missing(candidates[0], "file or folder")
