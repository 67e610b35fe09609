"""KNN: how far the nearest training examples are."""

from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.observation import Observation
from gramwatch.rivals.base import Record, Rival
from gramwatch.rivals.features import (
    NEAR,
    PIECE,
    Neighbours,
    check_k,
    check_neighbours,
    features_of,
    lengths,
    unit,
)


class KNN(Rival):
    """The distance to the k-th nearest training example (Sun et al., 2022, Algorithm 1).

    Args:
        model: any classifier that returns logits.
        k: which neighbour. The paper uses 50 for CIFAR-10, 200 for CIFAR-100 and 1000 for ImageNet, each with
            all training examples; a bank of a tenth of them wants a tenth of that.
        options: those of every `Rival`; `most_examples` bounds the bank.

    """

    name = "knn"
    record = Record(
        title="KNN",
        paper="Sun, Ming, Zhu & Li: Out-of-Distribution Detection with Deep Nearest Neighbors. ICML 2022",
        equation="||u - u_(k)||, u = h / ||h||, u_(k) the k-th nearest of the training examples",
        fitted=True,
        cost="one product with every kept training example; these are kept, and saved",
        limits="Sees directions only. Needs features that form clusters.",
    )
    needs = frozenset({"features"})
    settings = ("k",)

    def __init__(self, model: nn.Module, *, k: int = 50, **options: Any) -> None:
        super().__init__(model, **options)
        check_k(k, self.most_examples)
        self.k = k
        self.bank_: Tensor | None = None
        self._neighbours: Neighbours | None = None

    def _fit(self, training: Observation) -> None:
        check_neighbours(self.name, len(training), self.k)
        self.bank_, self._neighbours = unit(features_of(training, self.name)), None

    def score(self, observation: Observation) -> Tensor:
        """The distance to the k-th nearest."""
        return self._distance(unit(features_of(observation, self.name)))

    def _distance(self, queries: Tensor, piece: int = PIECE) -> Tensor:
        assert self.bank_ is not None
        if self._neighbours is None:
            self._neighbours = Neighbours(self.bank_)
        found = self._neighbours.candidates(queries, self.k, piece)
        bank = self._neighbours.on(queries.device)
        rows = max(1, min(piece, NEAR) // (found.shape[1] * bank.shape[1]))
        parts = []
        for some, near in zip(queries.split(rows), found.split(rows), strict=True):
            # Of the difference itself: 2 - 2 u.v loses what is left of it between near neighbours.
            distances = lengths(bank[near].double() - some.double().unsqueeze(1))
            parts.append(distances.kthvalue(self.k, dim=1).values)
        return torch.cat(parts)
