"""Semantic: the length of the vectors that a network predicts instead of a label."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.errors import InputError
from gramwatch.methods.base import Method, Record
from gramwatch.observe.needs import Needs
from gramwatch.observe.observation import Observation
from gramwatch.watch import unwrap


class SemanticHead(nn.Module):
    """Predicts K vectors and compares them with the vectors of the labels. It replaces the last linear layer.

    Its output can be used as logits. The logit of a label is minus the sum over k of the cosine distances
    `d(u, v) = (1 - cos(u, v)) / 2`. The logits are linear in the K vectors at unit length. Methods that look
    at the layer that makes the logits, and at its inputs, work as on any other network.

    Args:
        width: the number of input features.
        labels: K matrices, `(classes, size)`, with the vectors of the classes. Sizes may differ.

    """

    def __init__(self, width: int, labels: Sequence[Tensor]) -> None:
        super().__init__()
        self.sizes = [matrix.shape[1] for matrix in labels]
        self.predict = nn.Linear(width, sum(self.sizes))
        for k, matrix in enumerate(labels):
            self.register_buffer(f"labels_{k}", matrix.detach().float().clone())

    @property
    def labels(self) -> list[Tensor]:
        """The vectors of the classes, K matrices."""
        return [self.get_buffer(f"labels_{k}") for k in range(len(self.sizes))]

    def forward(self, features: Tensor) -> Tensor:
        """Minus the summed distances, `(N, classes)`."""
        vectors = self.predict(features)
        with torch.autocast(vectors.device.type, enabled=False):  # small distances need all their digits
            parts = vectors.float().split(self.sizes, 1)
            units = torch.cat([F.normalize(part, dim=1) for part in parts], 1)
            weight = torch.cat([F.normalize(matrix.float(), dim=1) for matrix in self.labels], 1) / 2
            bias = weight.new_full((len(weight),), -len(self.sizes) / 2)
            return F.linear(units, weight, bias)


class SemanticScore(Method):
    """Minus the squared length of all predicted vectors (Shalev, Adi & Keshet, 2018).

    The training is `gramwatch_lab.training.Semantic`.

    Args:
        model: a network trained for this score. Its last layer is a `SemanticHead`.
        options: the arguments of every `Method`.

    """

    name = "semantic"
    record = Record(
        title="Semantic",
        paper="Shalev, Adi & Keshet: Out-of-Distribution Detection using Multiple Semantic Label "
        "Representations. NeurIPS 2018",
        equation="-sum_k ||f_k(x)||^2, f_k(x) the k-th predicted vector",
        fitted=False,
        retraining=True,
        cost="none",
        limits="The network has to be trained for it. Nothing in training sets the vectors' length: inputs "
        "with larger activations than training data pass as normal.",
    )

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        heads = [name for name, part in unwrap(self.model).named_modules() if isinstance(part, SemanticHead)]
        if len(heads) != 1:
            raise InputError(
                f"{type(unwrap(self.model)).__name__} has {len(heads)} SemanticHeads, but this score needs "
                "exactly one: train the network with gramwatch_lab.training.Semantic"
            )
        self._tap = f"{heads[0]}.predict".removeprefix(".")

    @property
    def needs(self) -> Needs:
        """The predicted vectors. The channel means of a vector are the vector itself."""
        return Needs(means=(self._tap,))

    def score(self, observation: Observation) -> Tensor:
        """Minus the squared length. The channel means are the predicted vectors."""
        if not observation.channel_means:
            raise InputError(f"{self.name} looks at the predicted vectors, which were not observed")
        return -observation.channel_means[0].double().square().sum(1)
