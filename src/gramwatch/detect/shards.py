"""Shards: the batches of a loader that one process reads, and checksums by which processes compare them."""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from gramwatch.detect.counted import MOSTLY, Counted, checksums
from gramwatch.inputs.batches import Inputs, batches_in, tensors_in


@dataclass(frozen=True)
class Shard:
    """A loader whose batches are the part of this rank, as with `sharded=True`."""

    loader: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(batches_in(self.loader))

    def __len__(self) -> int:
        return len(batches_in(self.loader))  # type: ignore[arg-type]


def sharing(ranks: Sequence[Counted]) -> list[tuple[int, int, float]]:
    """The first two ranks whose examples are mostly the same, and the share. Empty if there are none."""
    for one, other in itertools.combinations(range(len(ranks)), 2):
        share = ranks[one].share_in_both(ranks[other])
        if share > MOSTLY:
            return [(one, other, share)]
    return []


class Part:
    """The batches of a rank. Before each, the rank looks whether another has failed."""

    def __init__(
        self, batches: Iterable[Any], check: Callable[[], None], dealt: "Dealt | None" = None
    ) -> None:
        self._batches, self._check, self.dealt = batches, check, dealt

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._check()
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]


class Dealt:
    """Every size-th batch of an iterable that all ranks read. It notes what it reads, for a comparison.

    With `whole`, a checksum of all batches is noted, else their number alone.
    """

    def __init__(self, batches: Iterable[Any], rank: int, size: int, whole: bool) -> None:
        self._batches, self._rank, self._size = batches, rank, size
        self._count, self._digest, self._whole = 0, hashlib.sha256(), whole

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if self._whole:
                self._digest.update(_noted(batch))
            self._count += 1
            if (self._count - 1) % self._size == self._rank:
                yield batch

    def noted(self) -> tuple[int, str]:
        """The number of batches that were read, and their checksum."""
        return self._count, self._digest.hexdigest()


def _noted(batch: Any) -> bytes:
    """A checksum of a batch as the loader yields it: of its tensors, arrays and texts."""
    if isinstance(batch, Mapping):
        return b"".join(_noted(key) + _noted(value) for key, value in batch.items())
    if isinstance(batch, tuple | list):
        return b"".join(map(_noted, batch))
    if isinstance(batch, np.ndarray) and batch.ndim and not batch.dtype.hasobject:
        batch = torch.from_numpy(np.ascontiguousarray(batch))
    if isinstance(batch, Tensor) and batch.ndim:
        sums: bytes = checksums(batch).cpu().numpy().tobytes()
        return sums
    return repr(batch).encode() if isinstance(batch, str | bytes | int | float) else b""


ARGUMENTS = """
    dataset num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator
    prefetch_factor persistent_workers
""".split()
"""The arguments of a `DataLoader` that do not say which examples form a batch."""


def digest_of(inputs: Inputs) -> str:
    """A checksum of all tensors of inputs."""
    digest = hashlib.sha256()
    for tensor in tensors_in(inputs):
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_of_examples(
    loader: "DataLoader[Any]", numbers: Sequence[Any], read: Callable[[Any], Inputs]
) -> str:
    """A checksum of some examples of a data set."""
    assert loader.collate_fn is not None
    with _same_dice():
        return digest_of([read(loader.collate_fn([loader.dataset[number]])) for number in numbers])


def has_numbers(batches: Iterable[Any]) -> TypeGuard["DataLoader[Any]"]:
    """Whether this is a plain `DataLoader` whose batches are lists of numbers of examples."""
    return (
        type(batches) is DataLoader
        and batches.batch_sampler is not None
        and not isinstance(batches.dataset, IterableDataset)
    )


def kind_of(batches: Iterable[Any]) -> str:
    """The way in which the ranks compare such a loader."""
    return "numbered" if has_numbers(batches) else "list" if isinstance(batches, list | tuple) else "any"


def in_order(numbers: Iterable[Any]) -> list[Any]:
    """The numbers of examples, ascending. Other keys of a data set are sorted by their text."""
    every = list(numbers)
    return sorted(every) if all(isinstance(number, int) for number in every) else sorted(every, key=repr)


def without_padding(loader: "DataLoader[Any]") -> list[list[Any]]:
    """The numbers of the examples of each batch, without examples that a `DistributedSampler` repeats.

    So that all ranks get equally many, it gives some ranks one further example that another rank has, too.
    """
    batches = [list(batch) for batch in loader.batch_sampler or ()]
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler) and sum(map(len, batches)) == sampler.num_samples:
        last = (sampler.num_samples - 1) * sampler.num_replicas + sampler.rank
        if last >= len(sampler.dataset):  # type: ignore[arg-type]
            batches[-1].pop()
    return [batch for batch in batches if batch]


@contextmanager
def _same_dice() -> Iterator[None]:
    """A block in which random augmentation does the same on all ranks."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002, which augmentation uses
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
