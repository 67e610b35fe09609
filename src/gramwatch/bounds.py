"""Bounds: what the statistics of training data looked like, per predicted class (Algorithm 1).

Bounds are running states: `update` takes a batch, `merge` joins two shards, and no example is kept. Shards
merged in any order equal one pass over all of them, bit for bit for `MinMax`. A class that training never
predicted is judged by the bounds pooled over all classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from gramwatch import kernels

AT_ONCE = 32
"""How many examples, or classes, are worked on together where a copy of their bounds is needed."""


class Bounds(ABC):
    """The running state: a few tensors of shape `(classes, *features)`."""

    name: ClassVar[str]
    """How users ask for it."""
    state_names: ClassVar[tuple[str, ...]]
    """The tensors that make up the state, as they are called in a saved file."""

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
    state_names = ("minimum", "maximum")

    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        infinity = torch.full((classes + 1, *features), torch.inf, dtype=torch.float32, device=device)
        return {"minimum": infinity, "maximum": -infinity}

    def _forget(self) -> None:
        self._never: Tensor | None = None

    def update(self, statistics: Tensor, predicted: Tensor) -> None:
        """Widen the range of each example's predicted class to take the example in."""
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
        split = (self._state[name][:-1].split(AT_ONCE) for name in ("minimum", "maximum"))
        return torch.cat([(low > high).flatten(1).any(1) for low, high in zip(*split, strict=True)])


def _widen(statistics: Tensor, predicted: Tensor, minimum: Tensor, maximum: Tensor) -> None:
    """Widen in place the range of each example's class; a negative class is left out."""
    dense = statistics.ndim == 2 and all(t.is_contiguous() for t in (statistics, minimum, maximum))
    if dense and kernels.widen(statistics, predicted, minimum, maximum):
        return
    kept = _aligned(predicted >= 0, statistics.ndim)
    index = _aligned(predicted.clamp_min(0), statistics.ndim).expand_as(statistics)
    minimum.scatter_reduce_(0, index, torch.where(kept, statistics, torch.inf), "amin")
    maximum.scatter_reduce_(0, index, torch.where(kept, statistics, -torch.inf), "amax")


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
        kept, index = _aligned(predicted >= 0, statistics.ndim), predicted.clamp_min(0)
        values = torch.where(kept, statistics.double(), 0.0)
        batch = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        batch["count"].index_add_(0, index, kept.double())
        batch["mean"].index_add_(0, index, values)
        batch["mean"] /= batch["count"].clamp_min(1)
        squares = torch.where(kept, values - batch["mean"][index], 0.0).square()
        batch["squares"].index_add_(0, index, squares)
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
