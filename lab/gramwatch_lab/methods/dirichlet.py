"""Dirichlet distributions over class probabilities, for the networks that predict one.

The concentrations are `alpha = exp(z)` of the logits `z`. The expected probabilities are `alpha_c / alpha_0`,
with `alpha_0 = sum_c alpha_c`. They equal the softmax of the logits, as for any other network.
"""

import math

from torch import Tensor


def concentrations(logits: Tensor, most: float) -> Tensor:
    """`exp(z)`, at most `most`. It is never zero: the functions below would be infinite there."""
    return logits.clamp(max=math.log(most)).exp() + 1e-8


def kl_divergence(alpha: Tensor, beta: Tensor) -> Tensor:
    """KL(Dir(alpha) || Dir(beta)) of each row, `(N,)`."""
    alpha_0, beta_0 = alpha.sum(1), beta.sum(1)
    expected_log = alpha.digamma() - alpha_0.digamma()[:, None]
    return (
        alpha_0.lgamma()
        - alpha.lgamma().sum(1)
        - beta_0.lgamma()
        + beta.lgamma().sum(1)
        + ((alpha - beta) * expected_log).sum(1)
    )


def expected_log_probability(alpha: Tensor, classes: Tensor) -> Tensor:
    """E[log p_y] under Dir(alpha), `psi(alpha_y) - psi(alpha_0)`, `(N,)`."""
    return alpha.gather(1, classes[:, None]).squeeze(1).digamma() - alpha.sum(1).digamma()


def differential_entropy(alpha: Tensor) -> Tensor:
    """The entropy of Dir(alpha) of each row, `(N,)`. It is highest, and still negative, if Dir is flat."""
    alpha_0 = alpha.sum(1)
    return (
        alpha.lgamma().sum(1)
        - alpha_0.lgamma()
        + (alpha_0 - alpha.shape[1]) * alpha_0.digamma()
        - ((alpha - 1) * alpha.digamma()).sum(1)
    )


def mutual_information(alpha: Tensor) -> Tensor:
    """The mutual information of label and probabilities, `(N,)`.

    It is the entropy of the expected probabilities minus the expected entropy.
    """
    alpha_0 = alpha.sum(1, keepdim=True)
    p = alpha / alpha_0
    return (p * ((alpha + 1).digamma() - (alpha_0 + 1).digamma() - p.log())).sum(1)
