"""Progress of a fit: its checkpoint, its interruption, and whether its states are torn."""

import time
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from gramwatch.detect.counted import Read
from gramwatch.errors import InputError, warn

CHECKPOINT_SECONDS = 60.0
"""How often a fit with a checkpoint writes it."""
_B = TypeVar("_B")


class Fits:
    """The fits of one detector: whether the last was interrupted, and the checkpoint that `save` deletes."""

    def __init__(self) -> None:
        self._interrupted = 0
        self._checkpoint: Path | None = None
        self._all_checkpoints: list[Path] = []
        self._begun: Mapping[str, Any] | None = None
        self.read = Read()
        """The examples that this fit has read."""
        self.torn = False
        """True while a batch is in the states of one detector but not yet of all, or only in part."""

    @property
    def interrupted(self) -> bool:
        """Whether the last fit was interrupted."""
        return self._interrupted > 0

    def begin(
        self,
        checkpoint: str | PathLike[str] | None,
        of_all_ranks: Iterable[str | PathLike[str]] = (),
        begun: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a fit. Warn if it follows an interrupted fit. `begun` is what the checkpoint has read."""
        if self._interrupted and (checkpoint is None or not Path(checkpoint).exists()):
            warn(
                f"an earlier fit was interrupted after {self._interrupted} batch(es), which are kept. If "
                "this loader yields them again, they count twice: detector.reset() forgets them"
            )
        self._interrupted = 0
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._all_checkpoints = [Path(each) for each in of_all_ranks]
        self._begun, self.read = begun, Read()

    def skip(self, sums: Tensor) -> None:
        """Note the checksums of a batch that the checkpoint holds already."""
        self.read.add(sums)

    def check_skipped(self, done: int) -> None:
        """After the batches that the checkpoint holds: make sure that the loader has yielded these."""
        if self._begun is None or self._begun == self.read.as_json():
            return
        then, now = self._begun["examples"], self.read.number
        if then != now:
            raise InputError(
                f"{self._checkpoint} holds {then:,} examples in {done} batches, and the first {done} batches "
                f"of the loader have {now:,}: give batches of the same size, or delete it to start anew"
            )
        warn(
            f"the first {done} batches of the loader are not those of {self._checkpoint}. If the order is "
            "random, some examples count twice and others not at all: fix it by a seed. Random augmentation "
            "does no harm"
        )

    def run(
        self,
        batches: Iterable[_B],
        take: Callable[[_B], None],
        skip: Callable[[_B], None],
        done: int,
        write: Callable[[int], None],
        may_be_empty: bool = False,
    ) -> None:
        """Call `skip` with the first `done` batches, and `take` with every further batch.

        `write(done)` is called every minute, on interruption, and at the end. No batch is an error, unless
        other ranks have some.
        """
        seen, done_before, saved_at = 0, done, time.monotonic()
        try:
            for number, batch in enumerate(batches):
                seen += 1
                if number < done_before:
                    skip(batch)
                    if seen == done_before:
                        self.check_skipped(done)
                    continue
                take(batch)
                done = number + 1
                if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                    write(done)
                    saved_at = time.monotonic()
        except BaseException:
            self._interrupted = done + self.torn
            # A torn state must not replace the last checkpoint, which is whole. Nor must nothing new.
            if not self.torn and not 0 < done == done_before:
                write(done)
            self.torn = False
            raise
        if seen == 0 and not may_be_empty:
            raise InputError("the loader yielded no example: there is nothing to fit")
        if seen < done:
            raise InputError(f"the checkpoint holds {done} batches, but the loader yielded only {seen}")
        if done_before == done and self._checkpoint is not None:
            warn(
                f"{self._checkpoint} holds all {done} batches already, so that nothing was fitted anew: "
                "delete it to fit again"
            )
        write(done)

    def saved(self, path: str | PathLike[str]) -> None:
        """Delete the checkpoint, of all ranks, after the detector was saved to `path`."""
        checkpoints, self._all_checkpoints, self._checkpoint = self._all_checkpoints, [], None
        for checkpoint in checkpoints:
            if checkpoint.resolve() != Path(path).resolve():
                checkpoint.unlink(missing_ok=True)
