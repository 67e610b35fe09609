"""Variational Dirichlet: a Dirichlet posterior over class probabilities, from images alone.

Chen, Shen, Jin & Wang, "A Variational Dirichlet Framework for Out-of-Distribution Detection" (arXiv
1811.07308): the evidence lower bound of the label, with posterior Dir(alpha), `alpha = exp(z)`, and a
uniform prior:

    L = -(psi(alpha_y) - psi(alpha_0)) + eta * KL(Dir(alpha') || Dir(1))

with the weight eta. The details follow a public copy of the code released with the paper: eta is 0.01,
concentrations are at most 1000, and gradients are clipped to norm 1. In `alpha'`, the label's own
concentration is replaced by 1, so that only evidence for wrong classes is drawn to the prior. We could not
check whether the text of the paper has `alpha'` too. With `prior="all"`, it is alpha itself: the plain bound.

Two parts are left out. By default that code uses `-log(alpha_y / alpha_0)` as the first term. A later version
of the paper also trains against adversarial examples.
"""

from dataclasses import dataclass

from torch import Tensor

from gramwatch.errors import TrainingError
from gramwatch_lab.methods.dirichlet import concentrations, expected_log_probability, kl_divergence
from gramwatch_lab.methods.variational_dirichlet import MOST, VariationalDirichletScore
from gramwatch_lab.training.base import Network, Objective

PRIORS = ("wrong_classes", "all")


@dataclass(frozen=True)
class VariationalDirichlet(Objective):
    """Train a network to predict a posterior with the evidence for each class.

    Args:
        eta: the weight of the divergence from the prior.
        prior: which concentrations are drawn to the prior: `"wrong_classes"` or `"all"`.

    """

    eta: float = 0.01
    prior: str = "wrong_classes"

    name = "variational_dirichlet"
    detector = VariationalDirichletScore
    gradient_norm = 1.0

    def __post_init__(self) -> None:
        if not self.eta >= 0:
            raise TrainingError(f"variational_dirichlet: eta must be zero or positive, got {self.eta}")
        if self.prior not in PRIORS:
            raise TrainingError(
                f"variational_dirichlet: prior must be one of {', '.join(PRIORS)}; got {self.prior!r}"
            )

    def loss(
        self, network: Network, images: Tensor, labels: Tensor, outliers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Minus the evidence lower bound."""
        logits = network(images).float()
        alpha = concentrations(logits, MOST)
        drawn = alpha if self.prior == "all" else alpha.scatter(1, labels[:, None], 1.0)
        divergence = kl_divergence(drawn, drawn.detach().new_ones(drawn.shape))
        return (self.eta * divergence - expected_log_probability(alpha, labels)).mean(), logits
