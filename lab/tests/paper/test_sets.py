"""The sets that judge a network: which belong to which training data, and those of scenes."""

from gramwatch_lab.datasets import CATALOGUE, faults
from gramwatch_lab.paper.sets import ood_sets, scene_sets


def test_sets_fit_their_in_distribution() -> None:
    cifar, mnist = ood_sets("cifar10"), ood_sets("mnist")
    assert "cifar10" not in {ood_set.name for ood_set in cifar}
    assert {ood_set.title for ood_set in cifar if ood_set.near} == {"CIFAR-100", "CIFAR-100 subset"}
    assert not any(ood_set.near or ood_set.name == "mnist" for ood_set in mnist)
    published = {ood_set.name: ood_set.published for ood_set in cifar}
    assert published["gaussian"] is None
    assert published["gaussian_normalised"] == "Gaussian"
    parts = {ood_set.name: ood_set for ood_set in ood_sets("cifar100_parts")}
    assert not {"cifar100", "cifar100_subset", "cifar100_parts"} & parts.keys()
    assert parts["cifar10"].near
    for inside in ("cifar10", "cifar100_parts", "mnist"):
        result = {ood_set.name: ood_set for ood_set in ood_sets(inside)}
        assert result["isun"].exact
        assert not result["svhn_subset"].exact
    assert "svhn_subset" not in {ood_set.name for ood_set in ood_sets("svhn")}


def test_sets_have_names_and_titles_of_their_own_and_every_fault_is_there() -> None:
    sets = scene_sets()
    assert len({ood_set.name for ood_set in sets}) == len({ood_set.title for ood_set in sets}) == len(sets)
    kinds = [ood_set.kind for ood_set in sets]
    assert kinds.count("near") == 6
    assert kinds.count("fault") == sum(len(fault.strengths) for fault in faults.FAULTS.values()) + 2
    assert {ood_set.fault for ood_set in sets if ood_set.fault} == set(faults.FAULTS)
    assert all(ood_set.name in CATALOGUE for ood_set in sets if ood_set.kind == "far")
    assert all(ood_set.near == (ood_set.kind == "near") for ood_set in sets)
    assert ood_sets("scenes") == sets


def test_what_is_enlarged_has_a_control_of_the_same_size() -> None:
    controls = {ood_set.side for ood_set in scene_sets() if ood_set.kind == "control"}
    assert {ood_set.side for ood_set in scene_sets() if ood_set.kind == "far"} - {None} <= controls
    assert set(faults.FAULTS["nearest"].strengths) <= controls
