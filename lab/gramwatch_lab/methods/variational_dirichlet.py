"""Variational Dirichlet: the entropy of a posterior over class probabilities, after a step."""

from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.inputs.batches import Inputs
from gramwatch.methods.base import Record
from gramwatch.methods.perturb import Scale, StepMethod, gradient
from gramwatch.observe.observation import Observation
from gramwatch_lab.methods.dirichlet import concentrations, differential_entropy, expected_log_probability

MOST = 1000.0
"""The largest concentration, in training and in judging, as in the code released with the paper."""


class VariationalDirichletScore(StepMethod):
    """The entropy of the Dirichlet posterior that a network predicts (Chen, Shen, Jin & Wang, 2018).

    The training is `gramwatch_lab.training.VariationalDirichlet`. As in the paper, `log(1 + alpha)` smooths
    the concentrations, so that a few very large ones do not hide the rest, and a step makes the predicted
    class of the inputs likelier. The paper chooses the step on validation data. The default is the step of
    the released code, in units of the network's own inputs. A later version of the paper (2019) also trains
    against adversarial examples. This class does not.

    Args:
        model: a network trained for this score.
        eps: the size of the step. With zero no gradient is needed.
        scale: the divisor of the step, as for `ODIN`.
        smooth: whether to smooth the concentrations.
        options: the arguments of every `Method`.

    """

    name = "variational_dirichlet"
    record = Record(
        title="Variational Dirichlet",
        paper="Chen, Shen, Jin & Wang: A Variational Dirichlet Framework for Out-of-Distribution Detection. "
        "arXiv 1811.07308, 2018",
        equation="entropy of Dir(log(1 + alpha)), alpha = exp(f(x')), "
        "x' = x + eps sign(grad_x (psi(alpha_y) - psi(alpha_0))), y predicted",
        fitted=False,
        gradients=True,
        retraining=True,
        cost="one backward and one more forward pass",
        limits="The network has to be trained for it. Far from the training data concentrations may grow "
        "again. Inputs must be continuous.",
    )
    settings = ("eps", "scale", "smooth")

    def __init__(
        self,
        model: nn.Module,
        *,
        eps: float = 0.005,
        scale: Scale = None,
        smooth: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(model, eps=eps, scale=scale, **options)
        self.smooth = bool(smooth)

    def score(self, observation: Observation) -> Tensor:
        """The entropy. The observation shows inputs after the step."""
        alpha = concentrations(observation.logits.double(), MOST)
        return differential_entropy(alpha.log1p() if self.smooth else alpha)

    def score_inputs(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The logits of a batch, and its scores after the step."""
        if not self.gradients:
            return super().score_inputs(inputs)
        images, leaf, seen = self.observed_leaf(inputs)
        with torch.inference_mode(False), torch.enable_grad():
            alpha = concentrations(seen.logits.double(), MOST)
            value = expected_log_probability(alpha, seen.predicted)
        towards = gradient(value, leaf, self.name)
        with torch.inference_mode():
            moved = self.moved(images, towards, self.eps)
            return seen.logits.detach(), self._infinite_where_broken(self.score(moved), moved.finite)
