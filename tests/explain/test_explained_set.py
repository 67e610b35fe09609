"""explain_set: whole sets by tap and class, taps that tell sets apart, clusters of reasons."""

import copy

import pytest
import torch

from gramwatch import explain_set
from gramwatch.errors import InputError
from tests.explain.test_explain import close, planted
from tests.test_contract import images


def of_two_causes():
    """Fifteen images with one cause, fifteen with another, and their explanation by one guard."""
    detector = copy.deepcopy(planted())
    scaled, shifted = 4 * images(15, 1), images(15, 2) + 4.0
    return detector, torch.cat([scaled, shifted])


def test_contributions_are_those_of_explain():
    detector, mixed = of_two_causes()
    result = explain_set(detector, mixed.split(7), progress=False)
    explanation = detector.explain(mixed, places=False)
    assert len(result) == 30
    close(result.members.sum(1), explanation.detection.score)
    gram = [i for i, (member, _) in enumerate(result.columns) if member == "gram"]
    close(result.contributions[:, gram], explanation.taps["gram"][:, :-1])
    assert ("energy", "") in result.columns
    classes, means = result.by_class()
    assert means.shape == (len(classes), len(result.columns))
    first = result.predicted == classes[0]
    close(means[0], result.contributions[first].mean(0))


def test_images_of_one_cause_are_one_cluster():
    detector, mixed = of_two_causes()
    result = explain_set(detector, mixed.split(10), progress=False)
    clusters = result.clusters(2, flagged=False)
    groups = sorted(sorted(cluster.examples) for cluster in clusters)
    assert groups == [list(range(15)), list(range(15, 30))]
    assert all(len(cluster.taps) == 3 for cluster in clusters)
    assert sum(map(len, result.clusters(flagged=False))) == 30


def test_a_shifted_tap_tells_two_sets_apart():
    detector = copy.deepcopy(planted())
    before = explain_set(detector, images(40, 5).split(20), progress=False)
    detector.model.shift = 3.0
    after = explain_set(detector, images(40, 5).split(20), progress=False)
    best = before.apart(after, most=2)
    assert {channel.tap for channel in best} == {"relu#2"}
    assert best[0].auroc > 0.99
    assert best[0].there > best[0].here


def test_what_cannot_be_done_is_named():
    detector = planted()
    result = explain_set(detector, images(10, 5).split(5), progress=False)
    with pytest.raises(InputError, match="images cannot make 20 clusters"):
        result.clusters(20, flagged=False)
    with pytest.raises(InputError, match="no finite example"), pytest.warns(match="NaN"):
        explain_set(detector, [torch.full((2, 1, 8, 8), torch.nan)], progress=False)
    with pytest.warns(match="never deviate"):
        gram = detector.members["gram"].calibrate(images(60, 1).split(20))
    other = explain_set(gram, images(4, 1).split(2))
    with pytest.raises(InputError, match="different detectors"):
        result.apart(other)


def test_the_heat_map_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    result = explain_set(planted(), images(30, 5).split(10), progress=False)
    result.plot(tmp_path / "heat.png")
    assert (tmp_path / "heat.png").stat().st_size > 1000
