"""SCALE: the energy after multiplying the features by a factor for each example."""

from torch import Tensor

from gramwatch.methods.base import Record
from gramwatch.methods.shaping import PercentileShaping, sharpening
from gramwatch.observe.observation import Head


class SCALE(PercentileShaping):
    """The energy after scaling each example's features (Xu et al., 2024, the post-hoc method).

    Args:
        model: any classifier whose logits one linear layer makes.
        percentile: features above this percentile of an example's own features count as large. The
            default is 65 for fewer than 1,024 features, else 85: what the authors' results have for CIFAR and
            for ImageNet.
        options: the arguments of every `Method`.

    """

    name = "scale"
    record = Record(
        title="SCALE",
        paper="Xu, Chen, Franchi & Yao: Scaling for Training Time and Post-hoc Out-of-distribution Detection "
        "Enhancement. ICLR 2024",
        equation="-log sum_c exp(z_c), z = W h exp(sum h / sum of the largest of h) + b",
        fitted=False,
        cost="the last layer once more, and the largest features",
        limits="Made for features that are nowhere negative. Energies grow with the scaling, so the "
        "threshold depends on the percentile.",
    )
    narrow, wide = 65.0, 85.0

    def logits(self, features: Tensor, head: Head) -> Tensor:
        """The logits of the scaled features."""
        largest, _ = self.largest(features)
        return head(features * sharpening(features, largest))
