"""Bounds: the range of every statistic on training data, per predicted class (Algorithm 1).

Bounds are running states: `update` takes a batch, `merge` joins two shards, and no example is kept. Shards
merged in any order equal one pass over all of them, bit for bit for `MinMax`. If the network predicted a
class for no training example, inputs of that class are judged by the bounds pooled over all classes.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from gramwatch.numerics import kernels

COPIED = 2**23
"""If a computation copies bounds, it copies at most this many numbers at a time (32 MB)."""


class Bounds(ABC):
    """The running state: a few tensors of shape `(classes, *features)`."""

    name: ClassVar[str]
    """The name by which users choose these bounds."""
    state_names: ClassVar[tuple[str, ...]]
    """The names of the state's tensors, in a saved file too."""
    at_once: int | None = None
    """The number of examples to look up together, if a look-up makes copies."""

    def __init__(self, classes: int, features: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        self.classes = classes
        self._state = self._empty(classes, features, torch.device(device))
        self._forget()

    @abstractmethod
    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        """The state before the first example. Rows after the last class are not saved."""

    @abstractmethod
    def _forget(self) -> None:
        """Forget the values derived from the state, because the state is about to change."""

    @abstractmethod
    def update(self, statistics: Tensor, predicted: Tensor) -> None:
        """Take in a batch: statistics `(N, *features)` and predicted classes `(N,)`.

        An example whose class is negative is left out.
        """

    @abstractmethod
    def merge(self, other: "Bounds") -> None:
        """Take in the state of another shard."""

    @abstractmethod
    def rows(self, predicted: Tensor, features: slice = slice(None)) -> tuple[Tensor, ...]:
        """The tensors that judge the examples, `(N, *features)` each, or only a slice of the features.

        They are the bounds of the predicted class. If that class has no bounds, they are the pooled bounds.
        """

    def state(self) -> dict[str, Tensor]:
        """The state's tensors, by name."""
        return {name: tensor[: self.classes] for name, tensor in self._state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state of the same shapes, in place."""
        for name, tensor in self.state().items():
            if state[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}")
        self._forget()
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def _replace(self, state: dict[str, Tensor]) -> None:
        self._forget()
        # One assignment: after an interruption the state is the old one or the new one, never a mixture.
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

    One row after the last class holds the bounds pooled over all classes. It is filled at the first use.
    """

    name = "min_max"
    state_names: ClassVar[tuple[str, ...]] = ("minimum", "maximum")

    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        shape = (classes + 1, *features)
        return {  # not one minus the other: on the device "meta", that makes PyTorch import for seconds
            "minimum": torch.full(shape, torch.inf, dtype=torch.float32, device=device),
            "maximum": torch.full(shape, -torch.inf, dtype=torch.float32, device=device),
        }

    def _forget(self) -> None:
        self._row_of: Tensor | None = None

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
        """The tables of minima and maxima, and for every example the row that judges it."""
        rows = self._judging(predicted) if self._row_of is None else self._row_of[predicted]
        return self._state["minimum"], self._state["maximum"], rows

    def rows(self, predicted: Tensor, features: slice = slice(None)) -> tuple[Tensor, ...]:
        """The minimum and the maximum that judge each example."""
        rows = self._judging(predicted)
        return tuple(self._state[name][:, features][rows] for name in ("minimum", "maximum"))

    def _judging(self, predicted: Tensor) -> Tensor:
        """The row that judges each example. It is the pooled row if training never predicted the class."""
        if self._row_of is None:
            with torch.inference_mode():  # a tensor made in inference mode can be written only in it
                self._pool()
                never = self._never_predicted()
                classes = torch.arange(self.classes, device=never.device)
                self._row_of = torch.where(never, self.classes, classes)
        return self._row_of[predicted]

    def tables(self) -> dict[str, Tensor]:
        """The state with the pooled row, and as `row` the row that judges each class, `(classes,)`."""
        row = self._judging(torch.arange(self.classes, device=self._state["minimum"].device))
        return {**self._state, "row": row}

    def _pool(self) -> None:
        """Fill the last row."""
        minimum, maximum = self._state["minimum"], self._state["maximum"]
        minimum[-1] = minimum[:-1].amin(0)
        maximum[-1] = maximum[:-1].amax(0)

    def _never_predicted(self) -> Tensor:
        """Which classes lack the range of at least one feature. An interruption can leave such a class."""
        minimum, maximum = (self._state[name][:-1].flatten(1) for name in ("minimum", "maximum"))
        rows = _at_once(minimum.shape[1])
        pieces = zip(minimum.split(rows), maximum.split(rows), strict=True)
        return torch.cat([(low > high).any(1) for low, high in pieces])


def _at_once(features: int) -> int:
    """The number of rows to copy together, for rows of this many features."""
    return max(1, COPIED // max(1, features))


def _widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> None:
    """Widen in place the range of each example's class. Examples of a negative class are left out."""
    dense = statistics.ndim == 2 and all(t.is_contiguous() for t in (statistics, minimum, maximum))
    signature = (statistics.device.type, "widen", statistics.dtype, minimum.dtype)
    if dense and kernels.attempt(signature, statistics, predicted, minimum, maximum):
        return
    kept = _aligned(predicted >= 0, statistics.ndim)
    index = _aligned(predicted.clamp_min(0), statistics.ndim).expand_as(statistics)
    minimum.scatter_reduce_(0, index, torch.where(kept, statistics, torch.inf), "amin")
    maximum.scatter_reduce_(0, index, torch.where(kept, statistics, -torch.inf), "amax")


class HalfMinMax(MinMax):
    """`MinMax` in float16: half the memory, and bounds that are a little wider, never narrower.

    A bound is a float16 times `2^exponent`. A class has one exponent for every group of features: the
    smallest exponent with which the group's largest magnitude fits. Bounds are rounded outwards. A bound of
    at least 2^-28 of the group's largest magnitude moves by less than 2^-10 of its own value. A smaller bound
    moves by less than 2^-38 of the largest magnitude. Rounding again changes nothing, and a merge takes the
    larger exponent. So shards merged in any order equal one pass over all of them, bit for bit.

    Args:
        classes: number of classes.
        features: number of features, in a tuple.
        device: the device of the state.
        groups: the number of features in each group. Without it, all features are one group.

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
        for values, classes in zip(statistics.split(at_once), predicted.split(at_once), strict=True):
            present, index = classes.unique(return_inverse=True)
            shape = (len(present), values.shape[1])
            low = torch.full(shape, torch.inf, dtype=torch.float32, device=values.device)
            high = torch.full_like(low, -torch.inf)
            _widen(values, torch.where(classes < 0, -1, index), low, high)
            peak = low.new_zeros(len(present), len(self._edges) - 1)
            peak.scatter_reduce_(1, group.expand_as(low), torch.maximum(high, -low), "amax")
            # Examples that are left out have an empty range. It goes to the pooled row and changes nothing.
            rows = torch.where(present < 0, self.classes, present)
            self._take_in(self._state, rows, low, high, _exponent(peak))

    def merge(self, other: Bounds) -> None:
        """The smaller minimum and the larger maximum of the two."""
        theirs = self._same_kind(other)
        if self._edges != getattr(other, "_edges", None):
            raise ValueError("bounds of other groups of features cannot be merged")
        merged = {name: tensor.clone() for name, tensor in self._state.items()}
        for rows in self._row_pieces():
            values = self._values(theirs, rows, slice(None))
            self._take_in(merged, rows, *values, theirs["exponent"][rows])
        self._replace(merged)

    def lookup(self, predicted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The minimum and the maximum that judge each example, and their row: the example's number."""
        return *self.rows(predicted), torch.arange(len(predicted), device=predicted.device)

    def rows(self, predicted: Tensor, features: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The minimum and the maximum that judge each example, in float32."""
        return self._values(self._state, self._judging(predicted), features)

    def tables(self) -> dict[str, Tensor]:
        """The same. `scale` is what the bounds of each group are multiplied by, `(classes + 1, groups)`."""
        tables = super().tables()
        return {**tables, "scale": _power_of_two(tables.pop("exponent"))}

    def _pool(self) -> None:
        exponent = self._state["exponent"]
        low, high = self._values(self._state, torch.arange(1, device=exponent.device), slice(None))
        for rows in self._row_pieces():
            minimum, maximum = self._values(self._state, rows, slice(None))
            low, high = torch.minimum(low, minimum.amin(0)), torch.maximum(high, maximum.amax(0))
        exponent[-1] = exponent[:-1].amax(0)
        scale = _power_of_two(exponent[-1:])[:, self._groups(slice(None))[1]]
        self._state["minimum"][-1:] = -_rounded_up(-low, scale)
        self._state["maximum"][-1:] = _rounded_up(high, scale)

    def _row_pieces(self) -> Iterator[Tensor]:
        """The rows of all classes, a few at a time."""
        rows = torch.arange(self.classes, device=self._edges_there.device)
        yield from rows.split(_at_once(self._edges[-1]))

    def _groups(self, features: slice) -> tuple[slice, Tensor]:
        """The groups of a slice of features, and for every feature the number of its group among these."""
        start, stop, _ = features.indices(self._edges[-1])
        groups = slice(bisect_right(self._edges, start) - 1, bisect_left(self._edges, stop))
        edges = self._edges_there[groups.start : groups.stop + 1].clamp(start, stop)
        numbers = torch.arange(groups.stop - groups.start, device=edges.device)
        return groups, numbers.repeat_interleave(edges.diff(), output_size=stop - start)

    def _values(self, state: dict[str, Tensor], rows: Tensor, features: slice) -> tuple[Tensor, Tensor]:
        """The minimum and the maximum of the given rows in float32, which holds them exactly."""
        groups, group = self._groups(features)
        scale = _power_of_two(state["exponent"][rows, groups])[:, group]
        return state["minimum"][rows, features] * scale, state["maximum"][rows, features] * scale

    def _take_in(
        self, state: dict[str, Tensor], rows: Tensor, low: Tensor, high: Tensor, needed: Tensor
    ) -> None:
        """Widen the given rows to the ranges from `low` to `high`. `needed` are the exponents of these."""
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
            write()  # the three tensors must agree after an interruption
            raise


_LEAST_EXPONENT = -125
"""With this exponent, the smallest float16 stands for the smallest float32."""
EXPONENTS = (_LEAST_EXPONENT, 113)
"""The smallest and the largest exponent. With the largest, float16 below 2^15 reach the largest float32."""


def _exponent(peak: Tensor) -> Tensor:
    """The smallest exponent with which values up to `peak` are float16 below 2^15, with room to round up."""
    exponent = torch.frexp(peak).exponent - 15
    return torch.where(peak > 0, exponent, _LEAST_EXPONENT).clamp_min(_LEAST_EXPONENT).to(torch.int8)


def _power_of_two(exponent: Tensor) -> Tensor:
    """`2^exponent` in float32. It is set bit by bit, which is exact on every device."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def _rounded_up(values: Tensor, scale: Tensor) -> Tensor:
    """The smallest float16 whose product with the scale is at least the value."""
    near = (values / scale).half() + 0.0  # never -0.0
    bits = near.view(torch.int16)
    above = torch.where(near < 0, bits - 1, bits + 1).view(torch.float16)
    return torch.where(near * scale < values, above, near)


class MeanVariance(Bounds):
    """Mean and variance of each statistic (App. C).

    The variance is that of the population, `E[(x - mean)^2]`. A standard deviation counts as at least 1e-3 of
    the mean plus 1e-6. Otherwise a statistic that hardly varied in training would outweigh all others. A
    class with fewer than two examples has no variance. It is judged by the pooled mean and variance.
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
        """Join the mean and the squared deviations of the batch, class by class, with the state."""
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
        """Mean and variance of each class. They are pooled for a class with too few examples."""
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
    """One value per example, with axes of size one added until there are `ndim` axes."""
    return per_example.view(-1, *[1] * (ndim - 1))


def _moments(statistics: Tensor, predicted: Tensor, classes: int) -> dict[str, Tensor]:
    """Count, mean and squared deviations of each class. Examples of a negative class are left out."""
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
    """Bounds before the first example. `groups` are the numbers of features of each tap and order."""
    features = (sum(groups),)
    if storage == "float16":
        return HalfMinMax(classes, features, device, groups)
    return BOUNDS[kind](classes, features, device)
