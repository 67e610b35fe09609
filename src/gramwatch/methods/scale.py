"""SCALE: the energy after multiplying the features by a factor for each example."""

from typing import Any

from torch import Tensor, nn

from gramwatch.methods.base import Record
from gramwatch.methods.shaping import Shaping, checked_percentile, kept, sharpening
from gramwatch.observation import Head


class SCALE(Shaping):
    """The energy after scaling each example's features (Xu et al., 2024, the post-hoc method).

    Args:
        model: any classifier whose logits one linear layer makes.
        percentile: features above this percentile of an example's own features count as large. The paper
            takes 85.
        options: the arguments of every `Method`.

    """

    name = "scale"
    record = Record(
        title="SCALE",
        paper="Xu, Chen, Franchi & Yao: Scaling for Training Time and Post-hoc Out-of-distribution Detection "
        "Enhancement. ICLR 2024",
        equation="-log sum_c exp(z_c), z = W h exp(sum h / sum of the largest 15 % of h) + b",
        fitted=False,
        cost="the last layer once more, and the largest features",
        limits="Made for features that are nowhere negative. Energies grow with the scaling, so the "
        "threshold depends on the percentile.",
    )
    settings = ("percentile",)

    def __init__(self, model: nn.Module, *, percentile: float = 85.0, **options: Any) -> None:
        super().__init__(model, **options)
        self.percentile = checked_percentile(percentile)

    def logits(self, features: Tensor, head: Head) -> Tensor:
        """The logits of the scaled features."""
        largest = features.topk(kept(features.shape[1], self.percentile)).values
        return head(features * sharpening(features, largest))
