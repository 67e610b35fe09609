"""Bounds: what the statistics of training data looked like, per predicted class (Algorithm 1).

Bounds are running states: `update` takes a batch, `merge` joins two shards, and no example is kept. Shards
merged in any order equal one pass over all of them, bit for bit for `MinMax`. A class that training never
predicted is judged by the bounds pooled over all classes.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from gramwatch import kernels

COPIED = 2**23
"""Where bounds must be copied to be worked on, so many numbers of a table are copied at once (32 MB)."""


class Bounds(ABC):
    """The running state: a few tensors of shape `(classes, *features)`."""

    name: ClassVar[str]
    """How users ask for it."""
    state_names: ClassVar[tuple[str, ...]]
    """The tensors that make up the state, as they are called in a saved file."""
    at_once: int | None = None
    """How many examples to look up together, where a look-up makes copies."""

    def __init__(self, classes: int, features: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self._state = self._empty(classes, features, torch.device(device))
        self._forget()

    @abstractmethod
    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        """The state before any example; rows after the last class are not part of what is saved."""

    @abstractmethod
    def _forget(self) -> None:
        """Forget what was derived from the state: it is about to change."""

    @abstractmethod
    def update(self, statistics: Tensor, predicted: Tensor) -> None:
        """Take in a batch: statistics `(N, *features)` and the predicted class of each.

        An example whose class is negative is left out.
        """

    @abstractmethod
    def merge(self, other: "Bounds") -> None:
        """Take in everything another shard has seen."""

    @abstractmethod
    def rows(self, predicted: Tensor, features: slice = slice(None)) -> tuple[Tensor, ...]:
        """What judges each example, `(N, *features)` each, or some of the features.

        These are the bounds of its predicted class, pooled ones where that class itself says nothing.
        """

    def state(self) -> dict[str, Tensor]:
        """The state's tensors, by name."""
        return {name: tensor[: self.classes] for name, tensor in self._state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by one of the same shapes."""
        for name, tensor in self.state().items():
            if state[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}")
        loaded = {name: torch.empty_like(tensor) for name, tensor in self._state.items()}
        for name, tensor in loaded.items():
            tensor[: self.classes] = state[name]
        self._replace(loaded)

    def _replace(self, state: dict[str, Tensor]) -> None:
        self._forget()
        # One assignment, so that an interruption never leaves a state half old, half new.
        self._state = state

    def _same_kind(self, other: "Bounds") -> dict[str, Tensor]:
        if type(other) is not type(self):
            raise TypeError(f"{other.name} bounds cannot be merged into {self.name} bounds")
        for name, tensor in self._state.items():
            if other._state[name].shape != tensor.shape:
                theirs, mine = (tuple(bounds.state()[name].shape) for bounds in (other, self))
                raise ValueError(f"bounds of shape {theirs} cannot be merged into {mine}")
        return {name: other._state[name].to(tensor) for name, tensor in self._state.items()}


class MinMax(Bounds):
    """The smallest and the largest value of each statistic (Algorithm 1: Mins and Maxs).

    One row after the last class holds the bounds pooled over all classes. It is filled when first needed.
    """

    name = "min_max"
    state_names: ClassVar[tuple[str, ...]] = ("minimum", "maximum")

    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        infinity = torch.full((classes + 1, *features), torch.inf, dtype=torch.float32, device=device)
        return {"minimum": infinity, "maximum": -infinity}

    def _forget(self) -> None:
        self._never: Tensor | None = None

    def update(self, statistics: Tensor, predicted: Tensor) -> None:
        """Widen the range of each example's predicted class to take it in."""
        self._forget()
        _widen(statistics, predicted, self._state["minimum"], self._state["maximum"])

    def merge(self, other: Bounds) -> None:
        """The smaller minimum and the larger maximum of the two."""
        theirs = self._same_kind(other)
        self._replace(
            {
                "minimum": torch.minimum(self._state["minimum"], theirs["minimum"]),
                "maximum": torch.maximum(self._state["maximum"], theirs["maximum"]),
            }
        )

    def lookup(self, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tables of minima and maxima, and the row in them that judges each example."""
        return self._state["minimum"], self._state["maximum"], self._judging(predicted)

    def rows(self, predicted: Tensor, features: slice = slice(None)) -> tuple[Tensor, ...]:
        """The minimum and the maximum that judge each example."""
        rows = self._judging(predicted)
        return tuple(self._state[name][:, features][rows] for name in ("minimum", "maximum"))

    def _judging(self, predicted: Tensor) -> Tensor:
        """The row that judges each example: the pooled one where its class was never predicted."""
        if self._never is None:
            with torch.inference_mode():  # in which tensors may be written wherever they were made
                self._pool()
                self._never = self._never_predicted()
        return torch.where(self._never[predicted], self.classes, predicted)

    def _pool(self) -> None:
        """Fill the last row."""
        minimum, maximum = self._state["minimum"], self._state["maximum"]
        minimum[-1] = minimum[:-1].amin(0)
        maximum[-1] = maximum[:-1].amax(0)

    def _never_predicted(self) -> Tensor:
        """Which classes have no range: `any`, as an interruption may have left one without some features."""
        minimum, maximum = (self._state[name][:-1].flatten(1) for name in ("minimum", "maximum"))
        rows = _at_once(minimum.shape[1])
        pieces = zip(minimum.split(rows), maximum.split(rows), strict=True)
        return torch.cat([(low > high).any(1) for low, high in pieces])


def _at_once(features: int) -> int:
    """How many rows of so many features to copy together."""
    return max(1, COPIED // max(1, features))


def _widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> None:
    """Widen in place the range of each example's class; a negative class is left out."""
    dense = statistics.ndim == 2 and all(t.is_contiguous() for t in (statistics, minimum, maximum))
    if dense and kernels.widen(statistics, predicted, minimum, maximum):
        return
    kept = _aligned(predicted >= 0, statistics.ndim)
    index = _aligned(predicted.clamp_min(0), statistics.ndim).expand_as(statistics)
    minimum.scatter_reduce_(0, index, torch.where(kept, statistics, torch.inf), "amin")
    maximum.scatter_reduce_(0, index, torch.where(kept, statistics, -torch.inf), "amax")


class HalfMinMax(MinMax):
    """`MinMax` in float16: half the memory, and bounds that are a little wider, never narrower.

    A bound is a float16 times `2^exponent`. Each class has one exponent for each group of features, the least
    that leaves room for the largest magnitude seen. Bounds are rounded outwards: by less than 2^-10 of their
    value where that is at least 2^-28 of the group's largest, by less than 2^-38 of the largest below that.
    Rounding again changes nothing, and the larger exponent wins: shards merged in any order equal one pass
    over all of them, bit for bit.

    Args:
        classes: number of classes.
        features: number of features, in a tuple.
        device: where the state lies.
        groups: how many features each group has; all are one group unless given.

    """

    name = "float16 min_max"
    state_names = ("minimum", "maximum", "exponent")

    def __init__(
        self,
        classes: int,
        features: tuple[int, ...],
        device: torch.device | str = "cpu",
        groups: Sequence[int] | None = None,
    ) -> None:
        self._edges = [0, *accumulate(features if groups is None else groups)]
        self._edges_there = torch.tensor(self._edges, device=device)
        self.at_once = _at_once(self._edges[-1])
        super().__init__(classes, features, device)

    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        shape, exponents = (classes + 1, *features), (classes + 1, len(self._edges) - 1)
        return {
            "minimum": torch.full(shape, torch.inf, dtype=torch.float16, device=device),
            "maximum": torch.full(shape, -torch.inf, dtype=torch.float16, device=device),
            "exponent": torch.full(exponents, _LEAST_EXPONENT, dtype=torch.int8, device=device),
        }

    def update(self, statistics: Tensor, predicted: Tensor) -> None:
        """Widen the range of each example's predicted class to take it in."""
        self._forget()
        group = self._groups(slice(None))[1]
        at_once = _at_once(statistics.shape[1])
        for some, classes in zip(statistics.split(at_once), predicted.split(at_once), strict=True):
            present, index = classes.unique(return_inverse=True)
            shape = (len(present), some.shape[1])
            low = torch.full(shape, torch.inf, dtype=torch.float32, device=some.device)
            high = torch.full_like(low, -torch.inf)
            _widen(some, torch.where(classes < 0, -1, index), low, high)
            peak = low.new_zeros(len(present), len(self._edges) - 1)
            peak.scatter_reduce_(1, group.expand_as(low), torch.maximum(high, -low), "amax")
            # Examples left out are an empty range by now, which changes nothing in the pooled row.
            rows = torch.where(present < 0, self.classes, present)
            self._take_in(self._state, rows, low, high, _exponent(peak))

    def merge(self, other: Bounds) -> None:
        """The smaller minimum and the larger maximum of the two."""
        theirs = self._same_kind(other)
        if self._edges != getattr(other, "_edges", None):
            raise ValueError("bounds of other groups of features cannot be merged")
        merged = {name: tensor.clone() for name, tensor in self._state.items()}
        for rows in self._some_rows():
            values = self._values(theirs, rows, slice(None))
            self._take_in(merged, rows, *values, theirs["exponent"][rows])
        self._replace(merged)

    def lookup(self, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The minimum and the maximum that judge each example, and the number of each."""
        return *self.rows(predicted), torch.arange(len(predicted), device=predicted.device)

    def rows(self, predicted: Tensor, features: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The minimum and the maximum that judge each example, in float32."""
        return self._values(self._state, self._judging(predicted), features)

    def _pool(self) -> None:
        exponent = self._state["exponent"]
        low, high = self._values(self._state, torch.arange(1, device=exponent.device), slice(None))
        for rows in self._some_rows():
            minimum, maximum = self._values(self._state, rows, slice(None))
            low, high = torch.minimum(low, minimum.amin(0)), torch.maximum(high, maximum.amax(0))
        exponent[-1] = exponent[:-1].amax(0)
        scale = _power_of_two(exponent[-1:])[:, self._groups(slice(None))[1]]
        self._state["minimum"][-1:] = -_rounded_up(-low, scale)
        self._state["maximum"][-1:] = _rounded_up(high, scale)

    def _some_rows(self) -> Iterator[Tensor]:
        """All classes, a few at a time."""
        rows = torch.arange(self.classes, device=self._edges_there.device)
        yield from rows.split(_at_once(self._edges[-1]))

    def _groups(self, features: slice) -> tuple[slice, Tensor]:
        """The groups that have some of the features, and which of these each feature belongs to."""
        start, stop, _ = features.indices(self._edges[-1])
        groups = slice(bisect_right(self._edges, start) - 1, bisect_left(self._edges, stop))
        edges = self._edges_there[groups.start : groups.stop + 1].clamp(start, stop)
        numbers = torch.arange(groups.stop - groups.start, device=edges.device)
        return groups, numbers.repeat_interleave(edges.diff(), output_size=stop - start)

    def _values(self, state: dict[str, Tensor], rows: Tensor, features: slice) -> tuple[Tensor, Tensor]:
        """Minimum and maximum of some rows in float32, which holds them exactly."""
        groups, group = self._groups(features)
        scale = _power_of_two(state["exponent"][rows, groups])[:, group]
        return state["minimum"][rows, features] * scale, state["maximum"][rows, features] * scale

    def _take_in(
        self, state: dict[str, Tensor], rows: Tensor, low: Tensor, high: Tensor, needed: Tensor
    ) -> None:
        """Widen some rows to hold the ranges from `low` to `high`, whose groups need such exponents."""
        exponent = torch.maximum(state["exponent"][rows], needed)
        minimum, maximum = self._values(state, rows, slice(None))
        scale = _power_of_two(exponent)[:, self._groups(slice(None))[1]]
        minimum = -_rounded_up(torch.minimum(minimum, low, out=minimum).neg_(), scale)
        maximum = _rounded_up(torch.maximum(maximum, high, out=maximum), scale)

        def write() -> None:
            state["minimum"][rows] = minimum
            state["maximum"][rows] = maximum
            state["exponent"][rows] = exponent

        try:
            write()
        except BaseException:
            write()  # the three belong together: an interruption must not part them
            raise


_LEAST_EXPONENT = -125
"""With it, the smallest float16 stands for the smallest float32."""
EXPONENTS = (_LEAST_EXPONENT, 113)
"""The least and the largest exponent; with the latter, float16 below 2^15 reach the largest float32."""


def _exponent(peak: Tensor) -> Tensor:
    """The least exponent for which values up to `peak` are float16 below 2^15, so that rounding has room."""
    exponent = torch.frexp(peak).exponent - 15
    return torch.where(peak > 0, exponent, _LEAST_EXPONENT).clamp_min(_LEAST_EXPONENT).to(torch.int8)


def _power_of_two(exponent: Tensor) -> Tensor:
    """`2^exponent` in float32, by its bits: exact on every device."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _rounded_up(values: Tensor, scale: Tensor) -> Tensor:
    """The least float16 that, times the scale, is not below the value."""
    near = (values / scale).half() + 0.0  # never -0.0
    bits = near.view(torch.int16)
    above = torch.where(near < 0, bits - 1, bits + 1).view(torch.float16)
    return torch.where(near * scale < values, above, near)


class MeanVariance(Bounds):
    """Mean and variance of each statistic (App. C).

    The variance is the population's, `E[(x - mean)^2]`. So that a statistic that hardly varied in training
    does not outweigh all others, a standard deviation counts as at least 1e-3 of the mean plus 1e-6.
    A class with fewer than two examples has no variance and is judged by the pooled one.
    """

    name = "mean_variance"
    state_names = ("count", "mean", "squares")

    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        count = torch.zeros(classes, *[1] * len(features), dtype=torch.float64, device=device)
        zero = torch.zeros(classes, *features, dtype=torch.float64, device=device)
        return {"count": count, "mean": zero, "squares": zero.clone()}

    def _forget(self) -> None:
        self._summary: tuple[Tensor, ...] | None = None

    def update(self, statistics: Tensor, predicted: Tensor) -> None:
        """Join the batch's own mean and squared deviations, class by class, with those so far."""
        batch = _moments(statistics, predicted, self.classes)
        self._replace(_joined_moments(self._state, batch))

    def merge(self, other: Bounds) -> None:
        """The moments of both shards together."""
        self._replace(_joined_moments(self._state, self._same_kind(other)))

    def rows(self, predicted: Tensor, features: slice = slice(None)) -> tuple[Tensor, ...]:
        """The mean and the variance that judge each example."""
        if self._summary is None:
            self._summary = self._summarised()
        return tuple(table[:, features][predicted] for table in self._summary)

    def _summarised(self) -> tuple[Tensor, ...]:
        """Mean and variance of each class, pooled where it has too few examples."""
        count, mean, squares = (self._state[name] for name in self.state_names)
        total = count.sum(0).clamp_min(1)
        pooled_mean = (count * mean).sum(0) / total
        pooled_squares = (squares + count * (mean - pooled_mean).square()).sum(0)
        few = count < 2
        mean = torch.where(few, pooled_mean, mean)
        variance = torch.where(few, pooled_squares / total, squares / count.clamp_min(1))
        floor = (1e-3 * mean.abs() + 1e-6).square()
        return mean.float(), torch.maximum(variance, floor).float()


def _aligned(per_example: Tensor, ndim: int) -> Tensor:
    """One value each, with axes of size one behind it up to `ndim` axes."""
    return per_example.view(-1, *[1] * (ndim - 1))


def _moments(statistics: Tensor, predicted: Tensor, classes: int) -> dict[str, Tensor]:
    """Count, mean and squared deviations of each class; a negative class is left out."""
    kept, index = _aligned(predicted >= 0, statistics.ndim), predicted.clamp_min(0)
    values = torch.where(kept, statistics.double(), 0.0)
    count = torch.zeros(classes, *kept.shape[1:], dtype=torch.float64, device=values.device)
    count.index_add_(0, index, kept.double())
    mean = values.new_zeros(classes, *values.shape[1:]).index_add_(0, index, values) / count.clamp_min(1)
    squares = torch.where(kept, values - mean[index], 0.0).square()
    return {"count": count, "mean": mean, "squares": torch.zeros_like(mean).index_add_(0, index, squares)}


def _joined_moments(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    """Count, mean and squared deviations of two samples together (Chan, Golub & LeVeque, 1979)."""
    count = a["count"] + b["count"]
    share = b["count"] / count.clamp_min(1)
    step = b["mean"] - a["mean"]
    return {
        "count": count,
        "mean": a["mean"] + step * share,
        "squares": a["squares"] + b["squares"] + step.square() * a["count"] * share,
    }


BOUNDS: dict[str, type[Bounds]] = {kind.name: kind for kind in (MinMax, MeanVariance)}
STORAGES = ("float32", "float16")


def make_bounds(
    kind: str, storage: str, classes: int, groups: Sequence[int], device: torch.device | str
) -> Bounds:
    """Bounds before any example, of features in groups of so many: each tap's, order by order."""
    features = (sum(groups),)
    if storage == "float16":
        return HalfMinMax(classes, features, device, groups)
    return BOUNDS[kind](classes, features, device)
