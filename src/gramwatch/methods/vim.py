"""ViM: a virtual logit for the part of a feature outside the principal space of training features."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch.errors import InputError
from gramwatch.files.artifact import FINITE, Field
from gramwatch.methods.base import Record
from gramwatch.methods.energy import energy
from gramwatch.methods.features import ROWS, HeadMethod, features_of, head_of, lengths, second_moment
from gramwatch.observe.observation import Observation


class ViM(HeadMethod):
    """The residual outside the principal space as a virtual logit (Wang et al., 2022, Eq. 4-7).

    The score is the logarithm of the odds of the virtual class in Eq. 7.

    Args:
        model: any classifier that returns logits.
        dimensions: the dimensions of the principal space. By default 1000 for 2048 features or more, 512 for
            768 features or more (the authors' choice), else half the features.
        options: the arguments of every `Method`.

    """

    name = "vim"
    record = Record(
        title="ViM",
        paper="Wang, Li, Feng & Zhang: ViM: Out-Of-Distribution with Virtual-logit Matching. CVPR 2022",
        equation="alpha ||R^T (h - o)|| - log sum_c exp(z_c), o = -W^+ b",
        fitted=True,
        cost="one product with a D x (D - d) matrix",
        limits="Sees little where the features fill their space, as narrow ones do.",
    )
    settings = ("dimensions",)
    kept: ClassVar = {
        "origin_": Field(("width",), torch.float64, FINITE),
        "residual_": Field(("width", "outside"), torch.float64, FINITE),
        "alpha_": Field((), torch.float64, FINITE),
    }
    origin_: Tensor | None
    residual_: Tensor | None
    alpha_: Tensor | None

    def __init__(self, model: nn.Module, *, dimensions: int | None = None, **options: Any) -> None:
        super().__init__(model, **options)
        if dimensions is not None and dimensions < 1:
            raise ValueError(f"dimensions must be at least 1, got {dimensions}")
        self.dimensions = dimensions

    def _fit(self, training: Observation) -> None:
        head = head_of(training, self.name)
        features = features_of(training, self.name)
        width = features.shape[1]
        kept = default_dimensions(width) if self.dimensions is None else self.dimensions
        if kept >= width:
            raise InputError(
                f"a principal space of {kept} dimensions leaves nothing outside it of {width} features: "
                "pass fewer dimensions"
            )
        weight, bias = head.weight.to(features.device).double(), head.bias.to(features.device).double()
        self.origin_ = -(torch.linalg.pinv(weight) @ bias)
        vectors = torch.linalg.eigh(second_moment(features, self.origin_)).eigenvectors  # ascending
        self.residual_ = vectors[:, : width - kept].contiguous()
        outside = length = 0.0
        for rows in features.split(ROWS):
            centred = rows.double() - self.origin_
            outside += float(lengths(centred @ self.residual_).sum())
            length += float(lengths(centred).sum())
        if outside <= 1e-9 * length:
            raise InputError(
                f"{len(features)} training example(s) lie wholly inside a principal space of {kept} "
                "dimensions: fit on more data, or pass fewer dimensions"
            )
        largest = float(training.logits.amax(1).sum(dtype=torch.float64))
        self.alpha_ = torch.tensor(largest / outside, dtype=torch.float64)

    def score(self, observation: Observation) -> Tensor:
        """The virtual logit minus the logarithm of the summed exponentials of the other logits."""
        origin, residual, alpha = (
            self.on(observation.logits.device, name) for name in ("origin_", "residual_", "alpha_")
        )
        virtual = alpha * lengths((features_of(observation, self.name).double() - origin) @ residual)
        return virtual + energy(observation.logits)


def default_dimensions(width: int) -> int:
    """The dimensions of the principal space for features of a width."""
    if width >= 2048:
        return 1000
    return 512 if width >= 768 else width // 2
