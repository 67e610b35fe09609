"""ASH: keep only each example's largest features."""

from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.methods.base import Record
from gramwatch.methods.shaping import Shaping, checked_percentile, kept, sharpening
from gramwatch.observation import Head


class ASH(Shaping):
    """The energy after pruning each example's features (Djurisic et al., 2023, Algorithms 1 to 3).

    Args:
        model: any classifier whose logits one linear layer makes.
        variant: how the kept features change. `"s"` multiplies them by exp(sum before / sum after). `"p"`
            leaves them as they are. `"b"` makes them equal; their sum is then the sum before.
        percentile: features below this percentile of an example's own features become zero. The authors
            take 90 for ASH-S on CIFAR.
        options: the arguments of every `Method`.

    """

    name = "ash"
    record = Record(
        title="ASH",
        paper="Djurisic, Bozanic, Ashok & Liu: Extremely Simple Activation Shaping for Out-of-Distribution "
        "Detection. ICLR 2023",
        equation="-log sum_c exp(z_c), z = W h' exp(sum h / sum h') + b, h' the largest tenth of h",
        fitted=False,
        cost="the last layer once more, and the largest features",
        limits="Made for features that are nowhere negative. Energies grow with the sharpening, so the "
        "threshold depends on the percentile.",
    )
    settings = ("variant", "percentile")

    def __init__(
        self, model: nn.Module, *, variant: str = "s", percentile: float = 90.0, **options: Any
    ) -> None:
        super().__init__(model, **options)
        if variant not in ("s", "p", "b"):
            raise ValueError(f"variant must be 's', 'p' or 'b', got {variant!r}")
        self.variant, self.percentile = variant, checked_percentile(percentile)

    def logits(self, features: Tensor, head: Head) -> Tensor:
        """The logits of the pruned features."""
        largest, where = features.topk(kept(features.shape[1], self.percentile))
        if self.variant == "s":
            largest = largest * sharpening(features, largest)
        elif self.variant == "b":
            largest = (features.sum(1, keepdim=True) / largest.shape[1]).expand_as(largest)
        return head(torch.zeros_like(features).scatter(1, where, largest))
