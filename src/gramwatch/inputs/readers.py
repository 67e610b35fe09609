"""Images as batches, decoded by several workers, in order and in constant memory."""

import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gramwatch.errors import DataError
from gramwatch.inputs import decoding
from gramwatch.inputs.preprocessing import Preprocessing

Opener = Callable[..., tuple[Any, str]]
"""Opens an image by its key: a Pillow image, and a note of what was changed. `grey` makes it grey."""


@dataclass(frozen=True)
class Read:
    """One image after decoding."""

    key: str
    """Its path, or its name in a named set."""
    inputs: Tensor | None
    """C x H x W. None if it could not be read."""
    change: str = ""
    """The change by resizing: see `Preprocessing.change_of`."""
    note: str = ""
    error: str = ""


@dataclass(frozen=True)
class Batch:
    """Images that were decoded together, in order."""

    images: list[Read]
    inputs: Tensor | None
    """The inputs of the readable images. None if there are none."""


@dataclass
class Tally:
    """Counts of the images that were read, of the changes by resizing, and the first errors."""

    read: int = 0
    unreadable: set[str] = field(default_factory=set)
    changes: "Counter[str]" = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def add(self, batch: Batch) -> None:
        """Count the images of a batch."""
        for image in batch.images:
            if image.inputs is None:
                self.unreadable.add(image.key)
                if len(self.errors) < 3:
                    self.errors.append(f"{image.key}: {image.error}")
            else:
                self.read += 1
                self.changes[image.change] += 1

    @staticmethod
    def of_all(tallies: "Iterable[Tally]") -> "Tally":
        """One tally of several, such as those of several processes."""
        total = Tally()
        for tally in tallies:
            total.read += tally.read
            total.unreadable |= tally.unreadable
            total.changes += tally.changes
            total.errors = [*total.errors, *tally.errors][:3]
        return total

    @property
    def failed(self) -> int:
        """The number of images that could not be read."""
        return len(self.unreadable)

    def usual(self) -> str:
        """The change by resizing of most images: `"kept"`, `"reduced"` or `"enlarged"`."""
        return self.changes.most_common(1)[0][0] if self.changes else ""


class _Decoded(Dataset[Read]):
    """Decodes an image by its key. The keys come from a sampler, so that they need not be in memory."""

    def __init__(self, opener: Opener, preprocessing: Preprocessing) -> None:
        self.opener, self.preprocessing = opener, preprocessing

    def __getitem__(self, key: Any) -> Read:
        try:
            image, note = self.opener(key)
            change = self.preprocessing.change_of(*image.size)
            return Read(key, self.preprocessing(image), change, note)
        except DataError as error:
            return Read(key, None, error=str(error))
        except MemoryError:
            return Read(key, None, error=decoding.NO_MEMORY)


class Images:
    """Batches of images. Every iteration reads them anew."""

    def __init__(
        self,
        keys: Iterable[str],
        preprocessing: Preprocessing,
        *,
        opener: Opener | None = None,
        batch_size: int = 64,
        workers: int = 0,
    ) -> None:
        self.keys, self.batch_size = keys, batch_size
        self._loader = DataLoader(
            _Decoded(partial(opener or decoding.opened, grey=preprocessing.grey), preprocessing),
            batch_size,
            sampler=keys,
            num_workers=workers,
            collate_fn=_together,
            worker_init_fn=_leave_interrupts_to_the_main_process,
        )

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self._loader
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a process that decodes images was killed, perhaps for lack of memory or of room in "
                "/dev/shm: use fewer workers, or none (--workers 0)"
            ) from error

    def inputs(self, tally: Tally) -> "Inputs":
        """The inputs of the readable images alone, for `fit` and `calibrate`."""
        return Inputs(self, tally)


@dataclass(frozen=True)
class Inputs:
    """The inputs of images, batch by batch. What was read is counted.

    If no image of a batch can be read, the batch is empty, so that every batch keeps its number.
    """

    images: Images
    tally: Tally

    def __len__(self) -> int:
        """The number of batches, for a bar that shows the time left."""
        if not isinstance(self.images.keys, Sequence):
            raise TypeError("the number of images is not known")
        return -(-len(self.images.keys) // self.images.batch_size)

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.images:
            self.tally.add(batch)
            yield torch.empty(0) if batch.inputs is None else batch.inputs


def _together(images: list[Read]) -> Batch:
    readable = [image.inputs for image in images if image.inputs is not None]
    # The inputs travel once, in the stack. Only their presence is kept in the single images.
    marks = [
        image if image.inputs is None else Read(image.key, torch.empty(0), image.change, image.note)
        for image in images
    ]
    return Batch(marks, torch.stack(readable) if readable else None)


def _leave_interrupts_to_the_main_process(_: int) -> None:
    """On Ctrl-C only the main process prints. It ends the workers.

    A thread of the worker hands tensors over. If the main process is interrupted while it takes one, the
    thread calls `sys.excepthook`. Nothing else in a worker does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _unless_the_other_side_left


def _unless_the_other_side_left(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception, unless it only says that a connection has ended."""
    if not issubclass(kind, (EOFError, ConnectionError)):
        sys.__excepthook__(kind, error, trace)


def held_out(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """The numbers of the images to fit on, and of those held out: a share of all, drawn at random."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    out = round(count * share)
    return sorted(order[out:]), sorted(order[:out])
