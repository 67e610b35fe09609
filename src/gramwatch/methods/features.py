"""Parts shared by methods on penultimate features: unit length, second moments, neighbours, the head."""

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from gramwatch.artifact import FINITE, NOT_NEGATIVE, Field
from gramwatch.errors import InputError, TapError
from gramwatch.methods.base import Method
from gramwatch.observation import Head, Observation

PIECE = 2**24
"""The number of products with a bank in memory at a time."""
NEAR = 2**19
"""The number of values of neighbours in memory at a time: they fit into a processor's cache."""
ROWS = 4096
"""The number of features in float64 at a time while fitting."""
TINY = 1e-12
"""The smallest divisor: smaller lengths count as this one."""


def features_of(observation: Observation, name: str) -> Tensor:
    """The penultimate features, `(N, D)`. An error names the method that misses them."""
    if observation.features is None:
        raise InputError(f"{name} looks at the penultimate features, which were not observed")
    return observation.features


def head_of(observation: Observation, name: str) -> Head:
    """The linear layer that makes the logits. An error names the method that misses it."""
    if observation.head is None:
        raise TapError(
            f"{name} needs the weights of the linear layer that makes the logits of the features. With "
            "features='...' there is no such layer: leave it out, or choose another method"
        )
    return observation.head


def mean_of(training: Observation, name: str) -> Tensor:
    """The mean of the training features, `(D,)`, in float64."""
    return features_of(training, name).mean(0, dtype=torch.float64)


def unit(features: Tensor) -> Tensor:
    """The features at length one, computed in float64, kept in float32. A feature of zeros stays zero."""

    def scaled(rows: Tensor) -> Tensor:
        rows = rows.double()
        return (rows / lengths(rows).unsqueeze(1).clamp_min(TINY)).float()

    return torch.cat([scaled(rows) for rows in features.split(ROWS)])


def lengths(vectors: Tensor) -> Tensor:
    """The length of vectors along the last axis."""
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return length


def second_moment(features: Tensor, centre: Tensor, centre_of: Tensor | None = None) -> Tensor:
    """The mean of `(x - m)(x - m)^T` in float64. `m` is the centre, or the centre of an example's class."""
    total = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64, device=features.device)
    for start in range(0, len(features), ROWS):
        rows = slice(start, start + ROWS)
        x = features[rows].double() - (centre if centre_of is None else centre[centre_of[rows]])
        total += x.T @ x
    return total / len(features)


class HeadMethod(Method):
    """A method that uses the weights of the linear layer that makes the logits."""

    looks_at = frozenset({"features", "head"})

    def take(self, observation: Observation) -> Tensor | int:
        """Take in one batch. Missing weights are an error at the first batch."""
        head_of(observation, self.name)
        return super().take(observation)


class MeanMethod(HeadMethod):
    """A method that learns only the mean of the training features. It keeps no examples.

    Fitting again adds to the mean.
    """

    running = True
    kept: ClassVar = {
        "mean_": Field(("width",), torch.float64, FINITE, reduce="mean"),
        "count_": Field((), torch.int64, NOT_NEGATIVE, optional=True, reduce="sum"),
    }

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self.mean_: Tensor | None = None
        self.count_: Tensor | None = None  # of the examples behind the mean

    def take(self, observation: Observation) -> Tensor | int:
        """Take in one batch. This never waits for a GPU."""
        head_of(observation, self.name)
        features = features_of(observation, self.name)
        finite = observation.finite
        if finite is None:
            finite = torch.ones(len(features), dtype=torch.bool, device=features.device)
        count = finite.sum()
        total = torch.where(finite.unsqueeze(1), features, 0.0).sum(0, dtype=torch.float64)
        self.add_states({"mean_": total / count.clamp_min(1), "count_": count})
        return len(features) - count


class Neighbours:
    """The entries of a bank with the largest inner products with a query, exactly, in bounded memory.

    The search is in float32, by matrix products in pieces. If `faiss` is installed and the features are on
    the CPU, `faiss` does it. The search returns a few more entries than asked for, so that rounding loses
    none. The caller measures these entries in float64.

    Args:
        bank: `(M, D)`, float32.

    """

    def __init__(self, bank: Tensor) -> None:
        self._bank = bank
        self._moved = bank

    def on(self, device: torch.device) -> Tensor:
        """The bank on a device. The copy is kept there."""
        if self._moved.device != device:
            self._moved = self._bank.to(device)
        return self._moved

    def candidates(self, queries: Tensor, k: int, piece: int = PIECE) -> Tensor:
        """The indices of a few more than the k entries with the largest products, `(N, candidates)`."""
        wanted = min(len(self._bank), k + k // 4 + 8)
        if queries.device.type == "cpu" and self._index is not None:
            indices = self._index.search(queries.contiguous().numpy(), wanted)[1]
            return torch.from_numpy(indices).long()
        return largest_products(queries, self.on(queries.device), wanted, piece)

    @cached_property
    def _index(self) -> Any:
        faiss = _faiss()
        if faiss is None:
            return None
        index = faiss.IndexFlatIP(self._bank.shape[1])
        index.add(self._bank.cpu().contiguous().numpy())
        return index


def _faiss() -> ModuleType | None:
    try:
        import faiss
    except ImportError:
        return None
    module: ModuleType = faiss
    return module


def largest_products(queries: Tensor, bank: Tensor, k: int, piece: int = PIECE) -> Tensor:
    """The indices of the k largest inner products of each query with the entries of a bank, `(N, k)`.

    Products are computed in float32 or float64, whatever the settings of autocast and of matrix products.
    Unit vectors of one cluster differ in the last digits only.

    Args:
        queries: `(N, D)`
        bank: `(M, D)`, M at least k.
        k: the number of entries.
        piece: the number of products in memory at a time.

    """
    width = min(len(bank), max(k, 2**16))
    parts = []
    kind = torch.float32 if _full_precision() else torch.float64
    queries = queries.to(kind)
    for rows in queries.split(max(1, piece // width)):
        best = torch.empty(len(rows), 0, device=rows.device, dtype=rows.dtype)
        where = torch.empty(len(rows), 0, device=rows.device, dtype=torch.long)
        for start in range(0, len(bank), width):
            with _no_autocast(rows.device.type):
                products = rows @ bank[start : start + width].to(kind).T
            top = products.topk(min(k, products.shape[1]), dim=1)
            best = torch.cat((best, top.values), 1)
            where = torch.cat((where, top.indices + start), 1)
            kept = best.topk(min(k, best.shape[1]), dim=1)
            best, where = kept.values, where.gather(1, kept.indices)
        parts.append(where)
    return torch.cat(parts)


def _no_autocast(device: str) -> AbstractContextManager[Any]:
    return torch.autocast(device, enabled=False) if is_autocast_available(device) else nullcontext()


def _full_precision() -> bool:
    """Whether float32 matrix products are computed in float32, not in TF32 or bfloat16."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # several settings disagree, and PyTorch names none
        return False


def check_neighbours(name: str, examples: int, k: int) -> None:
    """Refuse fewer training examples than k neighbours."""
    if examples < k:
        raise InputError(
            f"{name} has {examples} training example(s), fewer than the k={k} neighbours it looks for: "
            f"fit on more data, or pass k={examples} or less"
        )


def check_k(k: int, most_examples: int) -> None:
    """Refuse a number of neighbours that the bank cannot hold."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if most_examples < k:
        raise ValueError(f"most_examples={most_examples} leaves fewer training examples than k={k}")


class BankMethod(Method):
    """A method that compares inputs with the nearest examples in a bank of training examples.

    Args:
        model: any classifier that returns logits.
        k: the number of neighbours.
        options: the arguments of every `Method`; `most_examples` bounds the bank.

    """

    looks_at = frozenset({"features"})
    settings = ("k",)
    kept: ClassVar = {"bank_": Field(("examples", "width"), torch.float32, FINITE)}

    def __init__(self, model: nn.Module, *, k: int, **options: Any) -> None:
        super().__init__(model, **options)
        check_k(k, self.most_examples)
        self.k = k
        self.bank_: Tensor | None = None
        self._neighbours: Neighbours | None = None

    @abstractmethod
    def _bank(self, training: Observation) -> Tensor:
        """The bank, made of the training examples: `(M, D)`, float32."""

    def _fit(self, training: Observation) -> None:
        check_neighbours(self.name, len(training), self.k)
        self.bank_, self._neighbours = self._bank(training), None

    def _check_state(self) -> None:
        if self.bank_ is not None:
            check_neighbours(self.name, len(self.bank_), self.k)

    def _nearest(self, queries: Tensor, measure: Callable[[Tensor, Tensor], Tensor], piece: int) -> Tensor:
        """`measure(candidates, queries)` in float64, on pieces of shapes `(n, near, D)` and `(n, D)`."""
        assert self.bank_ is not None
        if self._neighbours is None:
            self._neighbours = Neighbours(self.bank_)
        candidates = self._neighbours.candidates(queries, self.k, piece)
        bank = self._neighbours.on(queries.device)
        rows = max(1, min(piece, NEAR) // (candidates.shape[1] * bank.shape[1]))
        parts = zip(queries.split(rows), candidates.split(rows), strict=True)
        return torch.cat([measure(bank[near].double(), part.double()) for part, near in parts])
