"""Dirichlet Prior Network: the spread of the predicted distribution over class probabilities."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from gramwatch.files import artifact
from gramwatch.methods.base import Method, Record
from gramwatch.observe.observation import Observation
from gramwatch.watch import Network
from gramwatch_lab.methods.dirichlet import concentrations, differential_entropy, mutual_information

UNCERTAINTIES = ("differential_entropy", "mutual_information", "max_probability")
MOST = 1e8
"""Larger concentrations count as this one: the entropy would be rounding error."""


class PriorNetworkScore(Method):
    """The uncertainty of a network that predicts a Dirichlet distribution (Malinin & Gales, 2018, section 4).

    The training is `gramwatch_lab.training.PriorNetwork`.

    Args:
        model: a network trained as a Prior Network.
        uncertainty: `"differential_entropy"` of the Dirichlet distribution, `"mutual_information"` of label
            and probabilities, or minus the `"max_probability"`. The paper reports all three. The first
            two measure the spread of the distribution, the last does not.
        options: the arguments of every `Method`.

    """

    name = "prior_network"
    record = Record(
        title="Prior Network",
        paper="Malinin & Gales: Predictive Uncertainty Estimation via Prior Networks. NeurIPS 2018",
        equation="entropy of Dir(alpha), alpha = exp(z); or mutual information, or -max_c alpha_c / alpha_0",
        fitted=False,
        outliers=True,
        retraining=True,
        cost="a few operations for each logit",
        limits="The network has to be trained with outliers, and is best at what is like them.",
    )
    settings = ("uncertainty",)

    def __init__(
        self, model: nn.Module, *, uncertainty: str = "differential_entropy", **options: Any
    ) -> None:
        super().__init__(model, **options)
        if uncertainty not in UNCERTAINTIES:
            raise ValueError(f"uncertainty must be one of {', '.join(UNCERTAINTIES)}; got {uncertainty!r}")
        self.uncertainty = uncertainty

    @classmethod
    def described(
        cls, header: Mapping[str, Any], model: nn.Module | Network
    ) -> "tuple[PriorNetworkScore, artifact.Shapes]":
        """The detector without its tensors. Earlier files call the uncertainty `measure`."""
        settings = header["settings"]
        if isinstance(settings, dict) and "measure" in settings:
            settings = {"uncertainty" if name == "measure" else name: v for name, v in settings.items()}
        return super().described({**header, "settings": settings}, model)

    def score(self, observation: Observation) -> Tensor:
        """The chosen uncertainty."""
        logits = observation.logits.double()
        if self.uncertainty == "max_probability":
            return -logits.softmax(1).amax(1)
        alpha = concentrations(logits, MOST)
        return (
            differential_entropy(alpha) if self.uncertainty == UNCERTAINTIES[0] else mutual_information(alpha)
        )
