"""Class ratio: the middle of the classes."""

import pytest
import torch

from gramwatch.methods import METHODS
from tests.guarded import Net, images, made


@pytest.fixture
def net() -> Net:
    return made()


def test_the_middle_is_that_of_classes_whatever_their_sizes(net):
    """A class with most of the examples does not pull it to itself."""
    ratio = METHODS["class_ratio"](net).fit(images(300, 0).split(64), progress=False)
    with torch.no_grad():
        often = images(300, 0)[net(images(300, 0)).argmax(1) == 0]
    assert len(often) > 20
    more = METHODS["class_ratio"](net).fit([images(300, 0), *[often] * 20], progress=False)
    once, many = (each.score_inputs(often)[1].mean() for each in (ratio, more))
    assert many < 1.1 * once


def test_only_the_last_stage_is_read(net):
    """Means of early maps, which are large, would be read for nothing."""
    ratio, early, unit = (
        METHODS[name](net) for name in ("class_ratio", "early_mahalanobis", "unit_mahalanobis")
    )
    all_ends = [tap.name for tap in unit.planned(images(2, 0)).taps]
    assert len(all_ends) > 1
    assert [tap.name for tap in ratio.planned(images(2, 0)).taps] == all_ends[-1:]
    assert [tap.name for tap in early.planned(images(2, 0)).taps] == all_ends[:-1]
