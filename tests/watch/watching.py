"""Small networks, and what is seen of them under watch."""

from collections import OrderedDict

import torch
from torch import nn

from gramwatch import find_taps
from gramwatch.watch import observe

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


def small():
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(3, 4, 3), act=nn.ReLU(), more=nn.Conv2d(4, 6, 1), head=Head(6))
    ).eval()


def axes(taps):
    return {tap.name: (tap.channel_axis, tap.channels) for tap in taps}


def windows_of(x, size):
    """(N, H, W, C) as (N * windows, size * size, C), as in Swin."""
    n, h, w, c = x.shape
    x = x.view(n, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, size * size, c)


class Rows(nn.Module):
    """A linear layer as GPT-2 writes it: the weight transposed, examples and tokens in one axis."""

    def __init__(self, inside, outside):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inside, outside))
        self.bias = nn.Parameter(torch.randn(outside))

    def forward(self, x):
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)
