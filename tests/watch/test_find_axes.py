"""The channel axis of a tap, and where examples are along the batch axis."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gramwatch import TapError, find_taps
from gramwatch.watch import Tap
from tests.watch.watching import CLASSES, Head, Net, axes, channels_at, check_alone, watched, windows_of

# --- channel axes ------------------------------------------------------------------------------------


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
