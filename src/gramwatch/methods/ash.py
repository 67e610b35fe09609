"""ASH: keep only each example's largest features."""

from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.methods.base import Record
from gramwatch.methods.shaping import PercentileShaping, sharpening
from gramwatch.observe.observation import Head


class ASH(PercentileShaping):
    """The energy after pruning each example's features (Djurisic et al., 2023, Algorithms 1 to 3).

    Args:
        model: any classifier whose logits one linear layer makes.
        variant: how the kept features change. `"s"` multiplies them by exp(sum before / sum after). `"p"`
            leaves them as they are. `"b"` makes them equal; their sum is then the sum before.
        percentile: features below this percentile of an example's own features become zero. The
            default is 65 for fewer than 1,024 features, else 90. These are two defaults of the authors' code:
            that of the function, and that for ImageNet.
        options: the arguments of every `Method`.

    """

    name = "ash"
    record = Record(
        title="ASH",
        paper="Djurisic, Bozanic, Ashok & Liu: Extremely Simple Activation Shaping for Out-of-Distribution "
        "Detection. ICLR 2023",
        equation="-log sum_c exp(z_c), z = W h' exp(sum h / sum h') + b, h' the largest of h",
        fitted=False,
        cost="the last layer once more, and the largest features",
        limits="Made for features that are nowhere negative. Energies grow with the sharpening, so the "
        "threshold depends on the percentile.",
    )
    settings = ("variant", "percentile")
    narrow, wide = 65.0, 90.0

    def __init__(
        self, model: nn.Module, *, variant: str = "s", percentile: float | None = None, **options: Any
    ) -> None:
        super().__init__(model, percentile=percentile, **options)
        if variant not in ("s", "p", "b"):
            raise ValueError(f"variant must be 's', 'p' or 'b', got {variant!r}")
        self.variant = variant

    def logits(self, features: Tensor, head: Head) -> Tensor:
        """The logits of the pruned features."""
        largest, where = self.largest(features)
        if self.variant == "s":
            largest = largest * sharpening(features, largest)
        elif self.variant == "b":
            largest = (features.sum(1, keepdim=True) / largest.shape[1]).expand_as(largest)
        return head(torch.zeros_like(features).scatter(1, where, largest))
