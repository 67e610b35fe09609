"""The training loop and its file: interrupted, resumed, refused."""

import dataclasses
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramwatch
from gramwatch import TrainingError
from gramwatch.inputs.networks import STATES
from gramwatch.methods import MSP
from gramwatch_lab import training
from gramwatch_lab.training import OBJECTIVES, loop, objective_of, train
from lab.tests.training.small import Small, loss_of, run, whole

# --- the loop and its file -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_an_interrupted_training_ends_as_if_it_had_not_been(name, tmp_path, monkeypatch):
    objective, path = objective_of(name), tmp_path / "net.safetensors"
    straight, told = run(objective)
    left, calls = type(objective).loss, iter(range(100))

    def interrupted(self, *batch):
        if next(calls) == 7:  # in the third epoch, of three steps each
            raise KeyboardInterrupt
        return left(self, *batch)

    with monkeypatch.context() as patched:
        patched.setattr(type(objective), "loss", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(objective, path)
    header, tensors = training.read(path)
    assert (header["epoch"], header["finished"]) == (2, False)
    assert any(key.startswith(STATES["momentum_buffer"]) for key in tensors)
    torch.rand(3)  # what chance did in between must not matter
    resumed, again = run(objective, path)
    for key, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    assert [dataclasses.replace(e, seconds=0) for e in again.epochs] == [
        dataclasses.replace(e, seconds=0) for e in told.epochs
    ]
    header, tensors = training.read(path)
    assert (header["epoch"], header["finished"], header["accuracy"]) == (4, True, told.accuracy)
    assert set(tensors) == set(straight.state_dict())


def test_a_finished_file_is_not_trained_again(tmp_path, monkeypatch):
    path = tmp_path / "net.safetensors"
    net, history = run(objective_of("cross_entropy"), path)
    before = path.read_bytes()
    monkeypatch.setattr(loop._Run, "epoch", None)
    other, again = run(objective_of("cross_entropy"), path, Small())
    assert again == history
    assert path.read_bytes() == before
    assert not other.training
    assert torch.equal(other.fc.weight, net.fc.weight)


def test_the_file_says_how_its_network_came_about(tmp_path):
    path = tmp_path / "net.safetensors"
    net, history = run(objective_of("semantic", {"count": 11, "size": 6}), path, name="small")
    header, tensors = training.read(path)
    assert header["network"] == "small"
    assert (header["classes"], header["mean"], header["std"]) == (4, [0.5] * 3, [0.25] * 3)
    assert (header["objective"], header["settings"]["count"], header["seed"]) == ("semantic", 11, 2)
    assert header["accuracy"] == history.accuracy
    json.dumps(header)
    torch.manual_seed(9)
    again = Small()
    training.restore(again, header, tensors)
    x = torch.randn(5, 3, 8, 8)
    assert torch.equal(again(x), net(x))


def test_a_file_of_another_training_is_refused(tmp_path):
    path = tmp_path / "net.safetensors"
    run(objective_of("cross_entropy"), path)
    with pytest.raises(TrainingError, match=r"epochs was 4, is 6; learning_rate was 0.1, is 0.2"):
        run(objective_of("cross_entropy"), path, epochs=6, learning_rate=0.2)
    with pytest.raises(TrainingError, match="objective was cross_entropy"):
        run(objective_of("variational_dirichlet"), path)
    with pytest.raises(TrainingError, match="is already there"):
        run(objective_of("cross_entropy"), path, resume=False)
    MSP(Small()).calibrate([torch.randn(30, 3, 8, 8)], progress=False).save(path)
    with pytest.raises(TrainingError, match="not a network"):
        run(objective_of("cross_entropy"), path)
    path.write_bytes(b"nothing")
    with pytest.raises(gramwatch.ArtifactError, match="truncated or not a safetensors file"):
        run(objective_of("cross_entropy"), path)


def test_training_leaves_the_caller_s_chance_alone_and_depends_on_its_seed():
    torch.manual_seed(1)
    expected = torch.rand(4)
    nets = []
    for seed in (2, 2, 3):
        net = Small()
        net.load_state_dict(nets[0][1] if nets else net.state_dict())
        start = {key: value.clone() for key, value in net.state_dict().items()}
        run(objective_of("cross_entropy"), net=net, seed=seed, epochs=1)
        nets.append((net, start))
    assert torch.equal(nets[0][0].fc.weight, nets[1][0].fc.weight)
    assert not torch.equal(nets[0][0].fc.weight, nets[2][0].fc.weight)
    torch.manual_seed(1)
    net = Small()
    torch.manual_seed(1)
    train(
        net, whole((20, 3, 8, 8)), torch.arange(20) % 4, objective_of("semantic"),
        mean=(0.5,) * 3, std=(0.25,) * 3, epochs=1, progress=False,
    )  # fmt: skip
    assert torch.equal(torch.rand(4), expected)


def test_the_learning_rate_rises_then_falls_along_a_cosine():
    def at(epoch, warmup=2.0):
        return loop.learning_rate_at(epoch, 10, 0.4, warmup)

    assert 0 < at(0) < at(1) < at(1.99) <= at(2) == 0.4
    assert at(6) == pytest.approx(0.2)
    assert at(10) == pytest.approx(0, abs=1e-12)
    assert at(0, warmup=0) == 0.4


def test_one_step_is_that_of_sgd_with_nesterov_momentum():
    """Two epochs of one batch each, without chance, against the formula."""
    images, labels = whole((4, 3, 8, 8)), torch.tensor([0, 1, 2, 3])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    weight = net[1].weight.detach().clone()
    bias = net[1].bias.detach().clone()
    x = ((images.float() / 255 - 0.5) / 0.25).flatten(1)
    momentum = [torch.zeros_like(weight), torch.zeros_like(bias)]
    values = [weight, bias]
    for step in range(2):
        for value in values:
            value.requires_grad_()
        F.cross_entropy(x @ values[0].T + values[1], labels).backward()
        rate = loop.learning_rate_at(step, 2, 0.1, 0.5)
        for i, value in enumerate(values):
            gradient = value.grad + 5e-4 * value.detach()
            momentum[i] = 0.9 * momentum[i] + gradient
            values[i] = value.detach() - rate * (gradient + 0.9 * momentum[i])
    train(
        net, images, labels, objective_of("cross_entropy"), mean=(0.5,) * 3, std=(0.25,) * 3, epochs=2,
        batch_size=4, warmup=0.5, progress=False,
    )  # fmt: skip
    assert torch.allclose(net[1].weight, values[0], atol=1e-5)
    assert torch.allclose(net[1].bias, values[1], atol=1e-5)


def test_mixed_precision_and_compilation_are_used_when_asked_for(monkeypatch):
    compiled = []

    def compiling(net):
        compiled.append(net)
        return net

    monkeypatch.setattr(torch, "compile", compiling)
    plain, _ = run(objective_of("semantic"), epochs=2)
    mixed, history = run(objective_of("semantic"), epochs=2, precision="bfloat16", compile=True)
    assert compiled == [mixed]
    assert plain.conv.weight.dtype == mixed.conv.weight.dtype == torch.float32
    assert math.isfinite(history.epochs[-1].loss)
    assert not torch.equal(plain.conv.weight, mixed.conv.weight)
    assert torch.allclose(plain.conv.weight, mixed.conv.weight, atol=0.05)


@pytest.mark.cuda
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_training_on_a_gpu(name, tmp_path):
    path = tmp_path / "net.safetensors"
    net, history = run(objective_of(name), path, device="cuda", compile=name == "semantic")
    assert math.isfinite(history.epochs[-1].loss)
    assert net.conv.weight.is_cuda
    assert net.conv.weight.is_contiguous()
    assert run(objective_of(name), path, Small(), device="cuda")[1] == history


# --- what is refused -----------------------------------------------------------------------------------


def test_what_cannot_be_trained_is_refused():
    good = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "epochs": 1, "progress": False}
    images, labels = whole((8, 3, 8, 8)), torch.arange(8) % 4
    plain = objective_of("cross_entropy")

    def refused(match, images=images, labels=labels, objective=plain, net=None, **options):
        with pytest.raises(TrainingError, match=match):
            train(net or Small(), images, labels, objective, **(good | options))

    refused("outlier_exposure trains with outliers", objective=objective_of("outlier_exposure"))
    refused("cross_entropy has no use for outliers", outliers=images)
    refused("labels run from 0 to 4, but the network has 4", labels=torch.arange(8) % 5)
    refused("labels run from -1", labels=labels - 1)
    refused("must be 8 whole numbers, not torch.int64 of shape", labels=labels[:7])
    refused("must be 8 whole numbers, not torch.float32", labels=labels.float())
    refused("images must be uint8 of shape", images=images.float())
    refused("images must be uint8 of shape", images=images[:, 0])
    refused("have 3 channels, mean and std 1 and 1", mean=(0.5,), std=(0.5,))
    refused(
        r"images have shape \(3, 8, 8\), outliers \(3, 9, 9\)",
        objective=objective_of("outlier_exposure"),
        outliers=whole((4, 3, 9, 9)),
    )
    refused("the labels of the test must be 8", test=(images, labels[:3]))
    refused("epochs and batch_size must be at least 1", epochs=0)
    refused("precision must be one of", precision="float16")
    refused("network returns shape", net=nn.Conv2d(3, 4, 3))
    refused("training diverged in epoch 1: the loss is nan", net=Broken())
    with pytest.raises(TrainingError, match="there is no objective 'hinge': choose from cross_entropy"):
        objective_of("hinge")
    with pytest.raises(TrainingError, match="semantic has the settings vectors, words, count"):
        objective_of("semantic", {"k": 3})
    for name, settings in {
        "outlier_exposure": {"weight": 0},
        "prior_network": {"smoothing": 0},
        "variational_dirichlet": {"eta": -1},
        "semantic": {"count": 0},
    }.items():
        with pytest.raises(TrainingError, match=name):
            objective_of(name, settings)
    with pytest.raises(TrainingError, match="prior must be one of"):
        objective_of("variational_dirichlet", {"prior": "none"})
    with pytest.raises(TrainingError, match=r"below 0.25"):
        loss_of(objective_of("prior_network", {"smoothing": 0.3}))


class Broken(Small):
    def forward(self, x):
        return super().forward(x) * torch.nan
