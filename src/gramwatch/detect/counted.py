"""Which examples were counted: how many, and a sample of their checksums.

A fit keeps no example. Its `Counted` tells whether two fits, or two processes, counted the same examples, and
its `Read` tells whether a loader yields again what it yielded before.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gramwatch.files.artifact import check_types
from gramwatch.inputs.batches import Inputs, count_examples, tensors_in

KEPT = 256
"""The largest number of checksums in a sample."""
MOST_NUMBERS = 1024
"""At most how many numbers of each tensor of an example enter its checksum, evenly spread."""
ENOUGH = 8
"""Samples that hold fewer comparable checksums than this say nothing."""
MOSTLY = 0.5
"""Two sets of examples are mostly the same if they share more than this part of the smaller one."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


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
        return mixed(torch.arange(1, count + 1, device=device) * _ODD) | 1


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
        places = torch.arange(self.number + 1, self.number + len(sums) + 1) * _ODD
        added = int(mixed(sums.cpu() + places).sum())
        self.checksum = (self.checksum + added) % 2**64
        self.number += len(sums)

    def as_json(self) -> dict[str, int]:
        """The form in a file."""
        return {"examples": self.number, "checksum": self.checksum}
