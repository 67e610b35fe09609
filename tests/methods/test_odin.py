"""ODIN against its paper and pytorch-ood, tuned, saved, and with bad input."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gramwatch.errors import InputError, NotFittedError
from gramwatch.files import artifact
from gramwatch.methods import MSP, ODIN
from gramwatch.methods.mahalanobis import STEPS as LEE_STEPS
from gramwatch.methods.odin import STEPS, TEMPERATURES
from gramwatch.observe.observation import Observation
from tests.methods.tapped import Net, images, made


@pytest.fixture
def net() -> Net:
    return made()


def odin_by_hand(net: nn.Module, x: Tensor, temperature: float, eps: float, scale: Tensor | float) -> Tensor:
    """One image at a time, Eq. 1 and 2 as they stand."""
    scores = []
    for image in x:
        leaf = image[None].clone().requires_grad_()
        probability = (net(leaf) / temperature).softmax(1)
        loss = -probability.max().log()
        (found,) = torch.autograd.grad(loss, leaf)
        moved = image[None] - eps * found.sign() / scale
        scores.append(-(net(moved).double() / temperature).softmax(1).max().detach())
    return torch.stack(scores)


@pytest.mark.parametrize("temperature", [1.0, 10.0, 1000.0])
@pytest.mark.parametrize("eps", [0.0, 0.0014, 0.05])
@pytest.mark.parametrize("scale", [None, 0.5, (0.2, 0.5, 2.0)])
def test_odin_as_in_the_paper(net: Net, temperature: float, eps: float, scale: Any) -> None:
    test = images(6)
    logits, scores = ODIN(net, temperature=temperature, eps=eps, scale=scale).score_inputs(test)
    divisor = 1.0 if scale is None else torch.tensor(scale).view(-1, 1, 1) if scale != 0.5 else 0.5
    expected = odin_by_hand(net, test, temperature, eps, divisor)
    assert torch.allclose(scores, expected, rtol=1e-6, atol=0)
    assert torch.allclose(logits, net(test).detach(), atol=1e-6)
    assert not logits.requires_grad
    assert not scores.requires_grad


def test_odin_as_in_pytorch_ood(net: Net) -> None:
    others = pytest.importorskip("pytorch_ood.detector")
    test = images(12)
    for temperature, eps, std in [(1.0, 0.01, None), (1000.0, 0.0014, None), (10.0, 0.002, [0.2, 0.3, 0.4])]:
        theirs = others.ODIN(net, eps=eps, temperature=temperature, norm_std=std).predict(test)
        ours = ODIN(net, eps=eps, temperature=temperature, scale=std).score_inputs(test)[1]
        assert torch.allclose(ours.float(), theirs, atol=1e-6)


def test_odin_without_step_and_temperature_is_msp(net: Net) -> None:
    test = images(7)
    plain = ODIN(net, temperature=1, eps=0)
    assert torch.allclose(plain.score_inputs(test)[1], MSP(net).score_inputs(test)[1], atol=1e-12)
    assert not plain.gradients
    assert torch.equal(plain.judged(plain.observe(test)), plain.score_inputs(test)[1])


def test_odin_makes_the_network_surer(net: Net) -> None:
    test = images(20)
    before = ODIN(net, temperature=1, eps=0).score_inputs(test)[1]
    after = ODIN(net, temperature=1, eps=0.01).score_inputs(test)[1]
    assert (after < before).all()


def test_odin_broken_inputs_score_infinity(net: Net) -> None:
    broken = images(4)
    broken[1], broken[2, 0, 0, 0] = math.nan, math.inf
    scores = ODIN(net).score_inputs(broken)[1]
    assert scores.isinf().tolist() == [False, True, True, False]
    good = ODIN(net).score_inputs(images(4))[1]
    assert torch.allclose(scores[[0, 3]], good[[0, 3]], atol=1e-9)


def test_odin_saved_and_loaded(net: Net, tmp_path: Path) -> None:
    odin = ODIN(net, temperature=10, eps=0.01, scale=(0.2, 0.3, 0.4))
    odin.calibrate([images(40)], progress=False)
    odin.save(tmp_path / "odin.safetensors")
    again = ODIN.from_artifact(artifact.read(tmp_path / "odin.safetensors"), net)
    assert isinstance(again, ODIN)
    assert (again.temperature, again.eps, again.scale) == (10, 0.01, [0.2, 0.3, 0.4])
    assert not again.tuned_on_outliers
    assert torch.equal(again.score_inputs(images(5))[1], odin.score_inputs(images(5))[1])
    found = again(images(5))
    assert torch.equal(found.is_ood, odin(images(5)).is_ood)


class Linear(nn.Module):
    """Logits that are the image itself: all that ODIN does can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv1d(1, 1, 1, bias=False), nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.conv.weight)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x[:, None]).squeeze(1))


def test_odin_on_numbers_that_one_can_check() -> None:
    score = ODIN(Linear(), temperature=2, eps=0.5).score_inputs(torch.tensor([[3.0, 1.0]]))[1]
    # The first logit grows by eps, the second falls: 3.5 and 0.5, over 2.
    assert float(score) == pytest.approx(-1 / (1 + math.exp(-1.5)))


def test_odin_tune_finds_what_separates() -> None:
    """Logits that differ only in size: at a low temperature all are sure, at a high one not."""
    net = Linear()
    inside = torch.tensor([[200.0 + i, 0.0] for i in range(40)])
    outside = torch.tensor([[100.0 + i, 0.0] for i in range(40)])
    odin = ODIN(net, temperature=1, eps=0)
    odin.calibrate([inside], progress=False)
    odin.tune([inside], [outside], temperatures=[1.0, 100.0], steps=[0.0, 0.01], progress=False)
    assert odin.temperature == 100
    assert odin.tuned_on_outliers
    assert odin.score_inputs(inside)[1].max() < odin.score_inputs(outside)[1].min()
    with pytest.raises(NotFittedError, match="not calibrated"):
        odin(inside)


def test_odin_tune_scores_as_judging_does(net: Net, tmp_path: Path) -> None:
    test = images(8)
    temperatures, steps = [1.0, 1000.0], [0.0, 0.001, 0.004]
    _, grid = ODIN(net)._scores_on(test, temperatures, steps)
    for t, temperature in enumerate(temperatures):
        for e, eps in enumerate(steps):
            alone = ODIN(net, temperature=temperature, eps=eps).score_inputs(test)[1]
            assert torch.allclose(grid[:, t, e], alone, rtol=1e-9, atol=0)
    odin = ODIN(net).tune(images(24).split(9), images(24, 2).split(9), steps=[0.002], progress=False)
    assert odin.eps == 0.002
    odin.save(tmp_path / "odin.safetensors")
    again = ODIN.from_artifact(artifact.read(tmp_path / "odin.safetensors"), net)
    assert again.tuned_on_outliers
    assert torch.equal(again.score_inputs(test)[1], odin.score_inputs(test)[1])


def test_odin_tuned_on_scores_that_were_taken_before(net: Net) -> None:
    grid = {"temperatures": [1.0, 1000.0], "steps": [0.0, 0.002]}
    inside, outside = images(24).split(9), images(24, 2).split(9)
    scores = ODIN(net).scores_on_grid(inside, **grid, progress=False)
    assert scores.shape == (24, 2, 2)
    by_images = ODIN(net).tune(inside, outside, **grid, progress=False)
    by_scores = ODIN(net).tune(scores, outside, **grid, progress=False)
    assert (by_scores.temperature, by_scores.eps) == (by_images.temperature, by_images.eps)
    with pytest.raises(ValueError, match=r"of 1 temperatures and 2 steps.*\(24, 2, 2\)"):
        ODIN(net).tune(scores, outside, temperatures=[1.0], steps=[0.0, 0.002], progress=False)


def test_the_papers_grids() -> None:
    assert TEMPERATURES == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    assert pytest.approx(np.linspace(0, 0.004, 21)) == list(STEPS)
    assert LEE_STEPS == (0.0, 0.01, 0.005, 0.002, 0.0014, 0.001, 0.0005)


def test_a_scale_may_be_a_tensor_or_an_array(net: Net) -> None:
    for scale in (torch.tensor([0.25, 0.5, 2.0]), np.array([0.25, 0.5, 2.0])):
        assert ODIN(net, scale=scale).scale == [0.25, 0.5, 2.0]
    assert ODIN(net, scale=np.float64(0.5)).scale == 0.5


def test_odin_errors(net: Net) -> None:
    with pytest.raises(InputError, match="one floating-point tensor, not a tuple"):
        ODIN(net).score_inputs((images(2), images(2)))
    with pytest.raises(InputError, match=r"not a torch\.int64 tensor"):
        ODIN(net).score_inputs(torch.zeros(2, 3, 6, 6, dtype=torch.long))
    with pytest.raises(InputError, match="the batch is empty"):
        ODIN(net).score_inputs(torch.zeros(0, 3, 6, 6))
    with pytest.raises(InputError, match="scale has 2 numbers"):
        ODIN(net, scale=(1.0, 1.0)).score_inputs(images(2))
    with pytest.raises(InputError, match=r"odin judges by gradients.*score_inputs"):
        ODIN(net).judged(Observation(torch.zeros(2, 3)))
    for wrong in ({"temperature": 0}, {"eps": -1}, {"eps": math.nan}, {"scale": 0}, {"scale": [1, -1, 1]}):
        with pytest.raises(ValueError, match="must be"):
            ODIN(net, **wrong)
    with pytest.raises(InputError, match="yielded no example"):
        ODIN(net).tune([], [images(2)], progress=False)
    with pytest.raises(ValueError, match="temperatures must be positive"):
        ODIN(net).tune([images(2)], [images(2)], temperatures=[], progress=False)
