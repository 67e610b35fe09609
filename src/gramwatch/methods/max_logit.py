"""Max logit: the largest logit, before any softmax."""

from torch import Tensor

from gramwatch.methods.base import Method, Record
from gramwatch.observe.observation import Observation


class MaxLogit(Method):
    """The largest logit (Hendrycks et al., 2022, section 3)."""

    name = "max_logit"
    record = Record(
        title="max logit",
        paper="Hendrycks et al.: Scaling Out-of-Distribution Detection for Real-World Settings. ICML 2022",
        equation="-max_c z_c",
        fitted=False,
        limits="As energy, of which it is the limit for small temperatures.",
    )

    def score(self, observation: Observation) -> Tensor:
        """Minus the largest logit."""
        return -observation.logits.double().amax(1)
