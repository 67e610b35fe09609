"""The base of all objectives: their settings, their needs, their change of the network, and their loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch.methods.base import Method

Network = Callable[[Tensor], Tensor]
"""A function from normalised images to logits: a module, compiled or not."""


@dataclass(frozen=True)
class Objective(ABC):
    """The objective of a training. Its fields are its settings."""

    name: ClassVar[str]
    """The name by which users choose it."""
    detector: ClassVar[type[Method]]
    """Its own score."""
    needs_outliers: ClassVar[bool] = False
    outliers_per_image: ClassVar[int] = 1
    """The number of outliers for each image in a batch, if the objective needs outliers."""
    gradient_norm: ClassVar[float | None] = None
    """The norm that gradients are clipped to. None: no clipping."""

    def prepare(self, network: nn.Module, saved: Mapping[str, Tensor] | None = None) -> None:
        """Change the network for this objective, once. `saved` are the weights that will be loaded."""
        return  # most objectives train a network as it is

    @abstractmethod
    def loss(
        self, network: Network, images: Tensor, labels: Tensor, outliers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and the logits of its images."""

    def settings(self) -> dict[str, Any]:
        """The settings as plain values."""
        return asdict(self)


def both_logits(network: Network, images: Tensor, outliers: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits of images and of outliers from one pass. So batch normalisation takes both into account."""
    assert outliers is not None, "the loop hands over outliers to every objective that needs them"
    logits = network(torch.cat([images, outliers])).float()
    return logits[: len(images)], logits[len(images) :]
