"""DICE: the logits from only those weights that contribute most on training data."""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from gramwatch.errors import InputError
from gramwatch.files.artifact import Field
from gramwatch.methods.base import Record
from gramwatch.methods.features import features_of, head_of
from gramwatch.methods.shaping import Shaping
from gramwatch.observe.observation import Head, Observation


class DICE(Shaping):
    """The energy after thinning out the last layer's weights (Sun & Li, 2022, section 3).

    Args:
        model: any classifier whose logits one linear layer makes.
        sparsity: p, the share of weights that become zero. These have the smallest mean contribution, which
            is the weight times the mean training feature. The paper takes 0.7 for ImageNet and 0.9 for CIFAR.
        options: the arguments of every `Method`.

    """

    name = "dice"
    record = Record(
        title="DICE",
        paper="Sun & Li: DICE: Leveraging Sparsification for Out-of-Distribution Detection. ECCV 2022",
        equation="-log sum_c exp(z_c), z = (M * W) h + b, M the weights with largest W_cd E[h_d]",
        fitted=True,
        cost="the last layer once more",
        limits="The one threshold for all classes may leave a class with few weights or none.",
    )
    settings = ("sparsity",)
    kept: ClassVar = {"mask_": Field(("classes", "width"), torch.bool)}
    mask_: Tensor | None

    def __init__(self, model: nn.Module, *, sparsity: float = 0.7, **options: Any) -> None:
        super().__init__(model, **options)
        if not 0 <= sparsity < 1:
            raise ValueError(f"sparsity must lie in [0, 1), got {sparsity}")
        self.sparsity = float(sparsity)

    def _fit(self, training: Observation) -> None:
        features, head = features_of(training, self.name), head_of(training, self.name)
        contribution = head.weight.double().cpu() * features.double().mean(0)
        smallest = np.percentile(contribution.numpy(), 100 * self.sparsity) if self.sparsity else -np.inf
        self.mask_ = contribution > float(smallest)

    def logits(self, features: Tensor, head: Head) -> Tensor:
        """The logits from the kept weights and the whole bias."""
        mask = self.on(features.device, "mask_")
        if mask.shape != head.weight.shape:
            then, now = tuple(mask.shape), tuple(head.weight.shape)
            raise InputError(f"{self.name} was fitted on a last layer of {then} weights, not {now}")
        weight = torch.where(mask, head.weight.to(features), 0)
        return Head(weight, head.bias)(features)
