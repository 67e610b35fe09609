"""Relative Mahalanobis++: Mahalanobis++ minus the distance of the direction to all training data."""

from typing import ClassVar

import torch
from torch import Tensor

from gramwatch.files.artifact import FINITE, Field
from gramwatch.methods.base import Record
from gramwatch.methods.gaussians import whitened
from gramwatch.methods.mahalanobis_pp import MahalanobisPP
from gramwatch.observe.observation import Observation


class RelativeMahalanobisPP(MahalanobisPP):
    """Relative Mahalanobis of penultimate features scaled to length one (Müller & Hein, 2025).

    Classes are the labels. If the loader has none, they are the predicted classes. A class without examples
    is left out, and so are directions in which the training examples do not vary.

    Args:
        model: any classifier that returns logits.
        options: the arguments of every `Method`.

    """

    name = "relative_mahalanobis_pp"
    record = Record(
        title="relative Mahalanobis++",
        paper="Müller & Hein: Mahalanobis++: Improving OOD Detection via Feature Normalization. ICML 2025; "
        "after Ren et al.: A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection. 2021",
        equation="min_c (u - m_c)^T S^-1 (u - m_c) - (u - m)^T S_0^-1 (u - m), u = h / ||h||",
        fitted=True,
        cost="two products with a D x D matrix, one with the means of the classes",
        limits="Sees directions only. Weak far from all training data, where both distances are large.",
    )
    kept: ClassVar = {
        **MahalanobisPP.kept,
        "mean_": Field(("width",), torch.float64, FINITE),
        "background_whitening_": Field(("width", "directions"), torch.float64, FINITE),
    }

    mean_: Tensor | None
    """The mean of all training examples."""
    background_whitening_: Tensor | None
    """The whitening of the covariance about that mean."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, left_out: int = 0) -> None:
        """Compute the class means, the mean of all examples, and both covariances from the sums."""
        super().finish(left_out)
        sums = self._seen(torch.device("cpu"))
        assert sums is not None
        (group,) = sums.groups
        total, count = group.by_class.sum(1, keepdim=True), sums.counts.sum(0, keepdim=True)
        self.mean_ = (group.origins + total[:, 0] / count).flatten()
        ((whitening, _),) = whitened(group.origins, total, group.products, count)
        self.background_whitening_ = whitening.contiguous()  # as after loading: equal to the last bit

    def score(self, observation: Observation) -> Tensor:
        """The squared distance to the nearest class minus the squared distance to all training data."""
        (only,) = self._at_taps(observation)
        device = only.features.device
        mean, whitening = (self.on(device, name) for name in ("mean_", "background_whitening_"))
        background = ((only.features - mean) @ whitening).square().sum(1)
        return only.nearest - background
