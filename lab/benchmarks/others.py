"""pytorch-ood's Gram detector on the tensors that ours watches.

`pytorch_ood.detector.Gram` takes a list of layers, applies one after the other, keeps a copy of what each
returns, and gives the last one's result to a head. The tensors of a residual block cannot be had that way,
nor those of functions. So its one method that runs the network, `_create_feature_list`, is replaced: the
network runs once, under the same observation as for ours, and one copy is kept of each watched tensor. All
else (the statistics, the collection, bounds, scores) is pytorch-ood's own code, unchanged, with the same
orders. It takes labels where ours takes predictions, keeps a tenth of the data to set expectations, and has
row sums only.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.inputs.foreign import import_torchvision
from gramwatch.watch import Taps, observe

VERSION = "0.4.0"
"""The version that the documents compare with."""


class NotInstalledError(ImportError):
    """pytorch-ood is not there."""


def gram(model: nn.Module, taps: Taps, classes: int, orders: Iterable[int]) -> Any:
    """pytorch-ood's detector for these taps. `NotInstalledError` where it is absent."""
    try:
        import_torchvision()
        from pytorch_ood.detector import Gram
    except ImportError as error:
        raise NotInstalledError(str(error)) from None

    class GramAtTaps(Gram):  # type: ignore[misc, valid-type]
        @torch.no_grad()
        def _create_feature_list(self, data: Tensor) -> tuple[Tensor, list[Tensor]]:
            kept: list[Tensor] = []
            logits = observe(self.head, taps, data, lambda number, maps: kept.append(maps.clone()))
            return logits, kept

    return GramAtTaps(model, list(taps), classes, list(orders))


def version() -> str | None:
    """The version of pytorch-ood, None where it is absent."""
    from importlib import metadata

    try:
        return metadata.version("pytorch-ood")
    except metadata.PackageNotFoundError:
        return None


class Labelled:
    """Batches with labels in which every class occurs: pytorch-ood asks for that."""

    def __init__(self, batches: list[Tensor], classes: int) -> None:
        self.batches, self.classes = batches, classes

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seen = 0
        for batch in self.batches:
            yield batch, torch.arange(seen, seen + len(batch)) % self.classes
            seen += len(batch)
