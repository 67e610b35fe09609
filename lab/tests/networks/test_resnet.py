"""ResNet-34: the tensors that the paper watches."""

import torch

import gramwatch
from gramwatch_lab.networks import resnet34


def paper_taps(make):
    return gramwatch.find_taps(make(), torch.randn(2, 3, 32, 32), "paper")


def test_resnet34_has_96_tensors_six_a_block():
    taps = paper_taps(resnet34)
    assert len(taps) == 96
    blocks = {tuple(tap.name.split(".")[:2]) for tap in taps}
    assert len(blocks) == 16
    names = [tap.name for tap in taps if tap.name.startswith("layer2.0.")]
    assert sorted(n.removeprefix("layer2.0.") for n in names) == [
        "conv1",
        "conv2",
        "relu",
        "relu#2",
        "shortcut",
        "sum",
    ]
    assert {tap.channels for tap in taps} == {64, 128, 256, 512}


def test_an_identity_shortcut_is_the_blocks_input_and_the_sum_is_before_the_relu():
    net = resnet34().eval()
    x = torch.randn(2, 3, 32, 32)
    taps = gramwatch.find_taps(net, x, "paper")
    seen = {}
    gramwatch.watch.observe(net, taps, x, lambda number, maps: seen.update({taps[number].name: maps.clone()}))
    with torch.inference_mode():
        first = torch.relu(net.bn1(net.conv1(x))).flatten(2)
    torch.testing.assert_close(seen["layer1.0.shortcut"], first)
    torch.testing.assert_close(seen["layer1.1.shortcut"], seen["layer1.0.relu#2"])
    torch.testing.assert_close(seen["layer1.1.sum"].relu(), seen["layer1.1.relu#2"])
    assert (seen["layer1.1.sum"] < 0).any()
    with torch.inference_mode():
        block = net.layer2[0]
        branch = block.shortcut(seen["layer1.2.relu#2"].unflatten(2, (32, 32))).flatten(2)
    torch.testing.assert_close(seen["layer2.0.shortcut"], branch)
