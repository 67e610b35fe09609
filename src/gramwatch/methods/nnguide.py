"""NNGuide: the energy times the similarity to confident training examples."""

from typing import Any

from torch import Tensor, nn

from gramwatch.methods.base import Record
from gramwatch.methods.energy import energy
from gramwatch.methods.features import BankMethod, features_of, unit
from gramwatch.observe.observation import Observation


class NNGuide(BankMethod):
    """The energy times the guidance: the k largest weighted similarities (Park, Jung & Teoh, 2023).

    Args:
        model: any classifier that returns logits.
        k: the number of neighbours that guide. The authors' code uses 10, OpenOOD uses 100.
        options: the arguments of every `Method`. `most_examples` bounds the bank; the paper keeps 1 % of
            ImageNet.

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

    def __init__(self, model: nn.Module, *, k: int = 10, **options: Any) -> None:
        super().__init__(model, k=k, **options)

    def _bank(self, training: Observation) -> Tensor:
        confidence = -energy(training.logits)
        bank = unit(features_of(training, self.name)).double() * confidence.unsqueeze(1)
        return bank.float()

    def score(self, observation: Observation) -> Tensor:
        """Minus the confidence, which is minus the energy, times the guidance."""
        confidence = -energy(observation.logits)
        return -confidence * super().score(observation)

    def _measure(self, near: Tensor, queries: Tensor) -> Tensor:
        """The mean of the k largest weighted similarities."""
        products = (near @ queries.unsqueeze(2)).squeeze(2)
        return products.topk(min(self.k, near.shape[1]), dim=1).values.mean(1)
