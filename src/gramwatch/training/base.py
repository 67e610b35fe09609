"""What all objectives share: settings, what they need, how they change a network, and their loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch.methods.base import Method

Network = Callable[[Tensor], Tensor]
"""Images, normalised, to logits; a module, or a module compiled."""


@dataclass(frozen=True)
class Objective(ABC):
    """What a network is trained for. Its fields are its settings."""

    name: ClassVar[str]
    """How users ask for it."""
    detector: ClassVar[type[Method]]
    """Its own score."""
    needs_outliers: ClassVar[bool] = False
    outliers_per_image: ClassVar[int] = 1
    """How many outliers a batch holds for each image, where there are any."""
    gradient_norm: ClassVar[float | None] = None
    """What gradients are clipped to, if at all."""

    def prepare(self, network: nn.Module, saved: Mapping[str, Tensor] | None = None) -> None:
        """Change the network to what is trained, unless it is already; `saved` are weights to be loaded."""
        return  # most train a network as it is

    @abstractmethod
    def loss(
        self, network: Network, images: Tensor, labels: Tensor, outliers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The mean loss of a batch, and the logits of its images."""

    def settings(self) -> dict[str, Any]:
        """The settings as plain values."""
        return asdict(self)


def both_logits(network: Network, images: Tensor, outliers: Tensor | None) -> tuple[Tensor, Tensor]:
    """The logits of images and of outliers from one pass, so that both count in batch normalisation."""
    assert outliers is not None, "the loop hands over outliers to every objective that needs them"
    logits = network(torch.cat([images, outliers])).float()
    return logits[: len(images)], logits[len(images) :]
