"""A detection as a user reads it."""

import json

import pytest
import torch

from gramwatch import Guard
from gramwatch.methods import Energy
from tests.fed import Plain, guarded, images


@pytest.fixture(scope="module")
def guard() -> Guard:
    return guarded(Plain(), images(200, 0), images(100, 1))


def test_a_detection_is_a_sequence_of_examples(guard):
    found = guard(images(5, 2))
    assert len(found) == 5
    assert [float(one.score) for one in found] == found.score.tolist()
    assert found[1].score.tolist() == [found.score[1].item()] == found[-4].score.tolist()
    assert found[-1].parts["gram"].tolist() == [found.parts["gram"][4].item()]
    some = found[torch.tensor([True, False, True, False, False])]
    assert some.deviations.tolist() == found.deviations[[0, 2]].tolist()
    assert len(found[1:3]) == 2
    assert some.taps == found.taps
    for number in (5, -6):
        with pytest.raises(IndexError, match=f"there is no example {number}: the batch has 5"):
            found[number]


def test_a_detection_as_plain_values(guard):
    found = guard(images(5, 2))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["score"] == found.score.tolist()
    assert plain["is_ood"] == found.is_ood.tolist()
    assert list(plain["parts"]) == list(guard.members)
    assert list(plain["deviations"]) == guard.members["gram"].taps.names == list(found.taps)
    assert plain["deviations"]["conv"] == found.deviations[:, 0].tolist()
    energy = Energy(guard.model).calibrate([images(100, 1)], progress=False)
    assert set(energy(images(2, 0)).to_dict()) == {"predicted", "score", "p_value", "is_ood"}
