"""The calls that count: convolutions, linear and recurrent layers, activations."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramwatch
from gramwatch import TapError, find_taps, mark
from gramwatch.watch import find_head
from gramwatch.watch.operations import KINDS, OPERATIONS, operation_of
from tests.watch.watching import CLASSES, Head, Net, Rows, after, axes, channels_at, check_alone, watched

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


def test_every_function_of_pytorch_with_a_watched_name_is_watched():
    from torch.overrides import get_ignored_functions, get_overridable_functions

    every = {f for functions in get_overridable_functions().values() for f in functions}
    every |= {f for f in get_ignored_functions() if hasattr(F, getattr(f, "__name__", "-"))}
    named = {f: operation_of(f) for f in every if operation_of(f) in KINDS}
    assert {f: OPERATIONS.get(f) for f in named} == named
    assert F.hardswish in named
    assert {f: operation_of(f) for f in OPERATIONS} == OPERATIONS


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


# --- addmm and recurrent layers ----------------------------------------------------------------------


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
