"""NNGuide: the energy, guided by how near confident training examples are."""

from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.observation import Observation
from gramwatch.rivals.base import Record, Rival
from gramwatch.rivals.energy import energy
from gramwatch.rivals.features import (
    NEAR,
    PIECE,
    Neighbours,
    check_k,
    check_neighbours,
    features_of,
    unit,
)


class NNGuide(Rival):
    """The energy times the guidance: the k largest weighted similarities (Park, Jung & Teoh, 2023).

    Args:
        model: any classifier that returns logits.
        k: how many neighbours guide. 10 is what the authors' code uses; OpenOOD runs it with 100.
        options: those of every `Rival`; `most_examples` bounds the bank. The paper keeps 1 % of ImageNet.

    """

    name = "nnguide"
    record = Record(
        title="NNGuide",
        paper="Park, Jung & Teoh: Nearest Neighbor Guidance for Out-of-Distribution Detection. ICCV 2023",
        equation="-E(z) * mean of the k largest E(z_i) u_i.u, E = log sum exp, u = h / ||h||",
        fitted=True,
        cost="one product with every kept training example; these are kept, and saved",
        limits="Where log sum exp is negative on training data, the product of two signs means nothing.",
    )
    needs = frozenset({"features"})
    settings = ("k",)

    def __init__(self, model: nn.Module, *, k: int = 10, **options: Any) -> None:
        super().__init__(model, **options)
        check_k(k, self.most_examples)
        self.k = k
        self.bank_: Tensor | None = None
        self._neighbours: Neighbours | None = None

    def _fit(self, training: Observation) -> None:
        check_neighbours(self.name, len(training), self.k)
        confidence = -energy(training.logits)
        bank = unit(features_of(training, self.name)).double() * confidence.unsqueeze(1)
        self.bank_, self._neighbours = bank.float(), None

    def score(self, observation: Observation) -> Tensor:
        """Minus the energy's confidence times the guidance."""
        confidence = -energy(observation.logits)
        return -confidence * self._guidance(unit(features_of(observation, self.name)))

    def _guidance(self, queries: Tensor, piece: int = PIECE) -> Tensor:
        assert self.bank_ is not None
        if self._neighbours is None:
            self._neighbours = Neighbours(self.bank_)
        found = self._neighbours.candidates(queries, self.k, piece)
        bank = self._neighbours.on(queries.device)
        rows = max(1, min(piece, NEAR) // (found.shape[1] * bank.shape[1]))
        parts = []
        for some, near in zip(queries.split(rows), found.split(rows), strict=True):
            products = (bank[near].double() @ some.double().unsqueeze(2)).squeeze(2)
            parts.append(products.topk(self.k, dim=1).values.mean(1))
        return torch.cat(parts)
