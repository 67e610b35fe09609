"""fDBD: the distance to the decision boundaries over the distance to the mean training feature."""

from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.errors import InputError
from gramwatch.methods.base import Record
from gramwatch.methods.features import TINY, MeanMethod, features_of, head_of, lengths
from gramwatch.observe.observation import Head, Observation


class FDBD(MeanMethod):
    """The mean distance to the decision boundaries, regularised (Liu & Qin, 2024, Eq. 8: regDistDB).

    Two classes with the same weights have no boundary between them. Such pairs are left out.

    Args:
        model: any classifier that returns logits.
        options: the arguments of every `Method`.

    """

    name = "fdbd"
    record = Record(
        title="fDBD",
        paper="Liu & Qin: Fast Decision Boundary based Out-of-Distribution Detector. ICML 2024",
        equation="-mean over c != y of |z_y - z_c| / ||w_y - w_c||, divided by ||h - mean||",
        fitted=True,
        cost="a few operations for each logit and feature; a classes x classes matrix in memory",
        limits="Sees only the part of the features that moves the logits.",
    )

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._head: Head | None = None
        self._kept = torch.empty(0)

    def take(self, observation: Observation) -> Tensor | int:
        """Take in one batch. This never waits for a GPU."""
        if observation.logits.shape[1] < 2:
            raise InputError(f"{self.name} needs decision boundaries: one class has none")
        return super().take(observation)

    def score(self, observation: Observation) -> Tensor:
        """Minus the regularised mean distance."""
        logits, predicted = observation.logits.double(), observation.predicted
        shares = self._shares(head_of(observation, self.name), logits.device)[predicted]
        mean = ((logits.amax(1, keepdim=True) - logits) * shares).sum(1)
        away = lengths(features_of(observation, self.name).double() - self.on(logits.device, "mean_"))
        return -mean / away.clamp_min(TINY)

    def _shares(self, head: Head, device: torch.device) -> Tensor:
        """`1 / ||w_a - w_b||` of every pair of classes, divided by the number of boundaries of class a.

        The matrix is kept until the head changes. It is zero for a class with itself, and for two classes
        of the same weights: there is no boundary between them.
        """
        if head is not self._head or self._kept.device != device:
            weight = head.weight.to(device).double()
            apart = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
            there = apart > 0
            inverse = torch.where(there, 1 / torch.where(there, apart, 1.0), 0.0)
            self._kept = inverse / there.sum(1, keepdim=True).clamp_min(1)
            self._head = head
        return self._kept
