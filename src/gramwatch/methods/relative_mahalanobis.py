"""Relative Mahalanobis: the distance to the nearest class minus the distance to all training data."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch.errors import InputError, warn
from gramwatch.files.artifact import FINITE, Field
from gramwatch.methods.base import Method, Record
from gramwatch.methods.features import ROWS, features_of, second_moment
from gramwatch.observe.observation import Observation

SINGULAR = 1e-10
"""A covariance whose smallest eigenvalue is below this share of the largest counts as singular."""


class RelativeMahalanobis(Method):
    """The distance to the nearest class minus the distance to all training data (Ren et al., 2021, sec. 2).

    Classes are the labels. If the loader has none, they are the predicted classes. A class without examples
    is left out.

    Args:
        model: any classifier that returns logits.
        shrinkage: the share of the identity, at the same mean variance, in both covariances. It is mixed in
            only if one of them is singular.
        options: the arguments of every `Method`.

    """

    name = "relative_mahalanobis"
    record = Record(
        title="relative Mahalanobis",
        paper="Ren, Fort, Liu, Guha Roy, Padhy & Lakshminarayanan: A Simple Fix to Mahalanobis Distance for "
        "Improving Near-OOD Detection. 2021",
        equation="min_c (h - m_c)^T S^-1 (h - m_c) - (h - m)^T S_0^-1 (h - m)",
        fitted=True,
        cost="two products with a D x D matrix, one with the means of the classes",
        limits="Takes each class for a Gaussian, all of one shape. Weak far from all training data, where "
        "both distances are large.",
    )
    looks_at = frozenset({"features"})
    settings = ("shrinkage",)
    kept: ClassVar = {
        "mean_": Field(("width",), torch.float64, FINITE),
        "centres_": Field(("classes", "width"), torch.float64, FINITE),
        "whitening_": Field(("width", "width"), torch.float64, FINITE),
        "background_whitening_": Field(("width", "width"), torch.float64, FINITE),
    }
    mean_: Tensor | None
    centres_: Tensor | None
    """The class means, relative to the mean, whitened."""
    whitening_: Tensor | None
    background_whitening_: Tensor | None

    def __init__(self, model: nn.Module, *, shrinkage: float = 1e-3, **options: Any) -> None:
        super().__init__(model, **options)
        if not 0 < shrinkage <= 1:
            raise ValueError(f"shrinkage must lie between 0 and 1, got {shrinkage}")
        self.shrinkage = float(shrinkage)

    def _fit(self, training: Observation) -> None:
        features = features_of(training, self.name)
        mean = features.mean(0, dtype=torch.float64)
        classes, which = training.classes.long().unique(return_inverse=True)
        sums = torch.zeros(len(classes), features.shape[1], dtype=torch.float64, device=features.device)
        for rows, row_classes in zip(features.split(ROWS), which.split(ROWS), strict=True):
            sums.index_add_(0, row_classes, rows.double())
        centres = sums / which.bincount(minlength=len(classes)).unsqueeze(1)
        self.mean_ = mean
        tied = torch.linalg.eigh(second_moment(features, centres, which))
        whole = torch.linalg.eigh(second_moment(features, mean))
        if not float(tied.eigenvalues[-1]) > SINGULAR * float(whole.eigenvalues[-1]):
            raise InputError(
                f"{len(features)} training example(s) of {len(classes)} class(es) do not vary within any "
                f"class: {self.name} needs at least two that differ"
            )
        singular = any(float(e[0]) <= SINGULAR * float(e[-1]) for e in (tied.eigenvalues, whole.eigenvalues))
        if singular:
            warn(
                f"the covariance of {features.shape[1]} features over {len(features)} training example(s) is "
                f"singular: it was shrunk towards the identity by {self.shrinkage}"
            )
        share = self.shrinkage if singular else 0.0
        self.whitening_ = _whitening(tied.eigenvalues, tied.eigenvectors, share)
        self.centres_ = (centres - mean) @ self.whitening_
        self.background_whitening_ = _whitening(whole.eigenvalues, whole.eigenvectors, share)

    def score(self, observation: Observation) -> Tensor:
        """The squared distance to the nearest class minus the squared distance to all training data."""
        mean, centres, whitening, background_whitening = (
            self.on(observation.logits.device, name)
            for name in ("mean_", "centres_", "whitening_", "background_whitening_")
        )
        centred = features_of(observation, self.name).double() - mean
        x = centred @ whitening
        # ||x - m||^2 without ||x||^2, which is the same for all classes.
        nearest = (centres.square().sum(1) - 2 * (x @ centres.T)).amin(1)
        background = (centred @ background_whitening).square().sum(1)
        return x.square().sum(1) + nearest - background


def _whitening(eigenvalues: Tensor, eigenvectors: Tensor, shrinkage: float) -> Tensor:
    """A matrix A with `A A^T` the inverse of the covariance after mixing in the identity."""
    eigenvalues = eigenvalues.clamp_min(0)
    mixed = (1 - shrinkage) * eigenvalues + shrinkage * eigenvalues.mean()
    return (
        eigenvectors / mixed.sqrt()
    ).contiguous()  # dense, as after loading: scores are then equal to the last bit
