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


class Bounds(ABC):
    """The running state: a few tensors of shape `(classes, *features)`."""

    name: ClassVar[str]
    """How users ask for it."""
    state_names: ClassVar[tuple[str, ...]]
    """The tensors that make up the state, as they are called in a saved file."""

    def __init__(self, classes: int, features: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        self._state = self._empty(classes, features, torch.device(device))
        self._table: tuple[Tensor, ...] | None = None

    @abstractmethod
    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        """The state before any example."""

    @abstractmethod
    def update(self, statistics: Tensor, predicted: Tensor) -> None:
        """Take in a batch: statistics `(N, *features)` and the predicted class of each.

        An example whose class is negative is left out.
        """

    @abstractmethod
    def merge(self, other: "Bounds") -> None:
        """Take in everything another shard has seen."""

    @abstractmethod
    def _summary(self) -> tuple[Tensor, ...]:
        """What deviations are computed from, per class, pooled where the class itself says nothing."""

    def table(self) -> tuple[Tensor, ...]:
        """What deviations are computed from, `(classes, *features)` each."""
        if self._table is None:
            self._table = self._summary()
        return self._table

    def rows(self, predicted: Tensor, features: slice = slice(None)) -> tuple[Tensor, ...]:
        """The bounds of each example's predicted class, `(N, *features)` each, or of some features."""
        return tuple(row[:, features][predicted] for row in self.table())

    def state(self) -> dict[str, Tensor]:
        """The state's tensors, by name."""
        return dict(self._state)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by one of the same shapes."""
        for name, tensor in self._state.items():
            if state[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}")
        self._replace({name: state[name].to(t, copy=True) for name, t in self._state.items()})

    def _replace(self, state: dict[str, Tensor]) -> None:
        # One assignment, so that an interruption never leaves a state half old, half new.
        self._state = state
        self._table = None

    def _same_kind(self, other: "Bounds") -> dict[str, Tensor]:
        if type(other) is not type(self):
            raise TypeError(f"{other.name} bounds cannot be merged into {self.name} bounds")
        theirs = other.state()
        for name, tensor in self._state.items():
            if theirs[name].shape != tensor.shape:
                raise ValueError(
                    f"bounds of shape {tuple(theirs[name].shape)} cannot be merged into {tuple(tensor.shape)}"
                )
        return {name: theirs[name].to(tensor) for name, tensor in self._state.items()}


class MinMax(Bounds):
    """The smallest and the largest value of each statistic (Algorithm 1: Mins and Maxs)."""

    name = "min_max"
    state_names = ("minimum", "maximum")

    def _empty(self, classes: int, features: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
        infinity = torch.full((classes, *features), torch.inf, dtype=torch.float32, device=device)
        return {"minimum": infinity, "maximum": -infinity}

    def update(self, statistics: Tensor, predicted: Tensor) -> None:
        """Widen the range of each example's predicted class to take the example in."""
        self._table = None
        minimum, maximum = self._state["minimum"], self._state["maximum"]
        if statistics.ndim == 2 and kernels.widen(statistics, predicted, minimum, maximum):
            return
        kept = _aligned(predicted >= 0, statistics.ndim)
        index = _aligned(predicted.clamp_min(0), statistics.ndim).expand_as(statistics)
        minimum.scatter_reduce_(0, index, torch.where(kept, statistics, torch.inf), "amin")
        maximum.scatter_reduce_(0, index, torch.where(kept, statistics, -torch.inf), "amax")

    def merge(self, other: Bounds) -> None:
        """The smaller minimum and the larger maximum of the two."""
        theirs = self._same_kind(other)
        self._replace(
            {
                "minimum": torch.minimum(self._state["minimum"], theirs["minimum"]),
                "maximum": torch.maximum(self._state["maximum"], theirs["maximum"]),
            }
        )

    def _summary(self) -> tuple[Tensor, ...]:
        minimum, maximum = self._state["minimum"], self._state["maximum"]
        never = (minimum > maximum).flatten(1).all(1)
        if not never.any():
            return minimum, maximum
        never = _aligned(never, minimum.ndim)
        return (
            torch.where(never, minimum.amin(0), minimum),
            torch.where(never, maximum.amax(0), maximum),
        )


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

    def _summary(self) -> tuple[Tensor, ...]:
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
