"""MSP: the maximum softmax probability, the common baseline."""

from torch import Tensor

from gramwatch.methods.base import Method, Record
from gramwatch.observe.observation import Observation


class MSP(Method):
    """The probability of the predicted class (Hendrycks & Gimpel, 2017, section 2)."""

    name = "msp"
    record = Record(
        title="MSP",
        paper="Hendrycks & Gimpel: A Baseline for Detecting Misclassified and Out-of-Distribution Examples "
        "in Neural Networks. ICLR 2017",
        equation="-max_c softmax(z)_c",
        fitted=False,
        limits="Networks are often sure of what they have never seen.",
    )

    def score(self, observation: Observation) -> Tensor:
        """Minus the largest softmax probability."""
        return -observation.logits.double().softmax(1).amax(1)
