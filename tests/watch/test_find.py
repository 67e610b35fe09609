"""Which tensors of a network are taps: their names, the paper's networks, the head, where stages end."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramwatch import GramwatchWarning, TapError, find_taps
from gramwatch.errors import NoTapError
from gramwatch.inputs import networks
from gramwatch_lab.networks import ResNet, densenet_bc_100_12, resnet34, wide_resnet_40_2
from tests.watch.watching import CLASSES, Head, Net, after, axes, small, watched

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


# --- the paper's networks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "count"),
    [(resnet34, 96), (densenet_bc_100_12, 101), (wide_resnet_40_2, 73)],
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
    found = find_taps(resnet34(), x, "ends")
    assert [(tap.name, tap.shape) for tap in found] == [
        ("layer1.2.relu#2", (1, 64, 32, 32)),
        ("layer2.3.relu#2", (1, 128, 16, 16)),
        ("layer3.5.relu#2", (1, 256, 8, 8)),
        ("layer4.2.relu#2", (1, 512, 4, 4)),
    ]
    assert [tap.pixels for tap in found] == [1024, 256, 64, 16]
    dense = find_taps(densenet_bc_100_12(), x, "ends")
    assert [tap.name for tap in dense] == ["trans1.conv1", "trans2.conv1", "relu"]


def test_spread_taps_are_few_and_reach_from_the_first_to_the_last():
    x = torch.randn(1, 3, 32, 32)
    net = resnet34()
    every, spread = find_taps(net, x).names, find_taps(net, x, "spread").names
    assert len(every) == 69
    places = [every.index(name) for name in spread]
    assert places == [round(step * 68 / 23) for step in range(24)]
    small = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 1, 3), nn.Flatten(), nn.Linear(784, 2))
    assert find_taps(small, x, "spread").names == ["0", "1"]  # one channel has no direction
    with pytest.raises(NoTapError, match="two channels or more, which taps='spread' looks for"):
        find_taps(nn.Sequential(nn.Conv2d(3, 1, 3), Head(1)), x, "spread")


def test_the_papers_taps_by_hand():
    net, x = ResNet((1, 1, 1, 1)).eval(), torch.randn(2, 3, 32, 32)
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
        TapError, match=r"taps='paper' is defined for .*gramwatch_lab\.networks, not for Sequential"
    ):
        find_taps(after(nn.Conv2d(3, 4, 1), 4), torch.randn(1, 3, 4, 4), "paper")


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
