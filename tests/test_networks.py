"""The paper's networks: their tensors, their sizes, their published parameter names."""

import pytest
import torch

import gramwatch
from gramwatch.networks import densenet_bc_100_12, resnet34, wide_resnet_40_2

PARAMETERS = {resnet34: 21_282_122, densenet_bc_100_12: 769_162, wide_resnet_40_2: 2_243_546}


@pytest.mark.parametrize(
    ("make", "count"), list(PARAMETERS.items()), ids=lambda v: getattr(v, "__name__", "")
)
def test_sizes_are_the_published_ones(make, count):
    assert sum(p.numel() for p in make().parameters()) == count
    assert make(100)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


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
    gramwatch.taps.observe(net, taps, x, lambda number, maps: seen.update({taps[number].name: maps.clone()}))
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


def test_densenet_has_101_tensors_and_no_relu():
    taps = paper_taps(densenet_bc_100_12)
    assert len(taps) == 101
    assert {tap.operation for tap in taps} == {"conv2d", "mark"}
    assert sum(".layer." in tap.name for tap in taps) == 96
    assert [t.name for t in taps if t.name.startswith("trans")] == ["trans1.conv1", "trans2.conv1"]
    outputs = [tap for tap in taps if tap.name.endswith(".output")]
    assert [(tap.channels, tap.shape[2]) for tap in outputs] == [(216, 32), (300, 16), (342, 8)]
    transition = next(tap for tap in taps if tap.name == "trans1.conv1")
    assert transition.shape[2] == 32  # before pooling


def test_wide_resnet_has_73_tensors():
    taps = paper_taps(wide_resnet_40_2)
    assert len(taps) == 73
    assert taps[0].name == "conv1"
    assert [t.name.rpartition(".")[2] for t in taps[1:5]] == ["relu1", "conv1", "relu2", "conv2"]
    assert not any("Shortcut" in tap.name for tap in taps)


def test_the_third_party_densenet_fits_by_name(shared_weights):
    import real_data

    state = real_data.checkpoint(shared_weights / "densenet_bc_100_12_cifar10.pth")
    assert state.keys() == densenet_bc_100_12().state_dict().keys()
    densenet_bc_100_12().load_state_dict(state)
