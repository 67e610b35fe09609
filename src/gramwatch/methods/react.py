"""ReAct: the energy after clipping large features."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from gramwatch.files.artifact import FINITE, Field
from gramwatch.methods.base import Record
from gramwatch.methods.features import features_of
from gramwatch.methods.shaping import PercentileShaping
from gramwatch.observe.observation import Head, Observation


class ReAct(PercentileShaping):
    """The energy after clipping the penultimate features (Sun, Guo & Li, 2021, Eq. 1 and 2).

    Args:
        model: any classifier whose logits one linear layer makes.
        percentile: features are clipped at this percentile of all activations of all training examples. The
            default is 99 for fewer than 1,024 features, else the paper's 90.
        options: the arguments of every `Method`.

    """

    name = "react"
    record = Record(
        title="ReAct",
        paper="Sun, Guo & Li: ReAct: Out-of-distribution Detection With Rectified Activations. NeurIPS 2021",
        equation="-log sum_c exp(z_c), z = W min(h, c) + b, c a percentile of training activations",
        fitted=True,
        cost="the last layer once more",
        limits="One number clips all features alike. Made for features that are large if an input is "
        "strange. Of little use if they are small.",
    )
    narrow, wide = 99.0, 90.0
    kept: ClassVar = {"clip_": Field((), torch.float64, FINITE)}

    clip_: Tensor | None

    def _fit(self, training: Observation) -> None:
        features = features_of(training, self.name)
        # By NumPy: torch.quantile takes no more than 16 million values.
        clip = np.percentile(features.numpy(), self.percentile_of(features.shape[1]))
        self.clip_ = torch.tensor(float(clip), dtype=torch.float64)

    def logits(self, features: Tensor, head: Head) -> Tensor:
        """The logits of the clipped features; Eq. 2."""
        assert self.clip_ is not None
        return head(features.clamp(max=float(self.clip_)))
