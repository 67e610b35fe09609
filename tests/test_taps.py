"""Taps: any network, found and watched without changing it."""

import gc
import operator
import threading
import weakref
from collections import OrderedDict, UserDict
from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramwatch
from gramwatch import GramDetector, GramwatchWarning, InputError, TapError, find_taps, mark, networks
from gramwatch.batches import all_finite, count_examples, on_device, signature
from gramwatch.methods import Energy
from gramwatch.taps import Network, Tap, Taps, find_head, observe, unwrap

CLASSES = 5


def watch(model, taps, inputs):
    """Each tap's maps as they were when handed over, by name, and the logits."""
    seen = {}

    def receive(number, maps):
        assert taps[number].name not in seen
        seen[taps[number].name] = maps.clone()

    logits = observe(model, taps, inputs, receive)
    return seen, logits


def watched(model, inputs, select="all"):
    """Taps found with the first example, watched on the whole batch."""
    taps = find_taps(model, inputs, select)
    seen, logits = watch(model, taps, inputs)
    assert list(seen) == taps.names
    return taps, seen, logits


def channels_at(x, axis):
    """(N, channels, pixels) of a tensor with examples along axis 0: the slow and plain way."""
    x = x.unsqueeze(-1)
    return torch.stack([x.select(axis, c).flatten(1) for c in range(x.shape[axis])], 1)


def check_alone(model, taps, inputs):
    """What a tap sees of an example does not depend on the others of its batch."""
    together, _ = watch(model, taps, inputs)
    for i in range(len(inputs)):
        alone, _ = watch(model, taps, inputs[i : i + 1])
        for name, maps in alone.items():
            torch.testing.assert_close(maps[0], together[name][i], rtol=1e-4, atol=1e-5, msg=name)


class Net(nn.Module):
    """Modules by name and a forward function of them and the input."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._function = forward

    def forward(self, *args, **kwargs):
        return self._function(self, *args, **kwargs)


class Head(nn.Module):
    """Global average over all but the first two axes, and a linear layer."""

    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.fc(x.unsqueeze(-1).flatten(2).mean(2))


def after(layer, width):
    """A network that ends in a head after `layer`."""
    return nn.Sequential(OrderedDict(layer=layer, head=Head(width))).eval()


# --- convolutions, linear layers, activations --------------------------------------------------------

CONVOLUTIONS = {
    "conv1d": (nn.Conv1d(6, 8, 3), (6, 9)),
    "conv2d": (nn.Conv2d(6, 8, 3, stride=2), (6, 9, 7)),
    "conv3d": (nn.Conv3d(6, 8, 2), (6, 4, 5, 3)),
    "conv_transpose1d": (nn.ConvTranspose1d(6, 8, 3), (6, 9)),
    "conv_transpose2d": (nn.ConvTranspose2d(6, 8, 3, stride=2), (6, 4, 3)),
    "conv_transpose3d": (nn.ConvTranspose3d(6, 8, 2), (6, 2, 3, 2)),
    "conv1d grouped": (nn.Conv1d(6, 8, 3, groups=2), (6, 9)),
    "conv2d grouped": (nn.Conv2d(6, 9, 3, groups=3), (6, 9, 7)),
    "conv2d depthwise": (nn.Conv2d(6, 12, 3, groups=6), (6, 9, 7)),
    "conv_transpose2d grouped": (nn.ConvTranspose2d(6, 8, 3, groups=2), (6, 4, 3)),
    "conv2d circular": (nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"), (6, 5, 7)),
    "conv2d same": (nn.Conv2d(6, 8, 3, padding="same"), (6, 5, 7)),
    "conv2d to one pixel": (nn.Conv2d(6, 8, (5, 7)), (6, 5, 7)),
    "conv2d to one channel": (nn.Conv2d(6, 1, 3), (6, 5, 7)),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case):
    layer, shape = CONVOLUTIONS[case]
    x = torch.randn(3, *shape)
    taps, seen, _ = watched(after(layer, layer.out_channels), x)
    out = layer(x)
    (tap,) = taps
    assert (tap.name, tap.kind, tap.operation) == ("layer", "convolution", case.split()[0])
    assert (tap.batch_axis, tap.channel_axis, tap.channels) == (0, 1, layer.out_channels)
    assert tap.shape == (1, *out.shape[1:])
    assert not tap.is_vector
    torch.testing.assert_close(seen["layer"], out.flatten(2), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x: F.conv2d(x, net.weight),
        lambda net, x: F.conv2d(input=x, weight=net.weight, groups=1),
        lambda net, x: torch.conv2d(x, net.weight),
        lambda net, x: torch.ops.aten.conv2d.default(x, net.weight),
        lambda net, x: torch.convolution(x, net.weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
    ],
)
def test_functional_convolutions(function):
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    net = Net(lambda net, x: net.head(function(net, x)), weight=weight, head=Head(4))
    x = torch.randn(2, 3, 5, 5)
    taps, seen, _ = watched(net, x)
    (name,) = taps.names
    assert name in ("conv2d", "convolution")
    torch.testing.assert_close(seen[name], F.conv2d(x, weight).flatten(2), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (3, 4, 6), (2, 3, 4, 6)])
def test_linear_layers_have_their_channels_last(shape):
    layer = nn.Linear(6, 8)
    net = Net(
        lambda net, x: net.fc(net.hidden(x).reshape(len(x), -1, 8).mean(1)), hidden=layer, fc=nn.Linear(8, 5)
    )
    x = torch.randn(3, *shape)
    taps, seen, _ = watched(net, x)
    (tap,) = taps
    assert (tap.name, tap.kind, tap.operation) == ("hidden", "linear", "linear")
    assert (tap.channel_axis, tap.channels) == (len(shape), 8)
    assert tap.is_vector == (len(shape) == 1)
    torch.testing.assert_close(seen["hidden"], channels_at(layer(x), len(shape)), rtol=0, atol=0)


def test_a_bilinear_layer():
    net = Net(lambda net, x, y: net.fc(net.both(x, y)), both=nn.Bilinear(3, 4, 6), fc=nn.Linear(6, 5))
    x, y = torch.randn(2, 3), torch.randn(2, 4)
    taps, seen, _ = watched(net, (x, y))
    assert (taps[0].name, taps[0].kind, taps[0].channels) == ("both", "linear", 6)
    torch.testing.assert_close(seen["both"][..., 0], net.both(x, y), rtol=0, atol=0)


ACTIVATIONS = {
    "celu": nn.CELU(),
    "elu": nn.ELU(),
    "gelu": nn.GELU(),
    "hardshrink": nn.Hardshrink(),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardswish": nn.Hardswish(),
    "hardtanh": nn.Hardtanh(),
    "leaky_relu": nn.LeakyReLU(),
    "log_sigmoid": nn.LogSigmoid(),
    "mish": nn.Mish(),
    "prelu": nn.PReLU(4),
    "relu": nn.ReLU(),
    "hardtanh relu6": nn.ReLU6(),
    "rrelu": nn.RReLU(),
    "selu": nn.SELU(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
    "softplus": nn.Softplus(),
    "softshrink": nn.Softshrink(),
    "softsign": nn.Softsign(),
    "tanh": nn.Tanh(),
    "tanhshrink": nn.Tanhshrink(),
    "threshold": nn.Threshold(0.1, 0.2),
    "celu inplace": nn.CELU(inplace=True),
    "elu inplace": nn.ELU(inplace=True),
    "hardsigmoid inplace": nn.Hardsigmoid(inplace=True),
    "hardswish inplace": nn.Hardswish(inplace=True),
    "hardtanh inplace": nn.Hardtanh(inplace=True),
    "leaky_relu inplace": nn.LeakyReLU(inplace=True),
    "mish inplace": nn.Mish(inplace=True),
    "relu inplace": nn.ReLU(inplace=True),
    "hardtanh relu6 inplace": nn.ReLU6(inplace=True),
    "rrelu inplace": nn.RReLU(inplace=True),
    "selu inplace": nn.SELU(inplace=True),
    "silu inplace": nn.SiLU(inplace=True),
    "threshold inplace": nn.Threshold(0.1, 0.2, inplace=True),
}


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_activation_modules(case):
    act, conv = ACTIVATIONS[case].eval(), nn.Conv2d(3, 4, 2)
    net = Net(lambda net, x: net.head(net.act(net.conv(x))), conv=conv, act=act, head=Head(4)).eval()
    x = torch.randn(2, 3, 6, 5)
    taps, seen, _ = watched(net, x)
    assert taps.names == ["conv", "act"]
    assert taps[1].kind == "activation"
    assert taps[1].operation in case.split()
    assert (taps[1].channel_axis, taps[1].shape) == (1, (1, 4, 5, 4))
    # The convolution is seen before an in-place activation writes over it.
    torch.testing.assert_close(seen["conv"], conv(x).flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(seen["act"], act(conv(x)).flatten(2), rtol=0, atol=0)
    assert not seen["act"].equal(seen["conv"])


def test_glu_halves_the_channels():
    net = Net(
        lambda net, x: net.head(net.act(net.conv(x))), conv=nn.Conv2d(3, 8, 1), act=nn.GLU(1), head=Head(4)
    )
    x = torch.randn(2, 3, 4, 4)
    taps, seen, _ = watched(net, x)
    assert [tap.channels for tap in taps] == [8, 4]
    torch.testing.assert_close(seen["act"], F.glu(net.conv(x), 1).flatten(2), rtol=0, atol=0)


FUNCTIONS = {
    "F.relu": (F.relu, "relu"),
    "F.relu in place": (lambda x: F.relu(x, inplace=True), "relu"),
    "F.relu by keyword": (lambda x: F.relu(input=x), "relu"),
    "F.relu_": (F.relu_, "relu"),
    "torch.relu": (torch.relu, "relu"),
    "torch.relu_": (torch.relu_, "relu"),
    "x.relu": (lambda x: x.relu(), "relu"),
    "x.relu_": (lambda x: x.relu_(), "relu"),
    "aten.relu": (torch.ops.aten.relu.default, "relu"),
    "F.gelu": (F.gelu, "gelu"),
    "F.gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), "gelu"),
    "F.silu": (F.silu, "silu"),
    "F.silu in place": (lambda x: F.silu(x, inplace=True), "silu"),
    "F.elu_": (F.elu_, "elu"),
    "F.leaky_relu": (F.leaky_relu, "leaky_relu"),
    "F.leaky_relu_": (F.leaky_relu_, "leaky_relu"),
    "F.relu6": (F.relu6, "relu6"),
    "F.hardtanh_": (F.hardtanh_, "hardtanh"),
    "F.hardswish": (F.hardswish, "hardswish"),
    "F.hardsigmoid": (F.hardsigmoid, "hardsigmoid"),
    "F.mish": (F.mish, "mish"),
    "F.softplus": (F.softplus, "softplus"),
    "F.logsigmoid": (F.logsigmoid, "log_sigmoid"),
    "F.softsign": (F.softsign, "softsign"),
    "F.tanhshrink": (F.tanhshrink, "tanhshrink"),
    "F.threshold": (lambda x: F.threshold(x, 0.1, 0.2), "threshold"),
    "F.rrelu": (F.rrelu, "rrelu"),
    "F.selu": (F.selu, "selu"),
    "F.celu": (F.celu, "celu"),
    "F.tanh": (F.tanh, "tanh"),
    "torch.tanh": (torch.tanh, "tanh"),
    "x.tanh_": (lambda x: x.tanh_(), "tanh"),
    "F.sigmoid": (F.sigmoid, "sigmoid"),
    "torch.sigmoid": (torch.sigmoid, "sigmoid"),
    "torch.sigmoid_": (torch.sigmoid_, "sigmoid"),
    "x.sigmoid": (lambda x: x.sigmoid(), "sigmoid"),
    "x.sigmoid_": (lambda x: x.sigmoid_(), "sigmoid"),
    "torch.prelu": (lambda x: torch.prelu(x, torch.full((1,), 0.3)), "prelu"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_activation_functions(case):
    function, operation = FUNCTIONS[case]
    net = Net(lambda net, x: net.head(function(net.conv(x))), conv=nn.Conv2d(3, 4, 2), head=Head(4))
    x = torch.randn(2, 3, 6, 5)
    taps, seen, _ = watched(net, x)
    assert taps.names == ["conv", operation]
    assert taps[1].kind == "activation"
    assert taps[1].operation == operation
    with torch.no_grad():
        torch.testing.assert_close(seen["conv"], net.conv(x).flatten(2), rtol=0, atol=0)
        torch.testing.assert_close(seen[operation], function(net.conv(x)).flatten(2), rtol=0, atol=0)


def test_every_value_of_a_small_network_by_hand():
    torch.manual_seed(3)

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv1 = nn.Conv2d(width, width, 3, padding=1)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)

        def forward(self, x):
            out = F.relu_(self.bn1(self.conv1(x)))
            return F.gelu(self.conv2(out).add_(x))

    net = nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(3, 6, 3),
            act=nn.ReLU(inplace=True),
            layer1=nn.Sequential(Block(6), Block(6)),
            pool=nn.AdaptiveAvgPool2d(1),
            flat=nn.Flatten(),
            hidden=nn.Linear(6, 7),
            tanh=nn.Tanh(),
            fc=nn.Linear(7, CLASSES),
        )
    )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    net.eval()
    x = torch.randn(4, 3, 9, 8)
    taps, seen, logits = watched(net, x)

    expected = {"stem": net.stem(x)}
    out = expected["act"] = expected["stem"].relu()
    for i in "01":
        block = net.layer1[int(i)]
        expected[f"layer1.{i}.conv1"] = block.conv1(out)
        expected[f"layer1.{i}.relu"] = block.bn1(expected[f"layer1.{i}.conv1"]).relu()
        expected[f"layer1.{i}.conv2"] = block.conv2(expected[f"layer1.{i}.relu"])
        out = expected[f"layer1.{i}.gelu"] = F.gelu(expected[f"layer1.{i}.conv2"] + out)
    expected["hidden"] = net.hidden(out.mean((2, 3)))
    expected["tanh"] = expected["hidden"].tanh()
    assert taps.names == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(seen[name], tensor.unsqueeze(-1).flatten(2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, net.fc(expected["tanh"]), rtol=1e-5, atol=1e-6)


def test_a_module_called_several_times():
    net = Net(
        lambda net, x: net.head(net.act(net.conv(net.act(net.conv(x))))),
        conv=nn.Conv2d(3, 3, 1),
        act=nn.ReLU(),
        head=Head(3),
    )
    x = torch.randn(2, 3, 4, 4)
    taps, seen, _ = watched(net, x)
    assert taps.names == ["conv", "act", "conv#2", "act#2"]
    first = net.conv(x)
    second = net.conv(first.relu())
    for name, tensor in {
        "conv": first,
        "act": first.relu(),
        "conv#2": second,
        "act#2": second.relu(),
    }.items():
        torch.testing.assert_close(seen[name], tensor.flatten(2), rtol=0, atol=0)


def test_a_module_under_two_names_goes_by_the_first():
    conv = nn.Conv2d(3, 3, 1)
    net = Net(lambda net, x: net.head(net.second(net.first(x))), first=conv, second=conv, head=Head(3))
    assert find_taps(net, torch.randn(1, 3, 4, 4)).names == ["first", "first#2"]


# --- names -------------------------------------------------------------------------------------------


def test_functions_are_named_after_the_module_they_run_in():
    class Twice(nn.Module):
        """A leaf that makes two watched calls, beside parameters of its own."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, 1, 1))

        def forward(self, x):
            return F.relu(F.relu(F.conv2d(x, self.weight)))

    class Once(nn.Module):
        """A leaf that makes one watched call."""

        def forward(self, x):
            return x * torch.sigmoid(x)

    class Block(nn.Module):
        """A module with children, that calls functions too."""

        def __init__(self):
            super().__init__()
            self.conv1 = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return torch.tanh(self.conv1(x))

    net = Net(
        lambda net, x: net.head(F.gelu(net.layer1(net.once(net.twice(x))))),
        twice=Twice(),
        once=Once(),
        layer1=nn.Sequential(Block(), Block()),
        head=Head(4),
    )
    assert find_taps(net, torch.randn(1, 3, 4, 4)).names == [
        "twice.conv2d",
        "twice.relu",
        "twice.relu#2",
        "once",
        "layer1.0.conv1",
        "layer1.0.tanh",
        "layer1.1.conv1",
        "layer1.1.tanh",
        "gelu",
    ]


def test_a_leaf_that_calls_once_at_a_time_keeps_its_name():
    net = Net(
        lambda net, x: net.head(net.act(net.conv(net.act(x)))),
        conv=nn.Conv2d(3, 3, 1),
        act=nn.ReLU(),
        head=Head(3),
    )
    assert find_taps(net, torch.randn(1, 3, 4, 4)).names == ["act", "conv", "act#2"]


def test_names_are_unique_where_a_function_shares_a_modules_name():
    net = Net(
        lambda net, x: net.head(F.relu(net.conv(net.relu(net.conv(x))))),
        conv=nn.Conv2d(3, 3, 1),
        relu=nn.ReLU(),
        head=Head(3),
    )
    assert find_taps(net, torch.randn(1, 3, 4, 4)).names == ["conv", "relu", "conv#2", "relu#2"]


def test_choosing_by_name_and_glob():
    blocks = [nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 3, 1), act=nn.ReLU())) for _ in range(3)]
    net = Net(lambda net, x: net.head(net.layer(x)), layer=nn.Sequential(*blocks), head=Head(3))
    x = torch.randn(2, 3, 4, 4)
    every = find_taps(net, x)
    assert len(every) == 6
    assert find_taps(net, x, "layer.1.conv").names == ["layer.1.conv"]
    assert find_taps(net, x, "layer.*.act").names == ["layer.0.act", "layer.1.act", "layer.2.act"]
    assert find_taps(net, x, ["layer.[02].conv", "layer.0.*"]).names == [
        "layer.0.conv",
        "layer.0.act",
        "layer.2.conv",
    ]
    # In the network's order, not in the order asked for; each once.
    assert find_taps(net, x, ["layer.2.act", "layer.0.conv", "layer.?.act"]).names == [
        "layer.0.conv",
        "layer.0.act",
        "layer.1.act",
        "layer.2.act",
    ]
    some = find_taps(net, x, ["layer.1.*"])
    assert some == every.select("layer.1.*")
    assert some.operations == every.operations
    chosen, _ = watch(net, some, x)
    everything, _ = watch(net, every, x)
    for name in some.names:
        torch.testing.assert_close(chosen[name], everything[name], rtol=0, atol=0)


def test_a_pattern_that_matches_nothing_names_what_comes_close():
    net = nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 4, 1), relu1=nn.ReLU(), head=Head(4)))
    with pytest.raises(TapError, match=r"no tap matches 'conv2'\. There are 2, such as conv1") as caught:
        find_taps(net, torch.randn(1, 3, 4, 4), ["relu1", "conv2"])
    assert "print(gramwatch.find_taps(model, images))" in str(caught.value)
    with pytest.raises(TapError, match=r"no tap matches 'Conv1'"):  # cases differ
        find_taps(net, torch.randn(1, 3, 4, 4), "Conv1")
    with pytest.raises(TapError, match="no tap was chosen"):
        find_taps(net, torch.randn(1, 3, 4, 4), [])
    with pytest.raises(TapError, match=r"no tap matches 'head\.fc'"):  # the logits
        find_taps(net, torch.randn(1, 3, 4, 4), "head.fc")


# --- the paper's networks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "count"),
    [(networks.resnet34, 96), (networks.densenet_bc_100_12, 101), (networks.wide_resnet_40_2, 73)],
)
def test_the_papers_taps(make, count):
    net, x = make().eval(), torch.randn(1, 3, 32, 32)
    taps = find_taps(net, x, "paper")
    assert len(taps) == len(set(taps.names)) == count
    assert {tap.channel_axis for tap in taps} == {1}
    assert all(len(tap.shape) == 4 for tap in taps)


def test_ends_are_the_last_tensors_of_each_size():
    """The stages of ResNet-34 and the transitions of DenseNet, where Mahalanobis' authors look."""
    x = torch.randn(1, 3, 32, 32)
    found = find_taps(networks.resnet34(), x, "ends")
    assert [(tap.name, tap.shape) for tap in found] == [
        ("layer1.2.relu#2", (1, 64, 32, 32)),
        ("layer2.3.relu#2", (1, 128, 16, 16)),
        ("layer3.5.relu#2", (1, 256, 8, 8)),
        ("layer4.2.relu#2", (1, 512, 4, 4)),
    ]
    assert [tap.pixels for tap in found] == [1024, 256, 64, 16]
    dense = find_taps(networks.densenet_bc_100_12(), x, "ends")
    assert [tap.name for tap in dense] == ["trans1.conv1", "trans2.conv1", "relu"]


def test_the_papers_taps_by_hand():
    net, x = networks.ResNet((1, 1, 1, 1)).eval(), torch.randn(2, 3, 32, 32)
    taps, seen, _ = watched(net, x, "paper")
    assert len(taps) == 24
    out = F.relu(net.bn1(net.conv1(x)))
    for stage in (1, 2, 3, 4):
        block = net.get_submodule(f"layer{stage}.0")
        conv1 = block.conv1(out)
        relu = block.bn1(conv1).relu()
        conv2 = block.conv2(relu)
        shortcut = block.shortcut(out)
        total = block.bn2(conv2) + shortcut
        out = total.relu()
        by_hand = [conv1, relu, conv2, shortcut, total, out]
        names = ["conv1", "relu", "conv2", "shortcut", "sum", "relu#2"]
        assert taps.names[6 * stage - 6 : 6 * stage] == [f"layer{stage}.0.{name}" for name in names]
        for name, tensor in zip(names, by_hand, strict=True):
            maps = seen[f"layer{stage}.0.{name}"]
            torch.testing.assert_close(maps, tensor.flatten(2), rtol=1e-4, atol=1e-5)


def test_paper_is_for_the_papers_networks():
    with pytest.raises(
        TapError, match=r"taps='paper' is defined for .*gramwatch\.networks, not for Sequential"
    ):
        find_taps(after(nn.Conv2d(3, 4, 1), 4), torch.randn(1, 3, 4, 4), "paper")


# --- wrappers ----------------------------------------------------------------------------------------


def small():
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(3, 4, 3), act=nn.ReLU(), more=nn.Conv2d(4, 6, 1), head=Head(6))
    ).eval()


def check_small(wrapped, net, x):
    taps, seen, logits = watched(wrapped, x)
    assert taps == find_taps(net, x)
    assert taps.names == ["conv", "act", "more"]
    torch.testing.assert_close(seen["conv"], net.conv(x).flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(seen["more"], net.more(net.conv(x).relu()).flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(logits, net(x), rtol=0, atol=0)


def test_data_parallel():
    net = small()
    check_small(nn.DataParallel(net), net, torch.randn(3, 3, 6, 6))
    assert unwrap(nn.DataParallel(nn.DataParallel(net))) is net


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch is built without distributed")
def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        net = small()
        wrapped = nn.parallel.DistributedDataParallel(net)
        check_small(wrapped, net, torch.randn(3, 3, 6, 6))
        assert unwrap(wrapped) is net
    finally:
        torch.distributed.destroy_process_group()


def counting_backend():
    """A backend of torch.compile that runs the graph as it is, and a list that grows with each graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    return backend, graphs


def test_a_compiled_network():
    net, x = small(), torch.randn(3, 3, 6, 6)
    backend, graphs = counting_backend()
    compiled = torch.compile(net, backend=backend)
    with pytest.warns(GramwatchWarning, match="is compiled.*detectors run the network uncompiled"):
        check_small(compiled, net, x)
    assert unwrap(nn.DataParallel(compiled)) is net
    check_small(torch.compile(net, backend="eager"), net, x)
    assert graphs == []


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="needs PyTorch 2.6")
@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "function", "fullgraph"])
def test_a_compiled_part_is_watched_as_written_and_stays_compiled(how):
    torch._dynamo.reset()
    backend, graphs = counting_backend()
    part = Net(lambda net, x: net.act(net.conv(x)), conv=nn.Conv2d(3, 4, 3), act=nn.ReLU())
    if how in ("torch.compile", "fullgraph"):
        wrapped = torch.compile(part, backend=backend, fullgraph=how == "fullgraph")
        net = Net(lambda net, x: net.head(net.part(x)), part=wrapped, head=Head(4))
    elif how == "module.compile":
        net = Net(lambda net, x: net.head(net.part(x)), part=part, head=Head(4))
        part.compile(backend=backend)
    else:
        run = torch.compile(lambda part, x: part(x), backend=backend)
        net = Net(lambda net, x: net.head(run(net.part, x)), part=part, head=Head(4))
    net.eval()
    x = torch.randn(3, 3, 6, 6)
    told = pytest.warns(GramwatchWarning, match="Net is compiled, in whole or in part")
    with nullcontext() if how == "function" else told:  # who calls a compiled function is not known
        taps, seen, _ = watched(net, x)
    assert taps.names == ["part.conv", "part.act"]
    conv = F.conv2d(x, part.conv.weight, part.conv.bias)
    torch.testing.assert_close(seen["part.conv"], conv.flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(seen["part.act"], conv.relu().flatten(2), rtol=0, atol=0)
    assert graphs == []
    net(x)
    assert len(graphs) == 1
    again, _ = watch(net, taps, torch.cat([x, x]))
    torch.testing.assert_close(again["part.act"][:3], seen["part.act"], rtol=1e-5, atol=1e-6)
    assert len(graphs) == 1
    with pytest.raises(RuntimeError):
        watch(net, taps, torch.randn(2, 8, 6, 6))
    net(torch.randn(3, 3, 7, 7))
    assert len(graphs) == 2  # compiling goes on, after an exception too


@pytest.mark.parametrize("first", ["outside", "inside"])
def test_taps_are_watched_inside_a_compiled_function(first):
    torch._dynamo.reset()
    backend, graphs = counting_backend()
    net, x = small(), torch.randn(3, 3, 6, 6)
    taps = find_taps(net, x) if first == "outside" else None
    found = []

    def function(x):
        found.append(taps or find_taps(net, 2 * x))
        seen, logits = watch(net, found[-1], 2 * x)
        found.append(seen)
        return logits + 1

    logits = torch.compile(function, backend=backend)(x)
    assert found[0].names == list(found[1]) == ["conv", "act", "more"]
    torch.testing.assert_close(found[1]["act"], net.conv(2 * x).relu().flatten(2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, net(2 * x) + 1, rtol=1e-5, atol=1e-6)
    assert graphs  # the function itself was compiled, in parts


def test_a_compiled_leaf_keeps_its_name():
    net = nn.Sequential(OrderedDict(conv=torch.compile(nn.Conv2d(3, 4, 1), backend="eager"), head=Head(4)))
    with pytest.warns(GramwatchWarning, match="Sequential is compiled"):
        assert find_taps(net, torch.randn(1, 3, 4, 4)).names == ["conv"]


def test_that_a_network_is_compiled_is_said_once_for_each_network():
    net, x = small(), torch.randn(3, 3, 6, 6)
    compiled = torch.compile(net, backend="eager")
    with pytest.warns(GramwatchWarning, match="is compiled"):
        taps = find_taps(compiled, x)
    find_taps(compiled, x)  # said once: another warning would be an error
    observe(compiled, taps, x, lambda *_: None)
    observe(torch.compile(net, backend="eager"), taps, x, lambda *_: None)
    with pytest.warns(GramwatchWarning, match="is compiled"):
        observe(torch.compile(small(), backend="eager"), taps, x, lambda *_: None)
    Energy(small()).fit([x], progress=False).score_inputs(x)
    with pytest.warns(GramwatchWarning, match="is compiled"):
        Energy(torch.compile(small(), backend="eager")).score_inputs(x)


# --- outputs and inputs ------------------------------------------------------------------------------


@dataclass
class Output:
    logits: Tensor
    hidden_states: Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits, hidden: Output(logits, hidden),
        lambda logits, hidden: {"hidden": hidden, "logits": logits},
        lambda logits, hidden: OrderedDict(loss=None, logits=logits, hidden=hidden),
        lambda logits, hidden: UserDict(hidden=hidden, logits=logits),
        lambda logits, hidden: (logits, hidden),
        lambda logits, hidden: (hidden, logits),
        lambda logits, hidden: {"features": hidden, "scores": logits},
        lambda logits, hidden: [logits],
    ],
)
def test_the_logits_in_an_output(wrap):
    def forward(net, x):
        hidden = net.hidden(x)
        return wrap(net.fc(hidden), hidden)

    net = Net(forward, hidden=nn.Linear(4, 6), fc=nn.Linear(6, CLASSES))
    x = torch.randn(3, 4)
    taps, _, logits = watched(net, x)
    assert taps.names == ["hidden"]
    torch.testing.assert_close(logits, net.fc(net.hidden(x)), rtol=0, atol=0)


def test_an_output_without_logits_is_refused():
    net = Net(lambda net, x: net.fc(x), fc=nn.Linear(4, 5))
    for output in (None, "text", {"scores": torch.ones(2, 3, 4)}, (), 3.0):
        with pytest.raises(InputError, match=r"the network returned .*: no logits were found.*logits='NAME'"):
            Network.of(net).logits_of(output)
    net = Net(lambda net, x: {"map": net.fc(F.relu(x))[..., None]}, fc=nn.Linear(4, 5))
    with pytest.raises(InputError, match=r"a mapping of 'map': a float32 tensor of shape \(2, 5, 1\)"):
        find_taps(net, torch.randn(2, 4))


@pytest.mark.parametrize("shape", [(2,), (2, 5, 3), (2, 5, 1, 1), (2, 1)])
def test_logits_that_are_not_examples_by_classes_are_refused(shape):
    net = Net(lambda net, x: F.relu(net.fc(x)).new_zeros(len(x), *shape[1:]), fc=nn.Linear(4, 3))
    with pytest.raises(InputError, match=r"the logits have shape \(2.*expected \(examples, classes\)"):
        find_taps(net, torch.randn(2, 4))
    with pytest.raises(InputError, match="the logits have shape"):
        observe(net, Taps([], ["linear", "relu"]), torch.randn(2, 4), lambda *_: None)


class TwoInputs(nn.Module):
    """An image and numbers beside it; a table that belongs to no example."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.mlp = nn.Linear(6, 4)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, image, numbers, scale=None):
        out = self.conv(image).relu().mean((2, 3)) + torch.tanh(self.mlp(numbers))
        return self.fc(out if scale is None else out * scale)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "UserDict"])
def test_several_inputs(kind):
    net = TwoInputs()
    image, numbers, scale = torch.randn(3, 3, 5, 5), torch.randn(3, 6), torch.rand(4)
    inputs = {"image": image, "numbers": numbers, "scale": scale}
    if kind in ("tuple", "list"):
        inputs = (tuple if kind == "tuple" else list)(inputs.values())
    elif kind == "UserDict":
        inputs = UserDict(inputs)
    assert count_examples(inputs) == 3
    taps, seen, logits = watched(net, inputs)
    assert taps.names == ["conv", "relu", "mlp", "tanh"]
    torch.testing.assert_close(seen["conv"], net.conv(image).flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(seen["tanh"], net.mlp(numbers).tanh()[..., None], rtol=0, atol=0)
    torch.testing.assert_close(logits, net(image, numbers, scale), rtol=0, atol=0)


def test_nested_inputs_and_what_is_no_tensor():
    def forward(net, pair, *, factor, flag):
        assert flag is None
        first, second = pair
        return net.fc(F.relu(net.hidden(first) + net.hidden(second)) * factor)

    net = Net(forward, hidden=nn.Linear(4, 6), fc=nn.Linear(6, CLASSES))
    inputs = {"pair": (torch.randn(3, 4), torch.randn(3, 4)), "factor": 2.0, "flag": None}
    taps, seen, _ = watched(net, inputs)
    assert taps.names == ["hidden", "hidden#2", "relu"]
    torch.testing.assert_close(seen["hidden#2"][..., 0], net.hidden(inputs["pair"][1]), rtol=0, atol=0)


def test_token_ids_as_input():
    net = Net(
        lambda net, input_ids, attention_mask: Output(
            net.fc((F.relu(net.embed(input_ids)) * attention_mask[..., None]).mean(1)), input_ids
        ),
        embed=nn.Embedding(30, 8),
        fc=nn.Linear(8, CLASSES),
    )
    ids = torch.randint(30, (3, 6))
    mask = torch.ones(3, 6, dtype=torch.int64)
    taps, seen, _ = watched(net, {"input_ids": ids, "attention_mask": mask})
    assert [(tap.name, tap.channel_axis, tap.shape) for tap in taps] == [("relu", 2, (1, 6, 8))]
    torch.testing.assert_close(seen["relu"], net.embed(ids).relu().transpose(1, 2), rtol=0, atol=0)


def test_helpers_of_inputs():
    image, mask = torch.randn(3, 2, 4), torch.ones(3, 4, dtype=torch.int64)
    image[1, 0, 2] = torch.nan
    image[2, 1, 0] = torch.inf
    assert all_finite({"image": image, "mask": mask}).tolist() == [True, False, False]
    assert all_finite(mask).tolist() == [True, True, True]
    assert signature((image, mask)) == [[[2, 4], "float32"], [[4], "int64"]]
    for nothing in ((), {}, None, "text", torch.tensor(3.0)):
        with pytest.raises(InputError, match="each with a batch axis; got "):
            count_examples(nothing)
    moved = on_device({"x": torch.ones(2), "n": 3}, nn.Linear(2, 2, device="meta"))
    assert moved["x"].device.type == "meta"
    assert moved["n"] == 3
    assert on_device(image, nn.ReLU()) is image


def test_an_empty_batch_is_refused():
    with pytest.raises(InputError, match="the batch is empty"):
        find_taps(small(), torch.randn(0, 3, 6, 6))
    with pytest.raises(InputError, match="forward accepts none of the keys of a dict"):
        find_taps(small(), {})


@pytest.mark.parametrize("examples", [1, 2, 3, 7])
def test_the_batch_the_taps_were_found_with_does_not_matter(examples):
    net, x = small(), torch.randn(7, 3, 6, 6)
    taps = find_taps(net, x[:examples])
    assert taps == find_taps(net, x)
    check_alone(net, taps, x)


# --- the logits are not tapped -----------------------------------------------------------------------

ENDINGS = {
    "linear": (lambda net, x: net.fc(x), ["hidden"]),
    "log_softmax": (lambda net, x: F.log_softmax(net.fc(x), 1), ["hidden"]),
    "softmax": (lambda net, x: net.fc(x).softmax(-1), ["hidden"]),
    "sigmoid": (lambda net, x: torch.sigmoid(net.fc(x)), ["hidden"]),
    "sigmoid in place": (lambda net, x: net.fc(x).sigmoid_(), ["hidden"]),
    "two activations": (lambda net, x: F.logsigmoid(torch.tanh(net.fc(x))), ["hidden"]),
    "scaled": (lambda net, x: net.fc(x) / 10 + 1, ["hidden"]),
    "double": (lambda net, x: net.fc(x).double(), ["hidden"]),
    "contiguous": (lambda net, x: net.fc(x).t().t().contiguous(), ["hidden"]),
    "conv head, flattened": (lambda net, x: net.conv(x[..., None, None]).flatten(1), ["hidden"]),
    "conv head, view": (lambda net, x: net.conv(x[..., None, None]).view(len(x), -1), ["hidden"]),
    "conv head, squeezed": (lambda net, x: net.conv(x[..., None, None]).squeeze(-1).squeeze(-1), ["hidden"]),
    "conv head, indexed": (lambda net, x: net.conv(x[..., None, None])[:, :, 0, 0], ["hidden"]),
    "conv head, pooled": (
        lambda net, x: F.adaptive_avg_pool2d(net.conv(x[..., None, None]), 1).flatten(1).log_softmax(1),
        ["hidden"],
    ),
    "normalised": (lambda net, x: net.bn(net.fc(x)), ["hidden"]),
    "two heads": (lambda net, x: (net.fc(x) + net.fc2(x)) / 2, ["hidden"]),
    "residual": (lambda net, x: (y := net.fc(x)) + net.square(y), ["hidden", "fc"]),
    "relu residual": (lambda net, x: (y := F.relu(net.fc(x))) + net.square(y), ["hidden", "fc", "relu"]),
    "matmul residual": (
        lambda net, x: (y := F.relu(net.fc(x))) + y @ net.square.weight,
        ["hidden", "fc", "relu"],
    ),
    "matmul head": (lambda net, x: F.relu(net.fc(x)) @ net.square.weight, ["hidden", "fc", "relu"]),
    "a map of logits": (
        lambda net, x: net.conv(x[..., None, None].expand(-1, -1, 2, 2)).mean((2, 3)),
        ["hidden", "conv"],
    ),
}


@pytest.mark.filterwarnings("ignore:the output of Net looks like probabilities:gramwatch.GramwatchWarning")
@pytest.mark.parametrize("case", ENDINGS)
def test_the_logits_are_not_tapped(case):
    ending, expected = ENDINGS[case]
    net = Net(
        lambda net, x: ending(net, net.hidden(x)),
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
        fc2=nn.Linear(6, CLASSES),
        conv=nn.Conv2d(6, CLASSES, 1),
        square=nn.Linear(CLASSES, CLASSES),
        bn=nn.BatchNorm1d(CLASSES),
    ).eval()
    x = torch.randn(3, 4)
    names = watched(net, x)[0].names
    assert names == expected
    torch.testing.assert_close(watched(net, x)[2], net(x), rtol=0, atol=0)


def test_a_layer_as_wide_as_the_classes_is_tapped():
    net = nn.Sequential(
        nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 5)
    )
    assert find_taps(net, torch.randn(2, 4)).names == ["0", "1", "2", "4"]


def test_a_network_whose_only_layer_makes_the_logits():
    with pytest.raises(
        TapError, match="Linear has no tap: its only convolution or linear layer makes the logits"
    ):
        find_taps(nn.Linear(4, 5), torch.randn(2, 4))


def test_a_network_without_a_tap():
    class Nothing(nn.Module):
        def forward(self, x):
            return x.flatten(1).cumsum(1)

    with pytest.raises(
        TapError, match="Nothing has no tap: no convolution, linear layer or activation"
    ) as caught:
        find_taps(Nothing(), torch.randn(2, 4))
    assert "scripted" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_networks_are_refused_with_a_hint():
    net, x = small(), torch.randn(2, 3, 6, 6)
    for opaque in (torch.jit.trace(net, x), torch.jit.script(net)):
        opaque(x)
        before = [m.training for m in opaque.modules()]
        with pytest.raises(
            TapError, match=r"has no tap.*a scripted network cannot be watched, pass the nn\.Module"
        ):
            find_taps(opaque, x)
        assert [m.training for m in opaque.modules()] == before


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_hides_only_itself():
    part = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
    net = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 1), part=part, act=nn.GELU(), head=Head(4))).eval()
    taps, seen, _ = watched(net, x := torch.randn(2, 3, 4, 4))
    assert axes(taps) == {"conv": (1, 4), "act": (1, 4)}
    torch.testing.assert_close(seen["act"], F.gelu(part(net.conv(x))).flatten(2), rtol=1e-5, atol=1e-6)


# --- channel axes ------------------------------------------------------------------------------------


def axes(taps):
    return {tap.name: (tap.channel_axis, tap.channels) for tap in taps}


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x):
        out = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        out = self.fc2(F.gelu(self.fc1(out)))
        return F.relu(x + out.permute(0, 3, 1, 2))


@pytest.mark.parametrize("size", [4, 6])  # as many pixels along an axis as channels: shapes tell nothing
def test_channels_last_inside_channels_first(size):
    net = nn.Sequential(OrderedDict(block=ConvNeXtBlock(6), head=Head(6)))
    x = torch.randn(3, 6, size, 4)
    taps, seen, _ = watched(net, x)
    assert axes(taps) == {
        "block.dwconv": (1, 6),
        "block.fc1": (3, 24),
        "block.gelu": (3, 24),
        "block.fc2": (3, 6),
        "block.relu": (1, 6),
    }
    block = net.block
    hidden = F.gelu(block.fc1(block.norm(block.dwconv(x).permute(0, 2, 3, 1))))
    out = F.relu(x + block.fc2(hidden).permute(0, 3, 1, 2))
    torch.testing.assert_close(seen["block.gelu"], channels_at(hidden, 3), rtol=0, atol=0)
    torch.testing.assert_close(seen["block.relu"], out.flatten(2), rtol=0, atol=0)


class ViTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def attention(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        out = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(F.relu(out.transpose(1, 2).reshape(n, t, c)))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    def __init__(self, width=8, heads=2, tokens=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, tokens + 1, width))
        self.blocks = nn.Sequential(ViTBlock(width, heads), ViTBlock(width, heads))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(torch.tanh(self.norm(self.blocks(x)))[:, 0])


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_tokens_are_pixels(heads):
    net, x = ViT(heads=heads), torch.randn(3, 3, 8, 8)
    taps, seen, _ = watched(net, x)
    expected = {"patch_embed": (1, 8)}
    for i in "01":
        names = ["qkv", "relu", "proj", "fc1", "act", "fc2"]
        expected |= {f"blocks.{i}.{n}": (2, c) for n, c in zip(names, [24, 8, 8, 16, 16, 8], strict=True)}
    assert axes(taps) == expected | {"tanh": (2, 8)}
    assert seen["blocks.1.act"].shape == (3, 16, 5)
    check_alone(net, taps, x)
    tokens = net.patch_embed(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([net.cls_token.expand(3, -1, -1), tokens], 1) + net.pos_embed
    torch.testing.assert_close(
        seen["tanh"], net.norm(net.blocks(tokens)).tanh().transpose(1, 2), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoder(batch_first, activation):
    layer = nn.TransformerEncoderLayer(8, 2, 12, activation=activation, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    axis = 1 if batch_first else 0

    def forward(net, x):
        x = net.encoder(x if batch_first else x.transpose(0, 1))
        return net.fc(torch.sigmoid(x).mean(axis))

    net = Net(forward, encoder=encoder, fc=nn.Linear(8, CLASSES)).eval()
    x = torch.randn(3, 5, 8)
    taps, seen, logits = watched(net, x)
    names = ["self_attn", "linear1", activation, "linear2"]
    widths = [8, 12, 12, 8] * 2 + [8]
    assert taps.names == [f"encoder.layers.{i}.{name}" for i in "01" for name in names] + ["sigmoid"]
    assert [(tap.channel_axis, tap.channels) for tap in taps] == [(2, width) for width in widths]
    assert {tap.batch_axis for tap in taps if tap.kind != "attention"} == {1 - axis}
    assert taps[0].kind == "attention"
    assert all(maps.shape == (3, width, 5) for maps, width in zip(seen.values(), widths, strict=True))
    check_alone(net, taps, x)
    with torch.no_grad():
        y = x if batch_first else x.transpose(0, 1)
        first = encoder.layers[0]
        attended = first.self_attn(y, y, y, need_weights=False)[0]
        hidden = first.linear1(first.norm1(y + attended))
        final = encoder(y).sigmoid()
    if not batch_first:
        attended, hidden, final = (t.transpose(0, 1) for t in (attended, hidden, final))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(seen["encoder.layers.0.self_attn"], attended.transpose(1, 2), **close)
    torch.testing.assert_close(seen["encoder.layers.0.linear1"], hidden.transpose(1, 2), **close)
    torch.testing.assert_close(seen["sigmoid"], final.transpose(1, 2), **close)
    torch.testing.assert_close(logits, net(x), **close)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(batch_first, need_weights):
    def forward(net, x):
        y = x if batch_first else x.transpose(0, 1)
        out, weights = net.attention(y, y, y, need_weights=need_weights)
        assert (weights is not None) == need_weights
        return net.fc(out.mean(1 if batch_first else 0))

    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    net = Net(forward, attention=attention, fc=nn.Linear(8, CLASSES)).eval()
    x = torch.randn(3, 5, 8)
    taps, seen, _ = watched(net, x)
    (tap,) = taps
    assert (tap.name, tap.kind, tap.channels) == ("attention", "attention", 8)
    y = x if batch_first else x.transpose(0, 1)
    with torch.no_grad():
        out = attention(y, y, y)[0]
    out = out if batch_first else out.transpose(0, 1)
    torch.testing.assert_close(seen["attention"], out.transpose(1, 2), rtol=1e-4, atol=1e-5)
    check_alone(net, taps, x)


def test_sequences():
    def forward(net, x):
        x = F.relu(net.bn(net.conv(x)))  # channels first
        x = torch.tanh(net.mix(x.transpose(1, 2)))  # channels last
        x, _ = net.lstm(x)
        return net.fc(F.gelu(x)[:, -1])

    net = Net(
        forward,
        conv=nn.Conv1d(4, 6, 3),
        bn=nn.BatchNorm1d(6),
        mix=nn.Linear(6, 7),
        lstm=nn.LSTM(7, 9, batch_first=True),
        fc=nn.Linear(9, CLASSES),
    ).eval()
    x = torch.randn(3, 4, 10)
    taps = watched(net, x)[0]
    expected = {"conv": (1, 6), "relu": (1, 6), "mix": (2, 7), "tanh": (2, 7)}
    assert axes(taps) == {**expected, "lstm": (2, 9), "gelu": (2, 9)}
    check_alone(net, taps, x)


def test_vectors():
    net = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 5)
    )
    taps, seen, _ = watched(net, torch.randn(3, 4))
    assert axes(taps) == {"0": (1, 6), "1": (1, 6), "2": (1, 7), "4": (1, 7)}
    assert all(tap.is_vector for tap in taps)
    assert all(maps.shape == (3, tap.channels, 1) for tap, maps in zip(taps, seen.values(), strict=True))


MOVES = {
    "nothing": (lambda x: x, 1),
    "permute": (lambda x: x.permute(0, 2, 3, 1), 3),
    "torch.permute": (lambda x: torch.permute(x, (0, 2, 1, 3)), 2),
    "transpose": (lambda x: x.transpose(1, 3), 3),
    "transpose_": (lambda x: x.transpose_(1, 3), 3),
    "swapaxes": (lambda x: x.swapaxes(1, 2), 2),
    "movedim": (lambda x: x.movedim(1, -1), 3),
    "mT": (lambda x: x.transpose(1, 2).mT, 3),
    "moved and added to": (lambda x: x.permute(0, 2, 3, 1) + torch.ones(4), 3),
    "flatten then transpose": (lambda x: x.flatten(2).transpose(1, 2), 2),
    "transpose then reshape": (lambda x: x.permute(0, 2, 3, 1).reshape(len(x), -1, 4), 2),
    "batch and pixels together": (lambda x: x.permute(0, 2, 3, 1).reshape(-1, 4), 1),
    "mean": (lambda x: x.mean((2, 3)), 1),
    "mean of one axis": (lambda x: x.mean(2), 1),
    "mean, channels last": (lambda x: x.permute(0, 2, 3, 1).mean(1), 2),
    "amax": (lambda x: x.amax(3), 1),
    "max": (lambda x: x.max(3).values, 1),
    "unsqueeze": (lambda x: x.unsqueeze(1), 2),
    "unsqueeze_": (lambda x: x.unsqueeze_(1), 2),
    "index with None": (lambda x: x[:, None], 2),
    "index away an axis": (lambda x: x.permute(0, 2, 3, 1)[:, 0], 2),
    "index a range": (lambda x: x.permute(0, 2, 3, 1)[:, 1:, ::2], 3),
    "index of a tensor": (lambda x: x.permute(2, 3, 0, 1)[torch.tensor([0, 1, 1])], 3),
    "index of a tensor made of it": (
        lambda x: x.permute(0, 2, 3, 1)[torch.arange(len(x))[:, None], x.sum((1, 3)).argsort(1)],
        3,
    ),
    "select": (lambda x: x.permute(0, 2, 3, 1).select(2, 0), 2),
    "stack": (lambda x: torch.stack([x, 2 * x], 1), 2),
    "stack last": (lambda x: torch.stack([x.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1) + 1], -2), 4),
    "cat of pixels": (lambda x: torch.cat([x.permute(0, 2, 3, 1)] * 2, 1), 3),
    "cat of channels": (lambda x: torch.cat([x.permute(0, 2, 3, 1)] * 2, 3), 3),
    "chunk": (lambda x: x.permute(0, 2, 3, 1).chunk(2, 3)[1], 3),
    "split": (lambda x: x.permute(0, 2, 3, 1).split([1, 3], 3)[1], 3),
    "unbind": (lambda x: x.permute(2, 0, 3, 1).unbind(0)[1], 2),
    "iterate": (lambda x: list(x.permute(2, 0, 3, 1))[1], 2),
    "roll": (lambda x: x.permute(0, 2, 3, 1).roll((1, 1), (1, 2)), 3),
    "flip": (lambda x: x.permute(0, 2, 3, 1).flip(3), 3),
    "pad": (lambda x: F.pad(x.permute(0, 2, 3, 1), (0, 0, 1, 1)), 3),
    "pool": (lambda x: F.max_pool2d(x, 2), 1),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), 1),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), 1),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), 1),
    "patch merging": (
        lambda x: x.permute(0, 2, 3, 1).reshape(len(x), 2, 2, 3, 2, 4).permute(0, 1, 3, 4, 2, 5).flatten(3),
        3,
    ),
    "channel shuffle": (lambda x: x.unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2).transpose(1, 3), 3),
    "space to depth by unfold": (lambda x: F.unfold(x, 3, padding=1), 1),
    "heads": (lambda x: x.permute(0, 2, 3, 1).unflatten(3, (2, 2)).permute(0, 3, 1, 2, 4), 4),
    "heads and back": (
        lambda x: x.flatten(2).mT.unflatten(2, (2, 2)).transpose(1, 2).transpose(1, 2).flatten(2),
        2,
    ),
    "attention": (lambda x: (x.flatten(2) @ x.flatten(2).mT).softmax(-1) @ x.flatten(2), 1),
    "token attention": (
        lambda x: (x.flatten(2).mT @ x.flatten(2)).softmax(-1) @ x.flatten(2).mT,
        2,
    ),
    "attention of few queries": (  # of which the products have the shape of other tensors
        lambda x: (x.flatten(2).mT[:, :4] @ x.flatten(2)).softmax(-1) @ x.flatten(2).mT,
        2,
    ),
    "sdpa": (lambda x: F.scaled_dot_product_attention(*[x.flatten(2).mT] * 3), 2),
    "matmul": (lambda x: x.permute(0, 2, 3, 1) @ torch.ones(4, 5), 3),
    "matmul from the left": (lambda x: torch.ones(5, 4) @ x.flatten(2), 1),
    "group_norm": (lambda x: F.group_norm(x, 2), 1),
    "layer_norm": (lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,)), 3),
    "written into": (lambda x: torch.zeros(len(x), 2, 4, 4, 6).copy_(x[:, None]), 2),
}


@pytest.mark.parametrize("case", MOVES)
def test_the_channel_axis_is_followed(case):
    move, axis = MOVES[case]
    net = Net(
        lambda net, x: net.fc(F.relu(move(net.conv(x))).reshape(len(x), -1)[:, :4]),
        conv=nn.Conv2d(3, 4, 1),
        fc=nn.Linear(4, CLASSES),
    )
    x = torch.randn(3, 3, 4, 6)
    taps, seen, _ = watched(net, x)
    moved = move(net.conv(x).detach()).relu()
    assert taps.names == ["conv", "relu"]
    assert (taps[1].channel_axis, taps[1].channels) == (axis, moved.shape[axis])
    if taps[1].batch_axis == 0:
        expected = channels_at(moved.reshape(len(x), -1, *moved.shape[1:]), axis + 1)
        torch.testing.assert_close(seen["relu"], expected, rtol=1e-5, atol=1e-6)
    check_alone(net, taps, x)


LAYOUTS = {
    "images": (lambda net, x: x, (4, 5, 6), 1),
    "tokens": (lambda net, x: x, (5, 4), 2),
    "vectors": (lambda net, x: x, (4,), 1),
    "images, examples second": (lambda net, x: x.transpose(0, 1), (4, 5, 6), 0),
    "volumes": (lambda net, x: x, (4, 2, 3, 2), 1),
    "normalised sequences": (lambda net, x: F.batch_norm(x, None, None, training=True), (4, 5), 1),
    "sequences in groups": (lambda net, x: F.group_norm(x, 2), (4, 5), 1),
    "instances": (lambda net, x: F.instance_norm(x), (4, 5), 1),
    "normalised tokens": (lambda net, x: F.layer_norm(x, (4,)).transpose(1, 2), (5, 4), 1),
    "channels last": (lambda net, x: F.layer_norm(x, (4,)), (5, 6, 4), 3),
    "rms": (lambda net, x: F.rms_norm(x, (4,)), (5, 6, 4), 3),
    "embedding": (lambda net, x: net.embed(x[..., 0].long().clamp(0, 9)).transpose(1, 2), (5, 4), 1),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_channel_axis_before_any_layer(case):
    function, shape, axis = LAYOUTS[case]
    net = Net(
        lambda net, x: net.fc(F.silu(function(net, x)).flatten(1)[:, :4]),
        embed=nn.Embedding(10, 4),
        fc=nn.Linear(4, CLASSES),
    )
    (tap,) = find_taps(net, torch.randn(3, *shape))
    assert (tap.name, tap.channel_axis, tap.channels) == ("silu", axis, 4)


def test_a_gate_of_one_number_for_each_example():
    net = Net(
        lambda net, x: net.head((y := net.conv(x)) * torch.sigmoid(y.mean((1, 2, 3)))[:, None, None, None]),
        conv=nn.Conv2d(3, 4, 1),
        head=Head(4),
    )
    x = torch.randn(3, 3, 5, 5)
    taps, seen, _ = watched(net, x)
    assert taps.names == ["conv", "sigmoid"]
    assert taps[1].channels == 1
    torch.testing.assert_close(seen["sigmoid"].flatten(), net.conv(x).mean((1, 2, 3)).sigmoid())
    assert seen["sigmoid"].shape == (3, 1, 1)


# --- more than examples along the batch axis ---------------------------------------------------------


def windows_of(x, size):
    """(N, H, W, C) as (N * windows, size * size, C), as in Swin."""
    n, h, w, c = x.shape
    x = x.view(n, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, size * size, c)


def test_windows_folded_into_the_batch():
    def forward(net, x):
        x = windows_of(net.embed(x).permute(0, 2, 3, 1), 2)
        x = F.gelu(net.mlp(x))
        return net.fc(x.view(-1, 6, 4, 7).mean((1, 2)))

    net = Net(forward, embed=nn.Conv2d(3, 5, 1), mlp=nn.Linear(5, 7), fc=nn.Linear(7, CLASSES))
    x = torch.randn(3, 3, 4, 6)
    taps, seen, _ = watched(net, x)
    assert [(tap.name, tap.shape, tap.channel_axis) for tap in taps[1:]] == [
        ("mlp", (6, 4, 7), 2),
        ("gelu", (6, 4, 7), 2),
    ]
    assert all(tap.examples_first for tap in taps)
    assert seen["gelu"].shape == (3, 7, 6 * 4)
    for i in range(3):
        windows = windows_of(net.embed(x[i : i + 1]).permute(0, 2, 3, 1), 2)
        out = F.gelu(net.mlp(windows)).flatten(0, 1).t()
        torch.testing.assert_close(seen["gelu"][i], out, rtol=1e-5, atol=1e-6)


def test_a_vector_for_each_window_has_pixels():
    net = Net(
        lambda net, x: net.fc(F.relu(net.mlp(x.reshape(-1, 4))).view(len(x), -1, 6).mean(1)),
        mlp=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    x = torch.randn(3, 5, 4)
    taps, seen, _ = watched(net, x)
    assert [tap.shape for tap in taps] == [(5, 6), (5, 6)]
    assert not taps[0].is_vector
    torch.testing.assert_close(seen["relu"], net.mlp(x).relu().transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fold", ["time first", "crops"])
def test_examples_last_along_the_batch_axis(fold):
    def forward(net, x):
        n = len(x)
        if fold == "time first":
            y = net.mlp(x.transpose(0, 1).reshape(-1, 4))  # (T * N, 4)
        else:
            y = net.mlp(torch.cat(x.unbind(1)))
        return net.fc(F.relu(y).view(-1, n, 6).mean(0))

    net = Net(forward, mlp=nn.Linear(4, 6), fc=nn.Linear(6, CLASSES))
    x = torch.randn(3, 5, 4)
    taps, seen, _ = watched(net, x)
    assert [tap.examples_first for tap in taps] == [False, False]
    torch.testing.assert_close(seen["mlp"], net.mlp(x).transpose(1, 2), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen["relu"], net.mlp(x).relu().transpose(1, 2), rtol=1e-5, atol=1e-6)
    check_alone(net, taps, x)


def test_a_folded_tensor_that_is_given_another_shape_in_place():
    net = Net(
        lambda net, x: net.fc(F.relu(net.mlp(x.reshape(-1, 4))).unsqueeze_(0).view(len(x), 5, 6).mean(1)),
        mlp=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    x = torch.randn(3, 5, 4)
    taps, seen, _ = watched(net, x)
    assert [tap.shape for tap in taps] == [(5, 6), (5, 6)]
    torch.testing.assert_close(seen["relu"], net.mlp(x).relu().transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_channels_folded_into_the_batch():
    """A convolution with weights of each example's own, run as one grouped convolution (CondConv)."""

    def forward(net, x):
        n, c, h, w = x.shape
        weight = net.weight[None] * net.route(x.mean((2, 3))).sigmoid()[:, :, None, None, None]
        y = F.conv2d(x.reshape(1, n * c, h, w), weight.flatten(0, 1), groups=n)
        return net.head(F.relu(y.view(n, 6, h, w)))

    net = Net(forward, weight=nn.Parameter(torch.randn(6, 3, 1, 1)), route=nn.Linear(3, 6), head=Head(6))
    x = torch.randn(4, 3, 5, 5)
    taps, seen, _ = watched(net, x)
    assert taps.names == ["route", "sigmoid", "conv2d", "relu"]
    assert (taps[2].batch_axis, taps[2].channel_axis, taps[2].channels) == (1, 1, 6)
    gates = net.route(x.mean((2, 3))).sigmoid()
    expected = F.conv2d(x, net.weight) * gates[:, :, None, None]
    torch.testing.assert_close(seen["conv2d"], expected.flatten(2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["relu"], expected.relu().flatten(2), rtol=1e-4, atol=1e-5)


def test_maps_of_a_tap_written_by_hand():
    x = torch.randn(4, 5, 6)  # pixels, examples, channels
    tap = Tap("t", "linear", "linear", (4, 1, 6), batch_axis=1, channel_axis=2, call=0)
    torch.testing.assert_close(tap.maps(x, 5), x.permute(1, 2, 0), rtol=0, atol=0)
    assert tap.channels == 6
    image = torch.randn(3, 4, 5, 6)
    tap = Tap("t", "convolution", "conv2d", (1, 4, 5, 6), 0, 1, 0)
    maps = tap.maps(image, 3)
    assert maps.data_ptr() == image.data_ptr()  # no copy
    torch.testing.assert_close(maps, image.flatten(2), rtol=0, atol=0)
    last = image.contiguous(memory_format=torch.channels_last)
    assert tap.maps(last, 3).data_ptr() == last.data_ptr()
    larger = torch.randn(3, 4, 5, 7)
    torch.testing.assert_close(tap.maps(larger, 3), larger.flatten(2), rtol=0, atol=0)
    for wrong in (
        torch.randn(2, 4, 5, 6),
        torch.randn(3, 4, 0, 6),
        torch.randn(3, 4, 5),
        torch.randn(4, 3, 5, 6),
    ):
        with pytest.raises(TapError, match=r"tap 't' has shape .*, expected \(3, 4, 5, 6\)"):
            tap.maps(wrong, 3)


# --- what does not depend on the input ---------------------------------------------------------------


def test_values_that_do_not_depend_on_the_input_are_not_taps():
    def forward(net, x):
        gate = torch.sigmoid(net.alpha)  # no batch axis at all
        query = net.query(net.token.expand(len(x), -1))  # a parameter, once for each example
        table = F.gelu(net.table.relu()[None].repeat(len(x), 1))  # a buffer
        grid = torch.tanh(net.grid(torch.linspace(0, 1, 6).repeat(len(x), 1)))
        hidden = F.relu(net.hidden(x) * gate + query + table + grid)
        return net.fc(hidden)

    net = Net(
        forward,
        alpha=nn.Parameter(torch.randn(6)),
        token=nn.Parameter(torch.randn(1, 4)),
        query=nn.Linear(4, 6),
        grid=nn.Linear(6, 6),
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    net.register_buffer("table", torch.randn(6))
    x = torch.randn(3, 4)
    taps, seen, _ = watched(net, x)
    assert taps.names == ["hidden", "relu#2"]
    assert len(taps.operations) == 9
    varying = [maps.flatten(1).std(0).max() > 1e-3 for maps in seen.values()]
    assert all(varying)
    with pytest.raises(TapError, match="no tap matches 'query'"):
        find_taps(net, x, "query")


def test_what_a_network_keeps_does_not_depend_on_the_input():
    """As ConViT does: a table is computed at the first call, and found at the second."""

    def forward(net, x):
        if net.table is None:
            net.table = torch.linspace(0, 1, 4)[None]
            net.tables["more"] = torch.linspace(1, 2, 4)[None]
        kept = net.embed(net.table.expand(len(x), -1)) + F.relu(net.tables["more"]).expand(len(x), -1)
        return net.fc(torch.tanh(net.hidden(x)) + kept)

    net = Net(forward, embed=nn.Linear(4, 4), hidden=nn.Linear(4, 4), fc=nn.Linear(4, CLASSES))
    net.table, net.tables = None, {}
    x = torch.randn(2, 4)
    assert find_taps(net, x).names == ["hidden", "tanh"]
    assert net.table is not None
    assert find_taps(net, x).names == ["hidden", "tanh"]


@pytest.mark.parametrize("how", ["setitem", "copy", "out", "add", "view"])
def test_a_tensor_that_the_input_is_written_into_is_a_tap(how):
    def forward(net, x):
        room = torch.zeros(len(x), 4)
        if how == "setitem":
            room[:, :3] = x[:, :3]
        elif how == "copy":
            room[:, :3].copy_(x[:, :3])
        elif how == "out":
            torch.mul(x, 2, out=room)
        elif how == "add":
            room += x
        else:
            room.view(-1)[:] = x.reshape(-1)
        return net.fc(F.relu(room))

    net = Net(forward, fc=nn.Linear(4, CLASSES))
    assert find_taps(net, torch.randn(3, 4)).names == ["relu"]


def test_input_through_an_unseen_function_is_still_watched():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(x.detach().numpy() * 2)

    net = Net(
        lambda net, x: net.fc(F.relu(Double.apply(net.hidden(x)))), hidden=nn.Linear(4, 6), fc=nn.Linear(6, 5)
    )
    taps, seen, _ = watched(net, x := torch.randn(3, 4))
    assert taps.names == ["hidden", "relu"]
    torch.testing.assert_close(seen["relu"][..., 0], (2 * net.hidden(x)).relu())


# --- when, and for how long --------------------------------------------------------------------------


def test_the_tensor_is_handed_over_when_it_is_made():
    order = []

    class Layer(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name, self.conv = name, nn.Conv2d(3, 3, 1)

        def forward(self, x):
            order.append(f"begin {self.name}")
            x = self.conv(x)
            order.append(f"end {self.name}")
            return x

    net = nn.Sequential(Layer("a"), Layer("b"), Head(3))
    x = torch.randn(2, 3, 4, 4)
    taps = find_taps(net, x)
    order.clear()
    observe(net, taps, x, lambda number, _: order.append(taps[number].name))
    assert order == ["begin a", "0.conv", "end a", "begin b", "1.conv", "end b"]


def test_a_tapped_tensor_is_let_go():
    kept = []

    def forward(net, x):
        for conv in net.convs:
            x = conv(x)
            if net.armed:
                assert all(ref() is None for ref in kept[:-1]), "an earlier tensor is still alive"
                kept.append(weakref.ref(x))
        return net.head(x)

    net = Net(forward, convs=nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(4)), head=Head(3))
    net.armed = False
    x = torch.randn(2, 3, 4, 4)
    taps = find_taps(net, x)
    assert len(taps) == 4
    net.armed = True
    sums = []
    observe(net, taps, x, lambda _, maps: sums.append(float(maps.sum())))
    assert len(sums) == len(kept) == 4
    assert all(ref() is None for ref in kept)


def test_nothing_of_finding_taps_is_kept():
    kept = []
    net = small()
    handle = net.conv.register_forward_hook(lambda module, args, out: kept.append(weakref.ref(out)))
    taps = find_taps(net, torch.randn(2, 3, 6, 6))
    handle.remove()
    gc.collect()
    assert len(taps) == 3
    assert len(kept) == 2
    assert all(ref() is None for ref in kept)


# --- the network is left as found --------------------------------------------------------------------


class Mixed(nn.Module):
    """Parts in training and parts in evaluation mode; dropout and batch normalisation."""

    def __init__(self, fail=False):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.frozen = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = Head(4)
        self.fail = fail
        self.train()
        self.frozen.eval()
        self.frozen[2].train()
        self.head.training = False

    def forward(self, x):
        x = self.drop(self.frozen(self.bn(self.conv(x)).relu_()))
        if self.fail:
            raise KeyError("in the network")
        return self.head(x)


def state(net):
    """All there is to a network that can be seen from outside."""
    hooks = [
        [dict(getattr(m, name)) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
        for m in net.modules()
    ]
    flags = [m.training for m in net.modules()]
    tensors = [(n, t.clone(), t.requires_grad, t.grad) for n, t in net.state_dict(keep_vars=True).items()]
    attributes = [sorted(vars(m)) for m in net.modules()]
    return hooks, flags, attributes, tensors


def assert_untouched(before, after):
    assert before[:3] == after[:3]
    for (name, value, needs, grad), (name2, value2, needs2, grad2) in zip(before[3], after[3], strict=True):
        assert (name, needs, grad) == (name2, needs2, grad2)
        assert value.equal(value2), name


def test_the_network_is_left_as_found():
    net, x = Mixed(), torch.randn(3, 3, 6, 6)
    net.conv.register_forward_hook(lambda *_: None)
    net.bn.register_forward_pre_hook(lambda *_: None)
    before, random = state(net), torch.get_rng_state()
    taps = find_taps(net, x)
    assert_untouched(before, state(net))
    flags = []
    seen = {}

    def receive(number, maps):
        flags.append([m.training for m in net.modules()])
        seen[taps[number].name] = maps.clone()

    logits = observe(net, taps, x, receive)
    assert len(flags) == len(taps)
    assert not any(any(each) for each in flags)
    assert_untouched(before, state(net))
    assert torch.get_rng_state().equal(random)
    assert torch.is_grad_enabled()
    net.eval()
    torch.testing.assert_close(logits, net(x), rtol=0, atol=0)
    hidden = net.bn(net.conv(x)).relu()
    torch.testing.assert_close(seen["relu"], hidden.flatten(2), rtol=0, atol=0)


def test_the_network_is_left_as_found_after_an_exception():
    net, x = Mixed(), torch.randn(3, 3, 6, 6)
    taps = find_taps(net, x)
    before = state(net)

    def break_off(number, maps):
        raise KeyError("in the caller")

    with pytest.raises(KeyError, match="in the caller"):
        observe(net, taps, x, break_off)
    assert_untouched(before, state(net))
    net.fail = True
    for call in (lambda: find_taps(net, x), lambda: observe(net, taps, x, lambda *_: None)):
        with pytest.raises(KeyError, match="in the network"):
            call()
        assert_untouched(before, state(net))
    net.fail = False
    with pytest.raises(TapError, match="no tap matches"):
        find_taps(net, x, "nothing")
    wider = Taps([replace(taps[0], shape=(1, 5, 4, 4)), *taps[1:]], taps.operations)
    with pytest.raises(TapError, match="has shape"):
        observe(net, wider, x, lambda *_: None)
    assert_untouched(before, state(net))
    assert find_taps(net, x) == taps  # and works again


def test_an_exception_inside_that_the_network_catches():
    class Fails(nn.Module):
        def forward(self, x):
            raise ArithmeticError

    def forward(net, x):
        try:
            x = net.fails(x)
        except ArithmeticError:
            x = net.conv(x)
        return net.head(F.relu(x))

    net = Net(forward, fails=Fails(), conv=nn.Conv2d(3, 4, 1), head=Head(4))
    assert find_taps(net, torch.randn(2, 3, 4, 4)).names == ["conv", "relu"]


def test_what_a_network_keeps_is_of_use_in_training():
    """A table computed at the first call must not be an inference tensor, whoever calls first."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.table = nn.Linear(4, 6), nn.Linear(6, CLASSES), None

        def forward(self, x):
            if self.table is None:
                self.table = torch.linspace(0, 1, 6).cos()
            return self.fc2(torch.relu(self.fc1(x)) * self.table)

    for first in ("find_taps", "observe", "fit"):
        net, x = Keeps(), torch.randn(40, 4)
        if first == "find_taps":
            with torch.inference_mode():
                find_taps(net, x)
        elif first == "observe":
            taps = find_taps(net, x)
            net.table = None
            with torch.inference_mode():
                observe(net, taps, x, lambda *_: None)
        else:
            with pytest.warns(gramwatch.GramwatchWarning):
                GramDetector(net, orders=[1]).fit([x], progress=False)
        assert net.table is not None
        net(x).sum().backward()
        assert net.fc1.weight.grad is not None


def test_what_a_network_keeps_while_evaluating_is_forgotten():
    """As LeViT does: a bias is looked up once in evaluation mode, and forgotten when training begins."""

    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias, self.cache = nn.Parameter(torch.zeros(6)), None

        def train(self, mode=True):
            super().train(mode)
            if mode:
                self.cache = None

        def forward(self, x):
            if self.training:
                return x + self.bias
            if self.cache is None:
                self.cache = self.bias.detach().clone()
            return x + self.cache

    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Caches(), nn.Linear(6, CLASSES)).train()
    net[3].training = False
    x = torch.randn(3, 4)
    taps = find_taps(net, x)
    observe(net, taps, x, lambda *_: None)
    assert [m.training for m in net] == [True, True, True, False]
    with torch.no_grad():
        net[2].bias += 1
    net.eval()
    torch.testing.assert_close(net(x), net[3](net[0](x).relu() + 1))


def test_a_module_that_prepares_for_evaluation():
    class Prepares(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.fused = nn.Parameter(torch.randn(6, 4)), None

        def train(self, mode=True):
            self.fused = None if mode else 2 * self.weight.detach()
            return super().train(mode)

        def forward(self, x):
            return F.linear(x, 2 * self.weight if self.training else self.fused)

    net = nn.Sequential(Prepares(), nn.ReLU(), nn.Linear(6, CLASSES)).train()
    taps, seen, _ = watched(net, x := torch.randn(3, 4))
    assert taps.names == ["0", "1"]
    torch.testing.assert_close(seen["0"][..., 0], x @ (2 * net[0].weight).t())
    assert net[0].fused is None
    assert net[0].training


def test_a_train_method_that_will_not_have_evaluation():
    class Stubborn(nn.Sequential):
        def train(self, mode=True):
            return super().train(True)

    net = Stubborn(nn.Linear(4, 40), nn.ReLU(), nn.Dropout(0.5), nn.Linear(40, CLASSES))
    x = torch.randn(3, 4)
    taps, _, logits = watched(net, x)
    torch.testing.assert_close(logits, net[3](net[0](x).relu()), rtol=0, atol=0)
    assert all(m.training for m in net.modules())
    assert taps.names == ["0", "1"]


def test_a_network_that_writes_into_its_input():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    x = torch.randn(3, 4)
    with torch.inference_mode():
        taps = find_taps(net, x.clone())
        seen, _ = watch(net, taps, x.clone())
    torch.testing.assert_close(seen["0"][..., 0], x.relu(), rtol=0, atol=0)


def test_gradients_are_not_computed_and_the_callers_mode_is_kept():
    net, x = small(), torch.randn(2, 3, 6, 6)
    with torch.enable_grad():
        taps, seen, logits = watched(net, x.requires_grad_())
        assert torch.is_grad_enabled()
    assert not logits.requires_grad
    assert not any(maps.requires_grad for maps in seen.values())
    with torch.inference_mode():
        watch(net, taps, x)
        assert torch.is_inference_mode_enabled()


def test_a_call_that_writes_is_made_once():
    net = Net(
        lambda net, x: (net.total.add_((y := net.hidden(x)).sum(0)), net.fc(F.relu(y) + net.total.sum(0)))[1],
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    net.register_buffer("total", torch.zeros(2, 6))
    x = torch.randn(3, 4)
    assert find_taps(net, x).names == ["hidden", "relu"]
    # Run on two, then on three copies of the first example.
    torch.testing.assert_close(net.total, 5 * net.hidden(x[:1]).expand(2, 6))


def test_lazy_modules_are_made_on_the_way():
    net = nn.Sequential(
        nn.LazyConv2d(4, 1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6), nn.LazyLinear(CLASSES)
    )
    taps, _, _ = watched(net, torch.randn(2, 3, 4, 4))
    assert axes(taps) == {"0": (1, 4), "1": (1, 4), "3": (1, 6)}


def test_half_precision_and_autocast():
    net, x = small().bfloat16(), torch.randn(2, 3, 6, 6).bfloat16()
    taps, seen, _ = watched(net, x)
    assert taps == find_taps(small(), x.float())
    assert seen["conv"].dtype == torch.bfloat16
    net, x = small(), torch.randn(2, 3, 6, 6)
    with torch.autocast("cpu", torch.bfloat16):
        again, seen, _ = watched(net, x)
    assert again == taps
    assert seen["conv"].dtype == torch.bfloat16


# --- threads -----------------------------------------------------------------------------------------


def test_a_thread_that_finishes_does_not_disturb_one_that_runs():
    net, x = Mixed(), torch.randn(3, 3, 6, 6)
    taps = find_taps(net, x)
    before = state(net)
    expected, expected_logits = watch(net, taps, x)
    began, other_done = threading.Event(), threading.Event()
    results = {}

    def slow():
        seen = {}

        def receive(number, maps):
            seen[taps[number].name] = maps.clone()
            if number == 0:
                began.set()
                assert other_done.wait(30)

        results["logits"] = observe(net, taps, x, receive)
        results["seen"] = seen

    thread = threading.Thread(target=slow)
    thread.start()
    assert began.wait(30)
    assert not net.training  # the other is in the middle
    seen, logits = watch(net, taps, x)
    find_taps(net, x)
    assert not net.training  # and still is
    other_done.set()
    thread.join(30)
    assert_untouched(before, state(net))
    for found, found_logits in ((seen, logits), (results["seen"], results["logits"])):
        torch.testing.assert_close(found_logits, expected_logits, rtol=1e-5, atol=1e-6)
        assert list(found) == list(expected)
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_many_threads_at_once_on_a_network_in_training_mode():
    net = Mixed()
    xs = [torch.randn(n + 1, 3, 6, 6) for n in range(4)]
    taps = find_taps(net, xs[0])
    before = state(net)
    expected = [watch(net, taps, x) for x in xs]
    barrier, failures, done = threading.Barrier(len(xs)), [], []

    def work(number):
        try:
            barrier.wait(30)
            for _ in range(15):
                seen, logits = watch(net, taps, xs[number])
                torch.testing.assert_close(logits, expected[number][1], rtol=1e-5, atol=1e-6)
                for name in taps.names:
                    torch.testing.assert_close(seen[name], expected[number][0][name], rtol=1e-5, atol=1e-6)
                assert find_taps(net, xs[number]) == taps
            done.append(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sorted(done) == [0, 1, 2, 3]
    assert_untouched(before, state(net))


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="needs PyTorch 2.6")
def test_threads_leave_compiling_as_found():
    backend, graphs = counting_backend()
    part = nn.Conv2d(3, 3, 1)
    net = nn.Sequential(torch.compile(part, backend=backend), nn.ReLU(), Head(3)).eval()
    x = torch.randn(2, 3, 4, 4)
    with pytest.warns(GramwatchWarning, match="is compiled"):
        taps = find_taps(net, x)
    began, go = threading.Event(), threading.Event()

    def slow():
        def receive(number, _):
            began.set()
            assert go.wait(30)

        observe(net, taps, x, receive)

    thread = threading.Thread(target=slow)
    thread.start()  # begins first and ends first, in the middle of ours
    assert began.wait(30)

    def receive(number, _):
        go.set()
        thread.join(30)

    observe(net, taps, x, receive)
    assert not thread.is_alive()
    assert graphs == []
    net(x)
    assert len(graphs) == 1


# --- addmm and recurrent layers ----------------------------------------------------------------------


class Rows(nn.Module):
    """A linear layer as GPT-2 writes it: the weight transposed, examples and tokens in one axis."""

    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inside, outside))
        self.bias = nn.Parameter(torch.randn(outside))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


def test_addmm_is_a_linear_layer():
    net = Net(
        lambda net, x: net.fc(net.act(net.rows(x)).mean(1)), rows=Rows(4, 6), act=nn.GELU(), fc=Rows(6, 5)
    )
    x = torch.randn(3, 7, 4)
    taps, seen, logits = watched(net, x)
    assert axes(taps) == {"rows": (1, 6), "act": (2, 6)}
    assert [tap.kind for tap in taps] == ["linear", "activation"]
    made = (x @ net.rows.weight + net.rows.bias).transpose(1, 2)
    torch.testing.assert_close(seen["rows"], made, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen["act"], F.gelu(made), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, net(x), rtol=0, atol=0)
    check_alone(net, taps, x)


@pytest.mark.parametrize(
    ("head", "found"),
    [
        (lambda net, x: torch.addmm(net.fc.bias, x, net.fc.weight), 2),
        (lambda net, x: net.fc.bias.addmm(x, net.fc.weight), 2),
        (lambda net, x: torch.addmm(net.fc.bias, x, net.fc.weight, beta=3, alpha=2), 2),
        (lambda net, x: torch.addmm(input=net.fc.bias, mat1=x, mat2=net.fc.weight), 2),
        (lambda net, x: torch.addmm(x[:, :5], x, net.fc.weight), None),  # adds a matrix, not a bias
    ],
)
def test_the_head_may_be_an_addmm(head, found):
    net = Net(lambda net, x: head(net, F.relu(net.hidden(x))), hidden=nn.Linear(4, 6), fc=Rows(6, 5))
    x = torch.randn(3, 4)
    assert find_taps(net, x).names == ["hidden", "relu"]
    assert find_head(net, x) == found
    if found is not None:
        seen = gramwatch.methods.METHODS["react"](net).observe(x)
        torch.testing.assert_close(seen.features, net.hidden(x).relu(), rtol=0, atol=0)
        torch.testing.assert_close(seen.head(seen.features), net(x), rtol=1e-5, atol=1e-5)


def test_an_addmm_of_those_who_watch_is_not_seen():
    net, x = small(), torch.randn(3, 3, 6, 6)
    taps = find_taps(net, x)

    def receive(number, maps):
        torch.addmm(maps.new_zeros(2), maps[:, 0], maps.new_ones(maps.shape[2], 2))

    torch.testing.assert_close(observe(net, taps, x, receive), net(x), rtol=0, atol=0)


def test_a_path_without_what_is_watched_since_then():
    net = Net(lambda net, x: net.fc(F.relu(net.rows(x))), rows=Rows(4, 6), fc=nn.Linear(6, CLASSES))
    x = torch.randn(2, 4)
    taps = find_taps(net, x)
    before = Taps([replace(taps[1], call=0)], ["relu", "linear"])
    with pytest.raises(TapError, match=r"calls 'addmm' where 'relu' .* did not watch 'addmm'.* fit anew"):
        observe(net, before, x, lambda *_: None)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_layers(kind, batch_first, directions):
    def forward(net, x):
        steps, _ = net.layer(x if batch_first else x.transpose(0, 1))
        return net.fc(torch.tanh(steps).mean(1 if batch_first else 0))

    net = Net(
        forward,
        layer=kind(4, 6, num_layers=2, batch_first=batch_first, bidirectional=directions == 2),
        fc=nn.Linear(6 * directions, CLASSES),
    )
    x = torch.randn(3, 7, 4)
    taps, seen, _ = watched(net, x)
    assert axes(taps) == {"layer": (2, 6 * directions), "tanh": (2, 6 * directions)}
    assert taps[0].kind == "recurrent"
    with torch.no_grad():  # with gradients, PyTorch takes another kernel
        made = net.layer(x if batch_first else x.transpose(0, 1))[0]
    maps = made.permute(0, 2, 1) if batch_first else made.permute(1, 2, 0)
    torch.testing.assert_close(seen["layer"], maps, rtol=0, atol=0)
    check_alone(net, taps, x)


def test_the_state_of_a_recurrent_layer_keeps_its_channels():
    net = Net(
        lambda net, x: net.fc(torch.tanh(net.layer(x)[1][0].transpose(0, 1))[:, -1]),
        layer=nn.LSTM(4, 6, num_layers=2, batch_first=True),
        fc=nn.Linear(6, CLASSES),
    )
    x = torch.randn(3, 7, 4)
    taps = watched(net, x)[0]
    assert axes(taps) == {"layer": (2, 6), "tanh": (2, 6)}
    assert [tap.pixels for tap in taps] == [7, 2]
    check_alone(net, taps, x)


def test_packed_sequences_are_not_watched():
    def forward(net, x):
        lengths = (x[:, :, 0] != 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        padded = nn.utils.rnn.pad_packed_sequence(net.layer(packed)[0], batch_first=True)[0]
        return net.fc(mark(padded, "padded").mean(1))

    net = Net(forward, layer=nn.GRU(4, 6, batch_first=True), fc=nn.Linear(6, CLASSES))
    x = torch.randn(3, 7, 4)
    x[1, 5:] = 0
    with pytest.raises(TapError, match=r"has no tap.*packed sequence is not watched.*gramwatch\.mark"):
        find_taps(net, x)
    taps, seen, _ = watched(net, x, "padded")
    assert axes(taps) == {"padded": (2, 6)}
    torch.testing.assert_close(seen["padded"][0], net.layer(x)[0][0].T, rtol=1e-5, atol=1e-6)


# --- where stages end --------------------------------------------------------------------------------


def last_of_each_size(taps):
    """What `taps="ends"` has always been where every stage ends in two channels or more."""
    last = {tap.pixels: tap.name for tap in taps}
    return [tap.name for tap in taps if last[tap.pixels] == tap.name]


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_ends_of_our_networks_are_the_last_of_each_size(name):
    net, x = networks.build(name).eval(), torch.randn(1, *networks.NETWORKS[name].shape)
    assert find_taps(net, x, "ends").names == last_of_each_size(find_taps(net, x))


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "test_vit3", "densenet121", "seresnet18"])
def test_ends_of_other_networks_are_the_last_of_each_size(name):
    net = pytest.importorskip("timm").create_model(name, num_classes=CLASSES).eval()
    x = torch.randn(1, 3, *net.pretrained_cfg["input_size"][1:] if "vit" in name else (64, 64))
    assert find_taps(net, x, "ends").names == last_of_each_size(find_taps(net, x))


def test_a_stage_that_ends_in_one_channel_ends_before_it():
    net = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(3, 4, 3),
            act=nn.ReLU(),
            gate=nn.Conv2d(4, 1, 1),
            sigmoid=nn.Sigmoid(),
            small=nn.Conv2d(1, 5, 3, stride=2),
            head=Head(5),
        )
    )
    x = torch.randn(2, 3, 8, 8)
    assert find_taps(net, x, "ends").names == ["act", "small"]


def test_a_stage_of_one_channel_is_left_out_once():
    net = nn.Sequential(
        OrderedDict(
            gate=nn.Conv2d(3, 1, 3), sigmoid=nn.Sigmoid(), small=nn.Conv2d(1, 5, 3, stride=2), head=Head(5)
        )
    )
    x = torch.randn(2, 3, 8, 8)
    with pytest.warns(GramwatchWarning, match=r"leaves out 1 stage\(s\) of Sequential.*: sigmoid"):
        assert find_taps(net, x, "ends").names == ["small"]
    assert find_taps(net, x, "ends").names == ["small"]
    assert find_taps(net, x).names == ["gate", "sigmoid", "small"]
    with pytest.raises(TapError, match="Sequential has no tap with two channels or more"):
        find_taps(nn.Sequential(nn.Conv2d(3, 1, 3), Head(1)), x, "ends")


# --- another path, other shapes ----------------------------------------------------------------------


def test_a_path_that_depends_on_the_batch_size():
    net = Net(
        lambda net, x: net.fc(F.relu(net.hidden(x)) if len(x) == 2 else torch.tanh(net.hidden(x))),
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    with pytest.raises(TapError, match="different calls for a batch of two and a batch of three"):
        find_taps(net, torch.randn(2, 4))


def test_a_path_for_each_example():
    net = Net(
        lambda net, x: net.fc(torch.stack([F.relu(net.hidden(one)) for one in x])),
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    with pytest.raises(TapError, match="its path depends on its input"):
        find_taps(net, torch.randn(2, 4))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: x.tanh(), r"calls 'tanh' where 'relu' was expected \(watched call 1\)"),
        (lambda x: x.relu().tanh(), r"calls 'tanh' where 'linear' was expected \(watched call 2\)"),
        (lambda x: x, r"calls 'linear' where 'relu' was expected \(watched call 1\)"),
    ],
)
def test_another_path_later(other, message):
    net = Net(
        lambda net, x: net.fc(F.relu(net.hidden(x)) if x.sum() > 0 else other(net.hidden(x))),
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    taps = find_taps(net, torch.ones(2, 4))
    observe(net, taps, torch.ones(5, 4), lambda *_: None)
    with pytest.raises(TapError, match=message):
        observe(net, taps, -torch.ones(2, 4), lambda *_: None)


def test_a_shorter_or_longer_path_later():
    net = Net(
        lambda net, x: net.extra(net.fc(net.hidden(x))),
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, 5),
        extra=nn.ReLU(),
    )
    x = torch.randn(2, 4)
    taps = find_taps(net, x)
    net.extra = nn.Identity()
    with pytest.raises(TapError, match="made 2 watched calls, 3 were expected"):
        observe(net, taps, x, lambda *_: None)
    net.extra = nn.Sequential(nn.ReLU(), nn.Tanh())
    with pytest.raises(TapError, match="calls 'tanh' where 'the end of the network' was expected"):
        observe(net, taps, x, lambda *_: None)


def test_other_shapes_than_when_found():
    net, x = small(), torch.randn(2, 3, 6, 6)
    taps = find_taps(net, x)
    larger = torch.randn(2, 3, 7, 6)
    seen, _ = watch(net, taps, larger)
    torch.testing.assert_close(seen["conv"], net.conv(larger).flatten(2), rtol=0, atol=0)
    folded = Net(
        lambda net, x: net.fc(F.relu(net.hidden(x).flatten(0, 1)).view(len(x), -1, 6).mean(1)),
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    found = find_taps(folded, torch.randn(2, 5, 4))
    assert [tap.shape for tap in found] == [(1, 5, 6), (5, 6)]
    with pytest.raises(TapError, match=r"tap 'relu' has shape \(14, 6\), expected \(10, 6\).* of one size"):
        observe(folded, found, torch.randn(2, 7, 4), lambda *_: None)
    net.conv = nn.Conv2d(3, 5, 3)
    net.more = nn.Conv2d(5, 6, 1)
    with pytest.raises(TapError, match=r"tap 'conv' has shape \(2, 5, 4, 4\), expected \(2, 4, 4, 4\)"):
        observe(net, taps, x, lambda *_: None)


# --- mark --------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 1)

    def forward(self, x):
        return F.relu(mark(x + self.conv(x), "sum"))


def test_mark_does_nothing_but_name():
    x = torch.randn(2, 3)
    assert mark(x, "anything") is x


def test_marked_tensors_are_watched_only_by_name():
    net = Net(
        lambda net, x: net.head(mark(net.layer1(x).permute(0, 2, 3, 1), "output").permute(0, 3, 1, 2)),
        layer1=nn.Sequential(Residual(3), Residual(3)),
        head=Head(3),
    )
    x = torch.randn(2, 3, 4, 5)
    assert find_taps(net, x).names == ["layer1.0.conv", "layer1.0.relu", "layer1.1.conv", "layer1.1.relu"]
    taps, seen, _ = watched(net, x, ["layer1.*.sum", "output"])
    assert taps.names == ["layer1.0.sum", "layer1.1.sum", "output"]
    assert [tap.kind for tap in taps] == ["mark"] * 3
    assert [tap.channel_axis for tap in taps] == [1, 1, 3]
    total = x + net.layer1[0].conv(x)
    torch.testing.assert_close(seen["layer1.0.sum"], total.flatten(2), rtol=0, atol=0)
    torch.testing.assert_close(seen["output"], net.layer1(x).flatten(2), rtol=0, atol=0)


def test_a_mark_is_transparent():
    net = Net(
        lambda net, x: mark(net.fc(mark(F.relu(net.hidden(x)), "features")), "logits"),
        hidden=nn.Linear(4, 6),
        fc=nn.Linear(6, CLASSES),
    )
    x = torch.randn(2, 4)
    assert find_taps(net, x).names == ["hidden", "relu"]
    taps, seen, _ = watched(net, x, ["features", "relu"])
    assert taps.names == ["relu", "features"]
    torch.testing.assert_close(seen["relu"], seen["features"], rtol=0, atol=0)


def test_marks_alone_are_no_taps():
    net = Net(lambda net, x: mark(x, "a") @ net.weight, weight=nn.Parameter(torch.randn(4, 5)))
    with pytest.raises(TapError, match="has no tap"):
        find_taps(net, torch.randn(2, 4))


# --- the list of taps --------------------------------------------------------------------------------


def test_taps_print_as_a_table():
    def forward(net, x):
        x = windows_of(net.stem(x).permute(0, 2, 3, 1), 2)
        return net.fc(F.gelu(net.mlp(x)).view(-1, 16, 7).mean(1))

    net = Net(forward, stem=nn.Conv2d(3, 5, 1), mlp=nn.Linear(5, 7), fc=nn.Linear(7, CLASSES))
    assert repr(find_taps(net, torch.randn(2, 3, 4, 4))) == (
        "tap   operation  shape          channel axis\n"
        "----  ---------  -------------  ------------\n"
        "stem  conv2d     N x 5 x 4 x 4  1\n"
        "mlp   linear     4 N x 4 x 7    2\n"
        "gelu  gelu       4 N x 4 x 7    2\n"
        "3 taps"
    )


def test_taps_are_a_sequence():
    taps = find_taps(small(), torch.randn(2, 3, 6, 6))
    assert len(taps) == 3
    assert taps.names == [tap.name for tap in taps] == ["conv", "act", "more"]
    assert isinstance(taps[0], Tap)
    assert taps[-1].name == "more"
    assert taps[0] in taps
    assert isinstance(taps[1:], Taps)
    assert taps[1:].names == ["act", "more"]
    assert taps[1:] == taps.select(["act", "more"])
    assert taps[1:] != taps
    assert taps != list(taps)
    assert hash(taps) == hash(Taps(list(taps), taps.operations))
    assert Taps(list(taps), taps.operations) == taps
    assert taps.operations == ("conv2d", "relu", "conv2d", "linear")
    assert [tap.call for tap in taps] == [0, 1, 2]
    with pytest.raises(AttributeError):
        taps[0].name = "other"


def test_part_of_the_taps_can_be_watched():
    net, x = small(), torch.randn(2, 3, 6, 6)
    taps = find_taps(net, x)
    numbers = []
    observe(net, taps[1:], x, lambda number, maps: numbers.append((number, tuple(maps.shape))))
    assert numbers == [(0, (2, 4, 16)), (1, (2, 6, 16))]


class Marked(nn.Module):
    """Marks the output of a convolution after some other work."""

    def __init__(self, between):
        super().__init__()
        self.conv, self.between, self.head = nn.Conv2d(1, 2, 3), between, nn.Linear(2, 3)

    def forward(self, x):
        x = self.conv(x)
        self.between(x)
        return self.head(gramwatch.mark(x, "again").mean((2, 3)))


@pytest.mark.parametrize(
    ("between", "same"),
    [
        (lambda x: x + 1, True),
        (lambda x: F.relu(x), True),
        (lambda x: x.add_(1), False),
        (lambda x: x.__setitem__(0, 0.0), False),
        (lambda x: torch.add(x, 1, out=x), False),
        (lambda x: F.dropout(x, 0.5, True, True), False),
        (lambda x: operator.iadd(x, 1), False),
    ],
)
def test_a_marked_tensor_that_was_handed_over_before_is_named_instead(between, same):
    net = Marked(between).eval()
    x = torch.randn(2, 1, 5, 5)
    taps = find_taps(net, x, ["conv", "again"])
    received, repeated = {}, []
    with torch.inference_mode():
        observe(
            net,
            taps,
            x,
            lambda number, maps: received.update({number: maps.clone()}),
            lambda *numbers: repeated.append(numbers),
        )
    again = taps.names.index("again")
    assert repeated == ([(again, taps.names.index("conv"))] if same else [])
    assert (again in received) != same


def test_without_a_way_to_repeat_every_tap_is_handed_over():
    net = Marked(lambda x: None).eval()
    x = torch.randn(2, 1, 5, 5)
    taps = find_taps(net, x, ["conv", "again"])
    received = []
    observe(net, taps, x, lambda number, maps: received.append(number))
    assert received == [0, 1]
