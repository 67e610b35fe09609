"""NCI: the proximity of the feature to the weights of the predicted class, plus its norm."""

from typing import Any

from torch import Tensor, nn

from gramwatch.methods.base import Record
from gramwatch.methods.features import TINY, MeanMethod, features_of, head_of, lengths
from gramwatch.observe.observation import Observation


class NCI(MeanMethod):
    """The proximity to the weights of the predicted class, plus the norm (Liu & Qin, 2025: pScore, filtered).

    Args:
        model: any classifier that returns logits.
        alpha: the weight of the norm. The authors' configuration in OpenOOD starts from 0.0001, and chooses
            among 0.0001, 0.001, 0.01 and 0.1 on outliers.
        options: the arguments of every `Method`.

    """

    name = "nci"
    record = Record(
        title="NCI",
        paper="Liu & Qin: Detecting Out-of-Distribution through the Lens of Neural Collapse. CVPR 2025",
        equation="-(w_y . (h - mean) / ||h - mean|| + alpha ||h||_1)",
        fitted=True,
        cost="a few operations for each feature",
        limits="Needs a network trained long enough for features to gather at the weights. alpha depends on "
        "how many features there are and how large.",
    )
    settings = ("alpha",)

    def __init__(self, model: nn.Module, *, alpha: float = 0.0001, **options: Any) -> None:
        super().__init__(model, **options)
        if not alpha >= 0:
            raise ValueError(f"alpha must not be negative, got {alpha}")
        self.alpha = float(alpha)

    def score(self, observation: Observation) -> Tensor:
        """Minus the proximity and the norm."""
        features = features_of(observation, self.name).double()
        weight = head_of(observation, self.name).weight.to(features.device)[observation.predicted].double()
        centred = features - self.on(features.device, "mean_")
        proximity = (weight * centred).sum(1) / lengths(centred).clamp_min(TINY)
        return -(proximity + self.alpha * features.abs().sum(1))
