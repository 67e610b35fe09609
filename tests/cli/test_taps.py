"""The command `gramwatch taps`."""

import json

import pytest
import torch

from gramwatch import Guard, find_taps
from gramwatch.inputs.models import resolve
from tests.cli.invoking import invoke, told


def test_taps_of_a_network_of_timm():
    shown = invoke("taps", "timm:resnet10t", "--size", 32, "--taps", "layer4.*")
    assert shown.exit_code == 0, shown.output
    assert "layer4.0.conv1" in shown.output
    assert "layer1" not in shown.output


def test_taps_of_a_function_need_a_size(own):
    unknown = told(invoke("taps", own.model))
    assert "is not known: give --size" in unknown
    assert "Invalid value" not in unknown  # nothing was given
    listed = json.loads(invoke("taps", own.model, "--size", 16, "--json").output)
    assert [tap["operation"] for tap in listed] == ["conv2d", "relu", "conv2d", "relu"]
    assert listed[0]["shape"] == [1, 8, 16, 16]
    grey = told(invoke("taps", "gramwatch.inputs.demo:small_convnet", "--size", 8))
    assert "images of 3 x 8 x 8 were tried" in grey
    assert "If images are grey, give --channels 1" in grey
    assert "Invalid value" not in grey
    assert invoke("taps", "gramwatch.inputs.demo:small_convnet", "--size", 8, "--channels", 1).exit_code == 0
    result = invoke("taps", own.model, "--size", 16, "--taps", "magic")
    assert result.exit_code == 1
    assert "no tap matches 'magic'" in told(result)


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")  # most classes are never predicted
def test_the_listed_taps_are_those_that_a_guard_watches():
    name = "resnet20"
    network = resolve(name, untrained=True).network
    images = torch.randn(40, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    guard = Guard(network, members=["gram"]).fit([images], progress=False)
    listed = [tap["name"] for tap in json.loads(invoke("taps", name, "--json").output)]
    every = find_taps(network, images)
    assert listed == list(guard.members["gram"].tap_names)
    assert len(listed) < len(every)
    said = invoke("taps", name).output
    assert f"{len(listed)} of {len(every)} tensors" in said
    assert len(json.loads(invoke("taps", name, "--taps", "all", "--json").output)) == len(every)
