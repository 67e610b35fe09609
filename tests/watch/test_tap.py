"""A tap, a list of taps, and tensors that a network marks."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramwatch import TapError, find_taps, mark
from gramwatch.watch import Tap, Taps
from tests.watch.watching import CLASSES, Head, Net, small, watch, watched, windows_of

# --- names -------------------------------------------------------------------------------------------


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


def test_taps_are_alike_only_if_all_of_them_are():
    taps = find_taps(small(), torch.randn(2, 3, 6, 6))
    larger = find_taps(small(), torch.randn(2, 3, 9, 9))
    assert taps.alike(larger)
    assert taps != larger
    assert not taps[:2].alike(taps[1:])  # as many, of the same calls
    assert not taps.alike(taps[:2])
    assert not taps.alike(Taps(list(taps), [*taps.operations, "relu"]))
