"""CADRef: the deviation from the mean feature of the predicted class, split by what it does to the logit."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gramwatch.errors import warn
from gramwatch.files.artifact import FINITE, NOT_NEGATIVE, Field
from gramwatch.methods.base import Record
from gramwatch.methods.energy import energy
from gramwatch.methods.features import TINY, HeadMethod, features_of, finite_of, head_of
from gramwatch.observe.observation import Observation

LEAST = 0.01
"""A confidence below this share of its mean on training data counts as this share."""


class CADRef(HeadMethod):
    """Class-aware decoupled relative features (Ling et al., 2025), with the energy, the authors' default.

    The mean features are those of the training examples predicted to be of a class. Labels are ignored. For a
    class that was never predicted, it is the mean of all training examples.

    Args:
        model: any classifier that returns logits.
        options: the arguments of every `Method`.

    """

    name = "cadref"
    record = Record(
        title="CADRef",
        paper="Ling, Chang, Zhao, Zhao, Chow & Deng: CADRef: Robust Out-of-Distribution Detection via "
        "Class-Aware Decoupled Relative Feature Leveraging. CVPR 2025",
        equation="(||max(d, 0)||_1 / E(z) + ||min(d, 0)||_1 / mean E) / ||h||_1, d = sign(w_y) (h - m_y), "
        "E = log sum exp",
        fitted=True,
        cost="a few operations for each feature",
        limits="The confidence must be positive: where log sum exp is not positive on average over training "
        "data, it is left out.",
    )
    running = True
    kept: ClassVar = {
        "count_": Field(("classes",), torch.int64, NOT_NEGATIVE, reduce="sum"),
        "sums_": Field(("classes", "width"), torch.float64, FINITE, reduce="sum"),
        "confidence_": Field((), torch.float64, FINITE, reduce="sum"),
    }

    count_: Tensor | None
    """The number of examples of each predicted class."""
    sums_: Tensor | None
    """The sum of their features."""
    confidence_: Tensor | None
    """The confidence, summed over all examples."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._of: Tensor | None = None  # the sums that `_kept` was computed from
        self._kept = torch.empty(0), torch.empty(0)

    def take(self, observation: Observation) -> Tensor | int:
        """Take in one batch. This never waits for a GPU."""
        head_of(observation, self.name)
        features, logits = features_of(observation, self.name), observation.logits
        finite = finite_of(observation)
        classes = logits.shape[1]
        rows = torch.where(finite.unsqueeze(1), features, 0).double()
        sums = rows.new_zeros(classes, rows.shape[1]).index_add_(0, observation.predicted, rows)
        count = torch.zeros(classes, dtype=torch.int64, device=rows.device)
        count.index_add_(0, observation.predicted, finite.long())
        confidence = torch.where(finite, -energy(logits), 0).sum()
        self.add_states({"count_": count, "sums_": sums, "confidence_": confidence})
        return len(features) - finite.sum()

    def finish(self, left_out: int = 0) -> None:
        """Complete the fit. It warns if the confidence is not positive."""
        super().finish(left_out)
        assert self.count_ is not None
        assert self.confidence_ is not None
        if self.confidence_ <= 0:
            mean = float(self.confidence_ / self.count_.sum())
            warn(
                f"{self.name}: log sum exp of the logits is {mean:.3g} on average over training examples. It "
                "must be positive: the score leaves it out"
            )

    def score(self, observation: Observation) -> Tensor:
        """The two relative errors, each divided by a confidence: the input's own, and the mean."""
        logits, predicted = observation.logits, observation.predicted
        features = features_of(observation, self.name).double()
        means, mean = self._means(features.device)
        weight = head_of(observation, self.name).weight.to(features.device)[predicted].double()
        deviation = (features - means[predicted]) * weight.sign()
        size = features.abs().sum(1).clamp_min(TINY)
        own = torch.maximum(-energy(logits), LEAST * mean)
        above, below = deviation.clamp_min(0).sum(1) / size, (-deviation).clamp_min(0).sum(1) / size
        return torch.where(mean > 0, above / own + below / mean, above + below)

    def _means(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The mean feature of each class, `(classes, D)`, and the mean confidence. They are kept."""
        if self._of is not self.sums_ or self._kept[0].device != device:
            count, sums, total = (self.on(device, name) for name in ("count_", "sums_", "confidence_"))
            there, all_examples = (count > 0).unsqueeze(1), count.sum()
            means = torch.where(there, sums / count.clamp_min(1).unsqueeze(1), sums.sum(0) / all_examples)
            self._kept, self._of = (means, total / all_examples), self.sums_
        return self._kept
