"""Where pixels and tokens lie in the input."""

import math

import pytest
import torch
from torch import nn

from gramwatch.observe.places import Places, contrasts, grid_of, shares, sizes_of, smoothed, strengths
from gramwatch.watch import Tap


@pytest.mark.parametrize(
    ("positions", "sizes", "expected"),
    [
        ((8, 8), (32, 32), (0, (8, 8))),
        ((64,), (128, 128), (0, (8, 8))),
        ((65,), (128, 128), (1, (8, 8))),  # a class token
        ((201,), (224, 448), (1, (10, 20))),
        ((69,), (128, 128), (5, (8, 8))),  # a class token and four registers
        ((98,), (224, 112), (0, (14, 7))),
        ((24,), (48,), (0, (24,))),
        ((1, 1), (32, 32), None),
        ((), (32, 32), None),
        ((63,), (128, 128), None),
        ((4, 49), (), None),
        ((2, 3, 4), (32, 32), None),
    ],
)
def test_grids_are_found(positions, sizes, expected):
    assert grid_of(positions, sizes) == expected


@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [
        (torch.zeros(2, 3, 8, 10), (8, 10)),
        (torch.zeros(2, 8, 10, 3), (8, 10)),
        (torch.zeros(2, 1, 8, 10), (8, 10)),
        (torch.zeros(2, 12, dtype=torch.int64), (12,)),
        (torch.zeros(2, 12), ()),
        ((torch.zeros(2, 5), torch.zeros(2, 3, 8, 8)), (8, 8)),
        ({"x": torch.zeros(2, 3, 4, 8, 8)}, (4, 8, 8)),
    ],
)
def test_sizes_of_inputs(inputs, sizes):
    assert sizes_of(inputs)[1] == sizes


def test_amounts_keep_their_sum_at_the_size_of_the_input():
    places = Places(torch.zeros(2, 3, 16, 16))
    amounts = torch.rand(2, 16, generator=torch.Generator().manual_seed(0))
    places.add(amounts, (0, (4, 4)))
    tokens = torch.rand(2, 65, generator=torch.Generator().manual_seed(1))
    places.add(tokens, (1, (8, 8)))
    found = places.whole()
    assert found.shape == (2, 16, 16)
    torch.testing.assert_close(found.sum((1, 2)), amounts.sum(1) + tokens[:, 1:].sum(1))


@pytest.mark.parametrize(
    ("layers", "first"),
    [
        ([nn.Conv2d(3, 4, 7, 2, 3), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)], 0.0),  # a ResNet
        ([nn.Conv2d(3, 4, 7, 2, 3), nn.AvgPool2d(3, 2, 1), nn.Conv2d(4, 4, 2, 2)], 2.0),
        ([nn.Conv2d(3, 4, 8, 8)], 3.5),  # patches
        ([nn.Conv2d(3, 4, 3, padding=1), nn.AvgPool2d(2), nn.AvgPool2d((2, 2)), nn.AvgPool2d(2)], 3.5),
        ([nn.Conv2d(3, 4, 3, 2, dilation=2, padding=1), nn.AvgPool2d(2, ceil_mode=True)], 2.0),
        ([nn.Conv2d(3, 4, 3, padding="same"), nn.Conv2d(4, 4, 1, 8)], 0.0),
    ],
)
def test_maps_lie_where_kernels_and_padding_put_them(layers, first):
    """Against the gradient: the input pixels that an output pixel depends on have their middle there."""
    network = nn.Sequential(*layers)
    with torch.no_grad():
        for layer in network:
            if isinstance(layer, nn.Conv2d):
                layer.weight.fill_(1.0)
    places = Places(torch.zeros(1, 3, 64, 64))
    with places.noting(network):
        made = network(torch.zeros(1, 3, 64, 64)).shape[-1]
    assert places._first[made, made][0] == pytest.approx(first, abs=0.05)
    before = [len(layer._forward_hooks) for layer in network]
    assert before == [0] * len(layers)
    middle = torch.zeros(1, 3, 64, 64, requires_grad=True)
    network(middle)[0, :, made // 2, made // 2].sum().backward()
    weight = middle.grad.sum((0, 1, 2)).abs()
    centre = float((weight * torch.arange(64)).sum() / weight.sum())
    assert centre == pytest.approx(places._first[made, made][0] + made // 2 * 64 / made, abs=0.6)


def test_a_displaced_map_is_put_back():
    places = Places(torch.zeros(1, 3, 64, 64))
    with places.noting(network := nn.Conv2d(3, 1, 3, 16, 1)):
        network(torch.zeros(1, 3, 64, 64))
    amounts = torch.zeros(1, 16)
    amounts[0, 5] = 1.0  # row 1, column 1, whose middle is the pixel 16
    places.add(amounts, (0, (4, 4)))
    found = places.whole()
    y, x = divmod(int(found.argmax()), 64)
    assert abs(y - 16) <= 1
    assert abs(x - 16) <= 1
    torch.testing.assert_close(found.sum(), torch.tensor(1.0))


def test_a_pixel_stays_in_its_place():
    places = Places(torch.zeros(1, 3, 8, 8))
    amounts = torch.zeros(1, 16)
    amounts[0, 6] = 1.0  # row 1, column 2 of 4 x 4
    places.add(amounts, (0, (4, 4)))
    peak = divmod(int(places.whole()[0].argmax()), 8)
    assert peak in {(2, 4), (2, 5), (3, 4), (3, 5)}


def test_windows_folded_into_the_batch_have_no_place():
    tap = Tap("attention", "linear", "linear", (4, 49, 6), 0, 2, 0)
    places = Places(torch.zeros(2, 3, 28, 28))
    assert places.place(torch.zeros(8, 49, 6), tap)[1] is None


def unusual(maps: torch.Tensor) -> torch.Tensor:
    return shares(contrasts(strengths(maps)))


def test_pixels_much_stronger_or_weaker_than_the_median_are_unusual():
    maps = torch.full((3, 4, 9), 2.0)
    maps[0, :, 3], maps[1, :, 5] = 6.0, 0.5
    found = unusual(maps)
    assert found[0, 3] == found[1, 5] == 1
    torch.testing.assert_close(found[2], torch.full((9,), 1 / 9))  # no pixel differs
    torch.testing.assert_close(found.sum(1), torch.ones(3))


def test_strengths_are_parts_of_gram_row_sums_of_order_two():
    maps = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(0))
    parts = maps**2 * (maps**2).sum(1, keepdim=True)
    expected = (parts / (maps**2).mean(2, keepdim=True)).mean(1)
    found = strengths(maps)
    factor = found / expected
    torch.testing.assert_close(factor, factor[:, :1].expand_as(factor))
    for scale in (1e-20, 1e15):
        torch.testing.assert_close(unusual(scale * maps), unusual(maps), rtol=1e-3, atol=1e-6)
    assert bool(unusual(torch.zeros(1, 4, 6)).isfinite().all())


def test_shared_contributions_keep_their_sum_and_taps_with_more_pixels_weigh_more():
    random = torch.Generator().manual_seed(0)
    places = Places(torch.zeros(2, 3, 32, 32))
    places.share(torch.tensor([1.0, 0.0]), shares(torch.rand(2, 64, generator=random)), (0, (8, 8)))
    places.share(torch.tensor([2.0, 0.5]), shares(torch.rand(2, 16, generator=random)), (1, (4, 4)))
    torch.testing.assert_close(places.map().sum((1, 2)), torch.tensor([3.0, 0.5]))
    fine, coarse = (float(each[0].sum()) for each in places._sums.values())
    assert fine == pytest.approx(64 * 1.0)
    assert coarse == pytest.approx(16 * 2.0)


@pytest.mark.parametrize("shape", [(40,), (32, 48), (16, 16, 16)])
def test_smoothing_spreads_a_pixel_over_an_eighth_of_each_side(shape):
    maps = torch.zeros(2, *shape)
    middle = tuple(size // 2 for size in shape)
    maps[(0, *middle)] = 1.0
    found = smoothed(maps)
    reach = [size // 16 for size in shape]
    assert float(found[1].abs().max()) == 0
    assert int((found[0] > 0).sum()) == math.prod(2 * each + 1 for each in reach)
    torch.testing.assert_close(found[0].sum(), torch.tensor(1.0))
    assert float(found[(0, *middle)]) == pytest.approx(1 / math.prod(2 * each + 1 for each in reach))


def test_small_maps_are_not_smoothed():
    maps = torch.rand(2, 8, 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(smoothed(maps), maps)


def test_the_tokens_of_a_text_are_its_places_whatever_stands_beside_them():
    tokens, mask = torch.randint(1, 9, (2, 5)), torch.ones(2, 5, dtype=torch.int64)
    found, sizes = sizes_of({"attention_mask": mask, "input_ids": tokens})
    assert found is tokens
    assert sizes == (5,)


def test_only_real_places_are_unusual():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    places = Places({"input_ids": torch.ones(4, 4, dtype=torch.int64)}, mask)
    maps = torch.arange(16.0).view(4, 1, 4)
    seen = []

    def unusual_of(some, rows):
        seen.append((some[:, 0].tolist(), rows.tolist()))
        return some.sum(1) + 1

    found = places.pixels(maps, unusual_of)
    assert found.tolist() == [[1, 2, 3, 0], [0, 6, 7, 8], [9, 0, 0, 0], [0, 0, 0, 0]]
    assert seen == [([[8]], [2]), ([[0, 1, 2], [5, 6, 7]], [0, 1])]
    shorter = places.pixels(maps[:, :, :2], unusual_of)  # its places are others
    assert shorter.tolist() == [[1, 2], [5, 6], [9, 10], [0, 0]]


def test_tokens_are_not_smoothed():
    for tensor in (torch.ones(1, 40, dtype=torch.int64), torch.ones(1, 40, 3)):
        places = Places(tensor)
        places.sizes = (40,)
        places.share(
            torch.tensor([2.0]), torch.nn.functional.one_hot(torch.tensor([20]), 40).float(), (0, (40,))
        )
        assert int((places.map() > 0).sum()) == (5 if tensor.is_floating_point() else 1)


def test_small_parts_of_pixels_are_shared_in_proportion():
    torch.testing.assert_close(
        shares(torch.tensor([[0.1, 0.3], [1e-6, 0.0]])), torch.tensor([[0.25, 0.75], [1, 0]])
    )
