"""What methods share that take gradients: the observation, the context, the network that stays as it is."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gramwatch.errors import InputError
from gramwatch.methods import ODIN, fgsm
from gramwatch.observe.needs import Needs
from gramwatch.observe.plan import Plan
from gramwatch.watch import Network
from tests.methods.tapped import TAPS, Net, images, made, mahalanobis


@pytest.fixture
def net() -> Net:
    return made()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_observation_that_can_be_differentiated(net: Net, context: Any) -> None:
    plan = Plan.of(Network.of(net), [Needs(features=True, means=tuple(TAPS))], images(4))
    (plain,), test = plan(images(4)), images(4).requires_grad_()
    with context():
        (seen,) = plan.differentiable(test)
    assert seen.features is not None
    assert plain.features is not None
    for ours, theirs in zip(
        (seen.logits, seen.features, *seen.channel_means),
        (plain.logits, plain.features, *plain.channel_means),
        strict=True,
    ):
        assert torch.equal(ours.detach(), theirs)
        (found,) = torch.autograd.grad(ours.sum(), test, retain_graph=True)
        assert found.abs().sum() > 0
    assert not any(t.requires_grad for t in (plain.logits, plain.features, *plain.channel_means))


# --- ODIN ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("method", ["odin", "mahalanobis", "fgsm"])
def test_gradients_whatever_the_context(net: Net, context: Any, method: str) -> None:
    def made(x: Tensor) -> Tensor:
        if method == "fgsm":
            return fgsm(net, x)
        detector = ODIN(net, eps=0.02) if method == "odin" else mahalanobis(net, eps=0.02)
        return detector.score_inputs(x)[1]

    expected = made(images(5))
    outside = images(5)
    with context():
        assert torch.equal(made(images(5)), expected)
        assert torch.equal(made(outside), expected)


@pytest.mark.parametrize("method", ["odin", "mahalanobis", "fgsm"])
def test_nothing_of_the_model_changes(method: str) -> None:
    net = Net().train()
    net.norm.eval()
    net.second.weight.requires_grad_(False)
    net.fc.bias.grad = torch.full_like(net.fc.bias, 7.0)
    before = {name: t.detach().clone() for name, t in net.state_dict().items()}
    test = images(4)
    given = test.clone()
    if method == "fgsm":
        fgsm(net, test)
    else:
        detector = ODIN(net) if method == "odin" else mahalanobis(net, eps=0.01)
        detector.score_inputs(test)
        detector.calibrate([images(30)], progress=False)(test)
    assert net.training
    assert net.fc.training
    assert not net.norm.training
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == ["second.weight"]
    assert [n for n, p in net.named_parameters() if p.grad is not None] == ["fc.bias"]
    assert (net.fc.bias.grad == 7).all()
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())
    assert torch.equal(test, given)
    assert not test.requires_grad
    assert test.grad is None


class InPlace(nn.Module):
    """A network that writes into its input, as some that normalise do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.sub_(0.5))


def test_a_network_that_writes_into_its_input(net: Net) -> None:
    test = images(3)
    expected = ODIN(net).score_inputs(test - 0.5)[1]
    given = test.clone()
    assert torch.allclose(ODIN(InPlace(net)).score_inputs(test)[1], expected, atol=1e-7)
    assert torch.equal(test, given)


class Cut(nn.Module):
    """A network through which no gradient passes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.detach())


def test_a_network_without_gradients(net: Net) -> None:
    with pytest.raises(InputError, match="cannot be differentiated"):
        ODIN(Cut(net)).score_inputs(images(2))
    frozen = Cut(net).requires_grad_(False)
    with pytest.raises(InputError, match="cannot be differentiated"):
        fgsm(frozen, images(2))
