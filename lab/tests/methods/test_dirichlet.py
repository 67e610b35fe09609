"""Functions of Dirichlet distributions, against those of torch."""

import math

import torch
from torch.distributions import Categorical, Dirichlet, kl_divergence

from gramwatch_lab.methods import dirichlet

ALPHA, BETA = (
    torch.rand(7, 4, generator=torch.Generator().manual_seed(s)).double() * 20 + 0.1 for s in (1, 2)
)


def test_functions_of_dirichlet_distributions_equal_those_of_torch():
    assert torch.allclose(
        dirichlet.kl_divergence(ALPHA, BETA), kl_divergence(Dirichlet(ALPHA), Dirichlet(BETA))
    )
    assert torch.allclose(dirichlet.differential_entropy(ALPHA), Dirichlet(ALPHA).entropy())
    flat = torch.ones(1, 4).double()
    assert torch.allclose(dirichlet.differential_entropy(flat), torch.tensor([-math.log(6)]).double())
    torch.manual_seed(0)
    p = Dirichlet(ALPHA).sample((40_000,))
    expected = Categorical(ALPHA / ALPHA.sum(1, keepdim=True)).entropy() - Categorical(p).entropy().mean(0)
    assert torch.allclose(dirichlet.mutual_information(ALPHA), expected, atol=4e-3)
    assert torch.allclose(
        dirichlet.expected_log_probability(ALPHA, torch.full((7,), 2)), p.log().mean(0)[:, 2], atol=3e-2
    )
