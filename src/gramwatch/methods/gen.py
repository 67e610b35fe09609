"""GEN: the generalised entropy of the largest probabilities."""

from typing import Any

from torch import Tensor, nn

from gramwatch.methods.base import Method, Record
from gramwatch.observe.observation import Observation


class GEN(Method):
    """The generalised entropy of the largest probabilities (Liu, Lochman & Zach, 2023, Eq. 5 and 6).

    Args:
        model: any classifier that returns logits.
        gamma: the exponent. A small exponent weighs probabilities near zero more. The paper uses 0.1.
        largest: M, the number of largest probabilities that count. The paper uses 100, or a tenth of the
            classes on ImageNet. With fewer classes, all count.
        options: the arguments of every `Method`.

    """

    name = "gen"
    record = Record(
        title="GEN",
        paper="Liu, Lochman & Zach: GEN: Pushing the Limits of Softmax-Based Out-of-Distribution Detection. "
        "CVPR 2023",
        equation="sum over the M largest p of p^gamma (1 - p)^gamma",
        fitted=False,
        limits="Sees only the logits.",
    )
    settings = ("gamma", "largest")

    def __init__(self, model: nn.Module, *, gamma: float = 0.1, largest: int = 100, **options: Any) -> None:
        super().__init__(model, **options)
        if not 0 < gamma < 1:
            raise ValueError(f"gamma must lie between 0 and 1, got {gamma}")
        if largest < 1:
            raise ValueError(f"largest must be at least 1, got {largest}")
        self.gamma, self.largest = float(gamma), largest

    def score(self, observation: Observation) -> Tensor:
        """The entropy: Eq. 6 with the opposite sign."""
        probability = observation.logits.double().softmax(1)
        p = probability.topk(min(self.largest, probability.shape[1])).values
        return (p**self.gamma * (1 - p).clamp_min(0) ** self.gamma).sum(1)
