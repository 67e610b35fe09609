"""Gram by depth: the stages of taps."""

from gramwatch_lab.paper.depth import stage_of


def test_stages() -> None:
    taps = ("conv1", "layer3.0.conv1", "block2.layer.1.relu", "trans2.conv1", "block3.output")
    assert [stage_of(tap) for tap in taps] == [1, 3, 2, 2, 3]
