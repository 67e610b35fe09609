"""Running a network under watch: when tensors are handed over, and what happens on another path."""

import gc
import operator
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gramwatch
from gramwatch import TapError, find_taps
from gramwatch.watch import Taps, observe
from tests.watch.watching import CLASSES, Head, Net, Rows, small, watch

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
