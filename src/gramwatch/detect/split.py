"""The split of calibration data: which examples standardise, which rank, and which inputs are kept.

Every example has a priority: a random-looking number, computed from a seed and the running number of the
example. The examples with the smallest priorities standardise, the others rank. While the data are read, the
inputs with the smallest priorities are kept. So one random order decides both. It is known as an example is
read, and it depends neither on the size of batches nor on the number of processes that share a loader.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramwatch.detect.progress import GOLDEN, mixed
from gramwatch.inputs.batches import Inputs, count_examples, mapped, signature, tensors_in

MOST_KEPT = 500
"""The most inputs that are kept while calibration data are read."""
MOST_BYTES = 2**29
"""The most bytes of kept inputs, in each process."""


# --- priorities and halves ---------------------------------------------------------------------------


def priorities(numbers: Tensor, seed: int) -> NDArray[np.uint64]:
    """The priorities of examples with these running numbers, `(N,)`: splitmix64. No two are equal."""
    signed = (seed + 2**63) % 2**64 - 2**63
    stream = mixed(torch.tensor(signed) + GOLDEN)
    return mixed(stream + (numbers + 1) * GOLDEN).numpy().view(np.uint64)


def halves(examples: int | Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """The places of the examples that fit the rule, and of those that rank. An odd one ranks.

    Args:
        examples: the number of examples, or their running numbers, `(N,)`.
        seed: of the random order. Both results are in this order.

    """
    numbers = torch.arange(examples) if isinstance(examples, int) else examples
    order = torch.from_numpy(priorities(numbers, seed).argsort(kind="stable"))
    return order[: len(order) // 2], order[len(order) // 2 :]


# --- kept inputs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Example:
    """One input, as a batch of one."""

    inputs: Inputs
    batched: tuple[bool, ...]
    """Whether a tensor has one row for each example. Other tensors are shared by a batch."""

    @staticmethod
    @torch.inference_mode(False)  # a method may need gradients at the copy
    def of(inputs: Inputs, place: int, total: int) -> "_Example":
        """A copy of one example of a batch, on the CPU."""
        batched: list[bool] = []

        def row(t: Tensor) -> Tensor:
            batched.append(_has_rows(t, total))
            return (t[place : place + 1] if batched[-1] else t).detach().cpu().clone()

        return _Example(mapped(inputs, row), tuple(batched))

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(t.numel() * t.element_size() for t in tensors_in(self.inputs))

    @property
    def form(self) -> Any:
        """Examples of one form can be joined to a batch. Values that a batch shares are a part of it."""
        tensors = zip(tensors_in(self.inputs), self.batched, strict=True)
        shared = [digests(t.unsqueeze(0)) for t, batched in tensors if not batched]
        return repr((self.batched, signature(self.inputs), shared))

    @staticmethod
    @torch.inference_mode(False)
    def joined(examples: "Sequence[_Example]") -> Inputs:
        """One batch of examples of one form."""
        first = examples[0]
        rows = zip(*(tensors_in(example.inputs) for example in examples), strict=True)
        tensors = iter(
            torch.cat(list(row)) if batched else row[0]
            for row, batched in zip(rows, first.batched, strict=True)
        )
        return mapped(first.inputs, lambda _: next(tensors))


@dataclass(frozen=True)
class Reading:
    """What a process tells the others of the inputs that it has read."""

    places: list[tuple[int, int]]
    """Of each kept input: the number of its batch, counted in this process, and its place in the batch."""
    sizes: list[int]
    """Of each kept input: its bytes."""
    digests: list[list[bytes]]
    """Of all inputs, batch by batch."""


@dataclass
class KeptInputs:
    """A random sample of the inputs of a loader, and the digests of all inputs, by which copies are known.

    The sample is the longest run of smallest priorities that the limits allow. So it depends on the seed and
    the numbers of the examples only. Inputs are kept one by one, on the CPU, with their masks and whatever
    else their batch had for them.

    In a single process the running numbers are known while the loader is read. Of several processes, each
    counts as if all batches had the size of its first one, as those of a loader have. The true numbers are
    known at the end. If batches differ in size, fewer inputs of the standardising half are kept.
    """

    seed: int
    most: int = MOST_KEPT
    most_bytes: int = MOST_BYTES
    numbers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """The running numbers of the inputs kept by all processes, in the order of priority, after `settle`."""
    _own: dict[int, _Example] = field(default_factory=dict)  # by running number, after `settle`
    _heap: list[tuple[int, tuple[int, int], _Example]] = field(default_factory=list)  # largest priority first
    _bytes: int = 0
    _ceiling: int = 2**64  # an input with such a priority is not kept
    _digests: list[list[bytes]] = field(default_factory=list)
    _known: list[bytes] = field(default_factory=list)  # the digests by running number, after `settle`

    def add(self, inputs: Inputs, first: int) -> None:
        """Take in a batch. `first` is the running number of its first example."""
        total = count_examples(inputs)
        order = priorities(torch.arange(first, first + total), self.seed)
        for place in order.argsort().tolist():
            priority = int(order[place])
            if priority >= self._ceiling:
                break
            example = _Example.of(inputs, place, total)
            heappush(self._heap, (-priority, (len(self._digests), place), example))
            self._bytes += example.bytes
            while self._heap and (len(self._heap) > self.most or self._bytes > self.most_bytes):
                highest, _, dropped = heappop(self._heap)
                self._bytes -= dropped.bytes
                self._ceiling = -highest
        self._digests.append(digests(inputs))

    def reading(self) -> Reading:
        """What this process has read."""
        places = [place for _, place, _ in self._heap]
        return Reading(places, [example.bytes for *_, example in self._heap], self._digests)

    def settle(self, readings: Sequence[Reading], firsts: Sequence[Sequence[int]], rank: int) -> None:
        """Agree with the other processes on the inputs that are kept.

        Args:
            readings: of all processes.
            firsts: the running number of the first example of each batch, of all processes.
            rank: the number of this process.

        """
        batches = [
            (first, batch)
            for reading, starts in zip(readings, firsts, strict=True)
            for first, batch in zip(starts, reading.digests, strict=True)
        ]
        self._known = [digest for _, batch in sorted(batches) for digest in batch]
        numbers = [
            [starts[batch] + place for batch, place in reading.places]
            for reading, starts in zip(readings, firsts, strict=True)
        ]
        self._own = dict(zip(numbers[rank], (example for *_, example in self._heap), strict=True))
        self._heap, self._digests = [], []
        everyone = torch.tensor([number for own in numbers for number in own], dtype=torch.int64)
        sizes = np.array([size for reading in readings for size in reading.sizes], np.int64)
        order = priorities(everyone, self.seed).argsort()
        fits = int((sizes[order].cumsum() <= self.most_bytes).sum())
        self._keep(everyone[torch.from_numpy(order[: min(fits, self.most)])])

    def copies(self, numbers: Tensor) -> int:
        """How many examples with these running numbers equal an earlier one, to the bit."""
        chosen = [self._known[number] for number in numbers.tolist()] if self._known else []
        return len(chosen) - len(set(chosen))

    def restrict(self, numbers: Tensor) -> None:
        """Drop all inputs but those with these running numbers."""
        self._keep(self.numbers[torch.isin(self.numbers, numbers)])

    def _keep(self, numbers: Tensor) -> None:
        wanted = set(numbers.tolist())
        self.numbers = numbers
        self._own = {number: example for number, example in self._own.items() if number in wanted}

    def batches(self, size: int, numbers: Iterable[int] | None = None) -> Iterator[tuple[Tensor, Inputs]]:
        """The kept inputs of this process in batches of one form, with their running numbers.

        Args:
            size: the largest number of examples in a batch.
            numbers: the running numbers of the inputs to take. None: all, in the order of priority.

        """
        taken = self.numbers.tolist() if numbers is None else list(numbers)
        forms: dict[Any, list[int]] = {}
        for number in taken:
            if number in self._own:
                forms.setdefault(self._own[number].form, []).append(number)
        for alike in forms.values():
            for start in range(0, len(alike), size):
                part = alike[start : start + size]
                yield torch.tensor(part), _Example.joined([self._own[number] for number in part])

    def __len__(self) -> int:
        return len(self.numbers)


def _has_rows(t: Tensor, total: int) -> bool:
    """Whether a tensor of a batch has one row for each example."""
    return t.ndim > 0 and t.shape[0] == total


def digests(inputs: Inputs) -> list[bytes]:
    """A digest of every example of a batch: of all bytes, shapes and types of its tensors."""
    total = count_examples(inputs)
    hashes = [hashlib.sha256() for _ in range(total)]
    for t in tensors_in(inputs):
        if not _has_rows(t, total):
            continue
        form = f"{tuple(t.shape[1:])} {t.dtype}".encode()
        rows = t.detach().cpu().contiguous().view(total, math.prod(t.shape[1:])).view(torch.uint8).numpy()
        for hash_, row in zip(hashes, rows, strict=True):
            hash_.update(form)
            hash_.update(row.data)
    return [hash_.digest()[:8] for hash_ in hashes]
