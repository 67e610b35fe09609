"""Parts shared by methods on penultimate features: unit length, second moments, neighbours, the head."""

from abc import abstractmethod
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available

from gramwatch.detect.progress import mixed
from gramwatch.errors import InputError, TapError, warn
from gramwatch.files.artifact import FINITE, NOT_NEGATIVE, Field
from gramwatch.methods.base import Method
from gramwatch.observe.observation import Head, Observation

PIECE = 2**24
"""The number of products with a bank in memory at a time."""
NEAR = 2**19
"""The number of values of neighbours in memory at a time: they fit into a processor's cache."""
MOST_WAITING = 2**13
"""At most about so many rows wait, on their device, before they take part in a sample."""
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


def finite_of(observation: Observation) -> Tensor:
    """Whether the examples are finite, `(N,)`."""
    if observation.finite is None:
        return torch.ones(len(observation), dtype=torch.bool, device=observation.logits.device)
    return observation.finite


def unit(features: Tensor) -> Tensor:
    """The features at length one, computed in float64, kept in float32. A feature of zeros stays zero."""
    # A graph has no pieces: it takes batches of every size.
    parts = (features,) if torch.compiler.is_exporting() else features.split(ROWS)
    units = []
    for rows in parts:
        exact = rows.double()
        units.append((exact / torch.linalg.vector_norm(exact, dim=1, keepdim=True).clamp_min(TINY)).float())
    return units[0] if len(units) == 1 else torch.cat(units)


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

    mean_: Tensor | None
    count_: Tensor | None
    """The number of examples behind the mean."""

    def take(self, observation: Observation) -> Tensor | int:
        """Take in one batch. This never waits for a GPU."""
        head_of(observation, self.name)
        features = features_of(observation, self.name)
        finite = finite_of(observation)
        count = finite.sum()
        total = torch.where(finite.unsqueeze(1), features, 0.0).sum(0, dtype=torch.float64)
        self.add_states({"mean_": total / count.clamp_min(1), "count_": count})
        return len(features) - count


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
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # several settings disagree, and PyTorch names none
        exact = False
    kind, device = torch.float32 if exact else torch.float64, queries.device.type
    plain = torch.autocast(device, enabled=False) if is_autocast_available(device) else nullcontext()
    queries = queries.to(kind)
    for rows in queries.split(max(1, piece // width)):
        best = torch.empty(len(rows), 0, device=rows.device, dtype=rows.dtype)
        where = torch.empty(len(rows), 0, device=rows.device, dtype=torch.long)
        for start in range(0, len(bank), width):
            with plain:
                products = rows @ bank[start : start + width].to(kind).T
            top = products.topk(min(k, products.shape[1]), dim=1)
            best = torch.cat((best, top.values), 1)
            where = torch.cat((where, top.indices + start), 1)
            kept = best.topk(min(k, best.shape[1]), dim=1)
            best, where = kept.values, where.gather(1, kept.indices)
        parts.append(where)
    return torch.cat(parts)


def sample_keys(checksums: Tensor, seed: int) -> Tensor:
    """A random key for each example: those with the smallest keys are a uniform sample, `(N,)`.

    A key depends on the seed and on the example only. So the sample depends neither on the order of examples
    nor on the process that reads them, and copies of an example have one key.

    Args:
        checksums: of the examples, `(N,)`.
        seed: the seed of the sample.

    """
    salt = mixed(torch.tensor(seed, device=checksums.device))
    return mixed(checksums ^ salt) & (2**63 - 1)


def checksums_of(rows: Tensor) -> Tensor:
    """The checksum of each row `(N, D)`, float32: `(N,)`."""
    bits = rows.contiguous().view(torch.int32).long()
    columns = mixed(torch.arange(rows.shape[1], device=rows.device)) | 1
    return (bits * columns).sum(1)


class BankMethod(Method):
    """A method that compares inputs with the nearest examples in a bank of training examples.

    The bank is a uniform sample of all training examples, of at most `most_examples`. Copies of an input
    count once. Fitting again adds to the bank. The banks of two detectors merge to a sample of both.

    Args:
        model: any classifier that returns logits.
        k: the number of neighbours.
        options: the arguments of every `Method`; `most_examples` bounds the bank.

    """

    looks_at = frozenset({"features"})
    settings = ("k",)
    running = True
    kept: ClassVar = {
        "bank_": Field(("examples", "width"), torch.float32, FINITE, reduce="sample"),
        "keys_": Field(("examples",), torch.int64, NOT_NEGATIVE, optional=True, reduce="sample"),
        "count_": Field((), torch.int64, NOT_NEGATIVE, optional=True, reduce="sum"),
    }

    bank_: Tensor | None
    keys_: Tensor | None
    """The keys of the examples in the bank, ascending."""
    count_: Tensor | None
    """The number of all examples that the bank is a sample of."""

    def __init__(self, model: nn.Module, *, k: int, **options: Any) -> None:
        super().__init__(model, **options)
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if self.most_examples < k:
            raise ValueError(f"most_examples={self.most_examples} leaves fewer training examples than k={k}")
        self.k = k

    def _begin(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        """Rows that are not in the bank yet, their checksums, and whether they are finite, by batch."""
        self._indexed: Tensor | None = None
        """The bank that `_index` was built from."""
        self._index: Any = None
        super()._begin()

    @abstractmethod
    def _bank(self, training: Observation) -> Tensor:
        """What the bank holds of training examples, a row for each, `(N, D)`, float32."""

    def take(self, observation: Observation) -> Tensor | int:
        """Take in one batch of training examples. Examples that are not finite are left out.

        Batches wait on their device. A step that adds them to the bank sorts it, and waits for a GPU. So
        steps are few.
        """
        rows, finite = self._bank(observation), finite_of(observation)
        checksums = checksums_of(rows) if observation.checksums is None else observation.checksums
        self._waiting.append((rows, checksums, finite))
        if sum(len(rows) for rows, _, _ in self._waiting) >= min(self.most_examples, MOST_WAITING):
            self._add_waiting()
        return 0 if observation.finite is None else (~finite).sum()

    def _add_waiting(self) -> None:
        """Let the examples that wait take part in the sample."""
        if self._waiting:
            columns = zip(*self._waiting, strict=True)
            rows, checksums, finite = (torch.cat([part.cpu() for part in parts]) for parts in columns)
            keys = sample_keys(checksums[finite], self.seed)
            self._waiting = []
            if len(keys):
                self.add_states({"bank_": rows[finite], "keys_": keys, "count_": torch.tensor(len(keys))})

    def state(self) -> dict[str, Tensor]:
        """The fitted tensors by name. During a fit they include all examples so far."""
        self._add_waiting()
        return super().state()

    def take_over(self, before: Method) -> None:
        """Continue from the sample of another detector."""
        self._waiting = []
        super().take_over(before)

    def finish(self, left_out: int = 0) -> None:
        """Complete the sample."""
        self._add_waiting()
        if self.bank_ is not None and len(self.bank_) < self.k:
            warn(
                f"{self.name} has {len(self.bank_)} training example(s), fewer than the k={self.k} "
                "neighbours it looks for: it takes them all. Fit on more data"
            )
        super().finish(left_out)

    @abstractmethod
    def _measure(self, near: Tensor, queries: Tensor) -> Tensor:
        """One number for each query `(n, D)`, from its candidates `(n, near, D)`, in float64."""

    def score(self, observation: Observation) -> Tensor:
        """What `_measure` says of the neighbours in the bank, `(N,)`, in bounded memory.

        The search is in float32 or float64, by matrix products in pieces. If `faiss` is installed and the
        features are on the CPU, `faiss` does it. There are a few more candidates than the k nearest, so that
        rounding loses none. `_measure` looks at them in float64.
        """
        queries = unit(features_of(observation, self.name))
        bank = self.on(queries.device, "bank_")
        k = min(self.k, len(bank))
        wanted = min(len(bank), k + k // 4 + 8)
        if torch.compiler.is_exporting():
            near = (queries @ bank.T).topk(wanted, dim=1).indices
            return self._measure(bank[near].double(), queries.double())
        on_cpu = queries.device.type == "cpu"
        if on_cpu and self._indexed is not self.bank_:
            self._indexed, self._index = self.bank_, _faiss_index(bank)
        if on_cpu and self._index is not None:
            indices = self._index.search(queries.contiguous().numpy(), wanted)[1]
            candidates = torch.from_numpy(indices).long()
        else:
            candidates = largest_products(queries, bank, wanted, PIECE)
        rows = max(1, min(PIECE, NEAR) // (wanted * bank.shape[1]))
        parts = zip(queries.split(rows), candidates.split(rows), strict=True)
        return torch.cat([self._measure(bank[near].double(), part.double()) for part, near in parts])


def _faiss_index(bank: Tensor) -> Any:
    """An index of `faiss` that searches by inner products. None if `faiss` is not installed."""
    try:
        import faiss
    except ImportError:
        return None
    index = faiss.IndexFlatIP(bank.shape[1])
    index.add(bank.cpu().contiguous().numpy())
    return index
