"""Progress of a fit: which examples it counted and read, its checkpoint, its interruption, and torn states.

A fit keeps no example. Its `Counted` tells whether two fits, or two processes, counted the same examples, and
its `Read` tells whether a loader yields again what it yielded before.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from gramwatch.errors import InputError, warn
from gramwatch.files.artifact import check_types
from gramwatch.inputs.batches import Inputs, count_examples, tensors_in

CHECKPOINT_SECONDS = 60.0
"""How often a fit with a checkpoint writes it."""
KEPT = 256
"""The largest number of checksums in a sample."""
MOST_NUMBERS = 1024
"""At most how many numbers of each tensor of an example enter its checksum, evenly spread."""
ENOUGH = 8
"""Samples that hold fewer comparable checksums than this say nothing."""
MOSTLY = 0.5
"""Two sets of examples are mostly the same if they share more than this part of the smaller one."""
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""An odd number without a pattern, as an int64."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_B = TypeVar("_B")


# --- the examples ------------------------------------------------------------------------------------


def checksums(inputs: Inputs) -> Tensor:
    """The checksum of every example of a batch, `(N,)`. It does not depend on the other examples."""
    total = count_examples(inputs)
    result: Tensor | None = None
    for t in tensors_in(inputs):
        if t.ndim and t.shape[0] == total:
            values = _whole_numbers(t.detach())
            own = (values * _factors(values.shape[1], values.device)).sum(1)
            result = own if result is None else mixed(result) + own
    assert result is not None  # the first tensor has as many rows as there are examples
    return mixed(result)


def _whole_numbers(t: Tensor) -> Tensor:
    """The numbers of every example that enter its checksum, by their bits: `(N, numbers)`, int64."""
    t = torch.view_as_real(t) if t.is_complex() else t
    while t[:1].numel() > MOST_NUMBERS:  # every second place of the longest axis, without a copy
        axis = max(range(1, t.ndim), key=lambda axis: t.shape[axis])
        t = t.unfold(axis, 1, 2).squeeze(-1)
    t = t.reshape(len(t), -1)
    if t.is_floating_point():
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        t = t.contiguous().view(kinds[t.element_size()])
    return t.long()


@functools.lru_cache(16)
def _factors(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern. They are made on the device: a copy would wait for a GPU."""
    with torch.inference_mode(False):
        return mixed(torch.arange(1, count + 1, device=device) * GOLDEN) | 1


def mixed(x: Tensor) -> Tensor:
    """Every bit of an int64 spread over all of its bits (SplitMix64)."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & (2**33 - 1))


@dataclass(frozen=True)
class Counted:
    """The number of examples, and a sample of their checksums: the smallest ones, each once, ascending.

    Two of them join like the states of a fit. The samples of two sets tell how many examples the sets share.
    """

    number: int = 0
    sample: tuple[int, ...] = ()

    @staticmethod
    def of(sums: Tensor) -> "Counted":
        """The examples with these checksums."""
        return Counted(len(sums), tuple(sums.unique()[:KEPT].tolist()))

    def joined(self, other: "Counted") -> "Counted":
        """The examples of both."""
        sample = sorted({*self.sample, *other.sample})[:KEPT]
        return Counted(self.number + other.number, tuple(sample))

    def share_in_both(self, other: "Counted") -> float:
        """The part of the smaller set that is in the other one, too. Estimated; 0 if it is unknown.

        Both sets are compared as far as both samples reach. Of distinct examples, repeated ones count once.
        """
        reach = min((one.sample[-1] for one in (self, other) if len(one.sample) == KEPT), default=2**63)
        mine, theirs = ({sum_ for sum_ in one.sample if sum_ <= reach} for one in (self, other))
        few = min(len(mine), len(theirs))
        return len(mine & theirs) / few if few >= (ENOUGH if reach < 2**63 else 1) else 0.0

    def as_json(self) -> dict[str, Any]:
        """The form in a file."""
        return {"examples": self.number, "checksums": list(self.sample)}

    @staticmethod
    def from_json(value: Mapping[str, Any] | None) -> "Counted":
        """From a file. Files of earlier versions have none."""
        if value is None:
            return Counted()
        check_types(dict(value), examples=int, checksums=list[int])
        sample = value["checksums"]
        if value["examples"] < len(sample) or len(sample) > KEPT or sorted(set(sample)) != sample:
            raise ValueError("its checksums of examples are not those of a fit")
        if any(not -(2**63) <= sum_ < 2**63 for sum_ in sample):
            raise ValueError("its checksums of examples are too large")
        return Counted(value["examples"], tuple(sample))


@dataclass
class Read:
    """The examples that a loader yielded, in their order: their number, and one checksum of all.

    Neither depends on how the examples lie in batches.
    """

    number: int = 0
    checksum: int = 0

    def add(self, sums: Tensor) -> None:
        """Add the checksums of further examples."""
        places = torch.arange(self.number + 1, self.number + len(sums) + 1) * GOLDEN
        added = int(mixed(sums.cpu() + places).sum())
        self.checksum = (self.checksum + added) % 2**64
        self.number += len(sums)

    def as_json(self) -> dict[str, int]:
        """The form in a file."""
        return {"examples": self.number, "checksum": self.checksum}


# --- the fit -----------------------------------------------------------------------------------------


class Fits:
    """The fits of one detector: whether the last was interrupted, and the checkpoint that `save` deletes."""

    def __init__(self) -> None:
        self._interrupted = 0
        self._checkpoint: Path | None = None
        self._all_checkpoints: list[Path] = []
        self._begun: Mapping[str, Any] | None = None
        self.done = 0
        """The number of batches that are in the states."""
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
        done: int = 0,
        begun: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a fit. Warn if it follows an interrupted fit.

        The checkpoint holds `done` batches; `begun` is what it says of their examples.
        """
        if self._interrupted and (checkpoint is None or not Path(checkpoint).exists()):
            warn(
                f"an earlier fit was interrupted after {self._interrupted} batch(es), which are kept. If "
                "this loader yields them again, they count twice: detector.reset() forgets them"
            )
        self._interrupted = 0
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._all_checkpoints = [Path(path) for path in of_all_ranks]
        self.done, self._begun, self.read = done, begun, Read()

    def check_skipped(self) -> None:
        """After the batches that the checkpoint holds: make sure that the loader has yielded these."""
        if self._begun is None or self._begun == self.read.as_json():
            return
        done, then, now = self.done, self._begun["examples"], self.read.number
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
        write: Callable[[], None],
        may_be_empty: bool = False,
    ) -> None:
        """Call `skip` with the batches that the checkpoint holds, and `take` with every further batch.

        `write` is called every minute, on interruption, and at the end. No batch is an error, unless other
        ranks have some.
        """
        seen, done_before, saved_at = 0, self.done, time.monotonic()
        try:
            for number, batch in enumerate(batches):
                seen += 1
                if number < done_before:
                    skip(batch)
                    if seen == done_before:
                        self.check_skipped()
                    continue
                take(batch)
                self.done = number + 1
                if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                    write()
                    saved_at = time.monotonic()
        except BaseException:
            self._interrupted = self.done + self.torn
            # A torn state must not replace the last checkpoint, which is whole. Nor must nothing new.
            if not self.torn and not 0 < self.done == done_before:
                write()
            self.torn = False
            raise
        if seen == 0 and not may_be_empty:
            raise InputError("the loader yielded no example: there is nothing to fit")
        if seen < self.done:
            raise InputError(f"the checkpoint holds {self.done} batches, but the loader yielded only {seen}")
        if done_before == self.done and self._checkpoint is not None:
            warn(
                f"{self._checkpoint} holds all {self.done} batches already, so that nothing was fitted anew: "
                "delete it to fit again"
            )
        write()

    def saved(self, path: str | PathLike[str]) -> None:
        """Delete the checkpoint, of all ranks, after the detector was saved to `path`."""
        checkpoints, self._all_checkpoints, self._checkpoint = self._all_checkpoints, [], None
        for checkpoint in checkpoints:
            if checkpoint.resolve() != Path(path).resolve():
                checkpoint.unlink(missing_ok=True)
