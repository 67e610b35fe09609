"""Energy: the logarithm of the summed exponentials of the logits."""

from typing import Any

from torch import Tensor, nn

from gramwatch.methods.base import Method, Record
from gramwatch.observe.observation import Observation


class Energy(Method):
    """The free energy of the logits (Liu et al., 2020, Eq. 4).

    Args:
        model: any classifier that returns logits.
        temperature: `T`. The paper recommends 1.
        options: the arguments of every `Method`.

    """

    name = "energy"
    record = Record(
        title="energy",
        paper="Liu, Wang, Owens & Li: Energy-based Out-of-distribution Detection. NeurIPS 2020",
        equation="-T log sum_c exp(z_c / T)",
        fitted=False,
        limits="Large logits in general count as in-distribution, whatever the features look like.",
    )
    settings = ("temperature",)
    sees = "the logits"
    why_no_parts = "it is computed from all logits together, and has no parts"

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, **options: Any) -> None:
        super().__init__(model, **options)
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature = float(temperature)

    def score(self, observation: Observation) -> Tensor:
        """The energy; Eq. 4."""
        return energy(observation.logits, self.temperature)


def energy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """`-T log sum_c exp(z_c / T)`."""
    scaled = logits.double() / temperature
    # On a GPU, log_softmax is one operation and logsumexp is ten.
    return temperature * (scaled.log_softmax(1).amax(1) - scaled.amax(1))
