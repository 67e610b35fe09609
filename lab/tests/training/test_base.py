"""The loss of each objective, against its closed form."""

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Dirichlet, kl_divergence

from gramwatch_lab.training import objective_of
from lab.tests.training.small import LABELS, LOGITS, STRANGE, loss_of


def test_cross_entropy_equals_the_closed_form():
    expected = -LOGITS.double().log_softmax(1)[range(6), LABELS].mean()
    assert torch.allclose(loss_of(objective_of("cross_entropy")), expected, rtol=1e-6)


def test_outlier_exposure_equals_the_closed_form():
    uniform = torch.full_like(STRANGE, 0.25).double()
    inside = -LOGITS.double().log_softmax(1)[range(6), LABELS].mean()
    outside = (
        Categorical(uniform).entropy()
        + kl_divergence(Categorical(uniform), Categorical(logits=STRANGE.double()))
    ).mean()
    for weight in (0.5, 2.0):
        result = loss_of(objective_of("outlier_exposure", {"weight": weight}))
        assert torch.allclose(result, inside + weight * outside, rtol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_prior_network_s_loss_equals_the_closed_form(reverse):
    target = torch.full((6, 4), 0.5).double()
    target[range(6), LABELS] = 48.5  # 50 * (1 - 3 * 0.01)
    pairs = [(target, LOGITS), (torch.ones(12, 4).double(), STRANGE)]
    parts = []
    for wanted, logits in pairs:
        both = Dirichlet(wanted), Dirichlet(logits.double().exp())
        parts.append(kl_divergence(*(reversed(both) if reverse else both)).mean())
    settings = {"precision": 50.0, "smoothing": 0.01, "weight": 0.3, "reverse": reverse}
    expected = (parts[0] + 0.3 * parts[1]) / (50 if reverse else 1)
    assert torch.allclose(loss_of(objective_of("prior_network", settings)), expected, rtol=1e-5)


@pytest.mark.parametrize("prior", ["wrong_classes", "all"])
def test_the_variational_loss_equals_the_closed_form(prior):
    alpha = LOGITS.double().exp()
    fit = alpha[range(6), LABELS].digamma() - alpha.sum(1).digamma()
    drawn = alpha.clone()
    if prior == "wrong_classes":
        drawn[range(6), LABELS] = 1
    divergence = kl_divergence(Dirichlet(drawn), Dirichlet(torch.ones(6, 4).double()))
    result = loss_of(objective_of("variational_dirichlet", {"eta": 0.2, "prior": prior}))
    assert torch.allclose(result, (0.2 * divergence - fit).mean(), rtol=1e-5)


def test_losses_and_gradients_stay_finite_far_out():
    for name in ("prior_network", "variational_dirichlet", "outlier_exposure"):
        for settings in ({}, {"reverse": True}) if name == "prior_network" else ({},):
            logits = torch.tensor([[200.0, -200.0, 0.0, 5.0]] * 6, requires_grad=True)
            loss, _ = objective_of(name, settings).loss(nn.Identity(), logits, LABELS, STRANGE)
            loss.backward()
            assert loss.isfinite(), name
            assert logits.grad.isfinite().all(), name
