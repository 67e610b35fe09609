"""Observation: what one forward pass shows of a batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gramwatch.inputs.batches import Signature


@dataclass(frozen=True)
class Head:
    """The linear layer that makes the logits: `logits = features @ weight.T + bias`."""

    weight: Tensor
    """`(classes, features)`"""
    bias: Tensor
    """`(classes,)`"""

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> "Head":
        """The layer with this weight, and with a bias of zero if it has none."""
        return Head(weight, weight.new_zeros(len(weight)) if bias is None else bias)

    def __call__(self, features: Tensor) -> Tensor:
        """The logits of features `(N, D)`."""
        return features @ self.weight.T.to(features) + self.bias.to(features)


@dataclass(frozen=True)
class Observation:
    """What one forward pass shows one detector of a batch of N inputs."""

    logits: Tensor
    """`(N, classes)`"""
    features: Tensor | None = None
    """The penultimate features, `(N, D)`: the input of the layer that makes the logits."""
    head: Head | None = None
    """The linear layer that turns the features into logits."""
    channel_means: tuple[Tensor, ...] = ()
    """The mean of each channel over the pixels, `(N, channels)`: one tensor per tap."""
    labels: Tensor | None = None
    """The labels of the inputs, `(N,)`; None if the loader yields none."""
    finite: Tensor | None = None
    """Whether the inputs, logits, features and channel means of an example are all finite, `(N,)`."""
    statistics: Tensor | None = None
    """The Gram statistics of all taps side by side, `(N, statistics)`. `finite` does not cover them."""
    form: Signature | None = None
    """Shapes and dtypes of the inputs."""
    image: Tensor | None = None
    """The numbers of the input, if it is an image, `(N, numbers)`: see `image_numbers`."""
    checksums: Tensor | None = None
    """The checksums of the inputs, `(N,)`, while fitting: see `counted`."""

    def __len__(self) -> int:
        return len(self.logits)

    @property
    def predicted(self) -> Tensor:
        """The predicted class, D_c."""
        return self.logits.argmax(1)

    @property
    def averages(self) -> list[Tensor]:
        """The channel means, then the features, if this observation has them."""
        return [*self.channel_means, *(() if self.features is None else (self.features,))]

    @property
    def classes(self) -> Tensor:
        """The labels; without labels, the predicted classes."""
        return self.predicted if self.labels is None else self.labels

    def __getitem__(self, index: Any) -> "Observation":
        """The observation of the chosen examples: a slice, numbers or a mask."""
        return self.changed(lambda t: t[index])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Observation":
        """A copy with `change` applied to every tensor but those of the head."""

        def applied(t: Tensor | None) -> Tensor | None:
            return None if t is None else change(t)

        return replace(
            self,
            logits=change(self.logits),
            features=applied(self.features),
            channel_means=tuple(change(t) for t in self.channel_means),
            labels=applied(self.labels),
            finite=applied(self.finite),
            statistics=applied(self.statistics),
            image=applied(self.image),
            checksums=applied(self.checksums),
        )

    @cached_property
    def kept(self) -> "Observation":
        """The finite examples, on the CPU. All detectors with this observation share the copy."""
        trimmed = replace(self, finite=None, statistics=None)
        return (trimmed if self.finite is None else trimmed[self.finite]).changed(Tensor.cpu)

    @staticmethod
    def joined(parts: Sequence["Observation"]) -> "Observation":
        """One observation of several batches, without statistics and form."""

        def column(name: str) -> Tensor | None:
            tensors = [getattr(part, name) for part in parts]
            return None if any(t is None for t in tensors) else torch.cat(tensors)

        logits = torch.cat([part.logits for part in parts])
        means = tuple(torch.cat(t) for t in zip(*(part.channel_means for part in parts), strict=True))
        return Observation(
            logits,
            column("features"),
            parts[0].head,
            means,
            column("labels"),
            column("finite"),
            image=column("image"),
        )
