"""The sets that judge a network: which belong to which training data, and those of scenes."""

from gramwatch.inputs import faults
from gramwatch.inputs.datasets import CATALOGUE
from gramwatch_lab.paper.sets import ood_sets, scene_sets


def test_sets_fit_their_in_distribution() -> None:
    cifar, mnist = ood_sets("cifar10"), ood_sets("mnist")
    assert "cifar10" not in {each.name for each in cifar}
    assert {each.title for each in cifar if each.near} == {"CIFAR-100", "CIFAR-100 subset"}
    assert not any(each.near or each.name == "mnist" for each in mnist)
    published = {each.name: each.published for each in cifar}
    assert published["gaussian"] is None
    assert published["gaussian_normalised"] == "Gaussian"
    parts = {each.name: each for each in ood_sets("cifar100_parts")}
    assert not {"cifar100", "cifar100_subset", "cifar100_parts"} & parts.keys()
    assert parts["cifar10"].near
    for inside in ("cifar10", "cifar100_parts", "mnist"):
        found = {each.name: each for each in ood_sets(inside)}
        assert found["isun"].exact
        assert not found["svhn_subset"].exact
    assert "svhn_subset" not in {each.name for each in ood_sets("svhn")}


def test_sets_have_names_and_titles_of_their_own_and_every_fault_is_there() -> None:
    sets = scene_sets()
    assert len({each.name for each in sets}) == len({each.title for each in sets}) == len(sets)
    kinds = [each.kind for each in sets]
    assert kinds.count("near") == 6
    assert kinds.count("fault") == sum(len(fault.strengths) for fault in faults.FAULTS.values()) + 2
    assert {each.fault for each in sets if each.fault} == set(faults.FAULTS)
    assert all(each.name in CATALOGUE for each in sets if each.kind == "far")
    assert all(each.near == (each.kind == "near") for each in sets)
    assert ood_sets("scenes") == sets


def test_what_is_enlarged_has_a_control_of_the_same_size() -> None:
    controls = {each.side for each in scene_sets() if each.kind == "control"}
    assert {each.side for each in scene_sets() if each.kind == "far"} - {None} <= controls
    assert set(faults.FAULTS["nearest"].strengths) <= controls
