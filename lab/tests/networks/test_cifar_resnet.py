"""ResNets for CIFAR: sizes, tensors, shortcuts."""

import pytest
import torch

import gramwatch
from gramwatch.inputs import networks
from gramwatch_lab.networks import CifarResNet


def paper_taps(make):
    return gramwatch.find_taps(make(), torch.randn(2, 3, 32, 32), "paper")


def test_cifar_resnets_have_the_published_sizes_and_six_tensors_a_block():
    # He et al., Table 6: 0.27, 0.46, 0.66, 0.85 and 1.7 million parameters.
    sizes = {20: 269_722, 32: 464_154, 44: 658_586, 56: 853_018, 110: 1_727_962}
    for depth, size in sizes.items():
        assert sum(p.numel() for p in networks.build(f"resnet{depth}").parameters()) == size
    taps = paper_taps(lambda: networks.build("resnet20"))
    assert len(taps) == 6 * 9
    with pytest.raises(ValueError, match="6 n"):
        CifarResNet(21)


def test_an_option_a_shortcut_takes_every_second_pixel_and_adds_channels_of_zeros():
    net = networks.build("resnet20").eval()
    x = torch.randn(2, 3, 32, 32)
    taps = gramwatch.find_taps(net, x, "paper")
    seen = {}
    gramwatch.watch.observe(net, taps, x, lambda number, maps: seen.update({taps[number].name: maps.clone()}))
    before = seen["layer1.2.relu#2"].unflatten(2, (32, 32))[:, :, ::2, ::2]
    after = seen["layer2.0.shortcut"].unflatten(2, (16, 16))
    torch.testing.assert_close(after[:, 8:24], before)
    assert not after[:, :8].any()
    assert not after[:, 24:].any()
