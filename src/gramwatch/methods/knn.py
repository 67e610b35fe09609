"""KNN: the distance to the k-th nearest training example."""

from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.methods.base import Record
from gramwatch.methods.features import BankMethod, features_of, unit
from gramwatch.observe.observation import Observation


class KNN(BankMethod):
    """The distance to the k-th nearest training example (Sun et al., 2022, Algorithm 1).

    Args:
        model: any classifier that returns logits.
        k: the rank of the neighbour. The paper uses 50 for CIFAR-10, 200 for CIFAR-100 and 1000 for ImageNet,
            with all training examples.
        most_examples: the most training examples to keep. Of more, a uniform sample is kept.
        options: the further arguments of every `Method`.

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

    def __init__(self, model: nn.Module, *, k: int = 10, most_examples: int = 5_000, **options: Any) -> None:
        super().__init__(model, k=k, most_examples=most_examples, **options)

    def _bank(self, training: Observation) -> Tensor:
        return unit(features_of(training, self.name))

    def _measure(self, near: Tensor, queries: Tensor) -> Tensor:
        """The distance to the k-th nearest training example."""
        # The difference keeps all digits. 2 - 2 u.v loses those in which near neighbours differ.
        distances: Tensor = torch.linalg.vector_norm(near - queries.unsqueeze(1), dim=-1)
        return distances.topk(min(self.k, near.shape[1]), dim=1, largest=False).values[:, -1]
