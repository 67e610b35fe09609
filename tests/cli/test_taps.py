"""The command `gramwatch taps`."""

import json

from tests.cli.invoking import invoke, told


def test_taps_of_a_network_of_timm():
    shown = invoke("taps", "timm:resnet10t", "--size", 32, "--taps", "layer4.*")
    assert shown.exit_code == 0, shown.output
    assert "layer4.0.conv1" in shown.output
    assert "layer1" not in shown.output


def test_taps_of_a_function_need_a_size(own):
    assert "the size of images" in told(invoke("taps", own.model))
    listed = json.loads(invoke("taps", own.model, "--size", 16, "--json").output)
    assert [tap["operation"] for tap in listed] == ["conv2d", "relu", "conv2d", "relu"]
    assert listed[0]["shape"] == [1, 8, 16, 16]
    grey = invoke("taps", "gramwatch.demo:small_convnet", "--size", 8)
    assert grey.exit_code == 2
    assert "If images are grey, give --channels 1" in told(grey)
    assert invoke("taps", "gramwatch.demo:small_convnet", "--size", 8, "--channels", 1).exit_code == 0
    result = invoke("taps", own.model, "--size", 16, "--taps", "magic")
    assert result.exit_code == 1
    assert "no tap matches 'magic'" in told(result)
