"""Across networks: means, a choice without a family, pairs, and what is written."""

import csv

import pytest

from gramwatch_lab.figures import across
from gramwatch_lab.figures.table import APART

SETS = {
    "sea, left out": "near",
    "DTD": "far",
    "MNIST": "far",
    "blur": "fault",
    "noise": "fault",
    "mild": "fault",
}
LOST = {"blur": 30.0, "noise": 4.0, "mild": 0.5}


def written(folder, network, figures):
    """A study: by method, the AUROC on each set."""
    folder.mkdir()
    with (folder / "guard-net.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["network", "in_distribution", "ood", "method", "auroc", "note"])
        for method, of_sets in figures.items():
            for ood, auroc in zip(SETS, of_sets, strict=True):
                lines.writerow([network, "scenes", ood, method, auroc, APART if ood == "mild" else ""])
        lines.writerow([network, "scenes", "iSUN", "Guard", "", "data not present"])
    with (folder / "sets-net.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["ood", "name", "kind", "images", "accuracy", "lost", "apart"])
        for ood, kind in SETS.items():
            lines.writerow([ood, ood, kind, 800, "", LOST.get(ood, ""), int(ood == "mild")])
    return folder


@pytest.fixture
def studies(tmp_path):
    vit = {
        "Guard": (70, 90, 80, 99, 60, 1),
        "no floor": (80, 90, 90, 99, 60, 1),
        "Gram": (60, 95, 85, 90, 70, 1),
        "KNN": (75, 80, 80, 50, 50, 1),
    }
    convnext = {
        "Guard": (80, 90, 90, 95, 85, 1),
        "no floor": (70, 80, 80, 95, 85, 1),
        "Gram": (60, 70, 80, 95, 85, 1),
        "KNN": (90, 90, 90, 60, 60, 1),
    }
    folders = [
        written(tmp_path / "vit_0", "ViT", vit),
        written(tmp_path / "vit_1", "ViT", vit),
        written(tmp_path / "convnext_0", "ConvNeXt", convnext),
    ]
    return [study for folder in folders for study in across.read(folder)]


def test_means_weigh_kinds_and_families_equally(studies):
    vit, _, convnext = studies
    assert vit.mean("Guard") == pytest.approx((70 + 85 + 79.5) / 3)
    assert vit.mean("Guard", without="near") == pytest.approx((85 + 79.5) / 2)
    assert convnext.mean("Guard") == pytest.approx((80 + 90 + 90) / 3)
    both = across.over_families(studies, "Guard")
    assert both == pytest.approx((vit.mean("Guard") + convnext.mean("Guard")) / 2)
    assert vit.singles == ["Gram", "KNN"]
    assert vit.rules == ["Guard", "no floor"]


def test_sets_shown_apart_and_sets_without_data_do_not_count(studies):
    assert list(studies[0].kinds) == ["sea, left out", "DTD", "MNIST", "blur", "noise"]


def test_a_rule_is_chosen_without_the_family_that_judges_it(studies):
    by = {case.what: case for case in across.left_out(studies)}
    vit = by["ViT, scenes"]  # on the ConvNeXt Guard is ahead, and KNN of the single methods
    assert (vit.chosen, vit.best_single) == ("Guard", "KNN")
    assert vit.auroc == vit.guard == pytest.approx(studies[0].mean("Guard"))
    convnext = by["ConvNeXt, scenes"]  # on the ViT the other rule is ahead, and Gram
    assert (convnext.chosen, convnext.best_single) == ("no floor", "Gram")
    assert convnext.auroc == pytest.approx(studies[2].mean("no floor"))
    assert convnext.single == pytest.approx(studies[2].mean("Gram"))
    near = by["near"]
    assert near.guard == pytest.approx(75)  # the mean of 70 and 80


def test_pairs_begin_where_guard_is_furthest_behind(studies):
    first = across.pairs_of(studies)[0]
    assert (first.network, first.ood, first.best_single, first.behind) == (
        "vit_0",
        "noise",
        "Gram",
        pytest.approx(10),
    )
    assert len(across.pairs_of(studies)) == 15


def test_tables_say_how_often_guard_is_behind_and_what_costly_faults_get(studies):
    text = across.tables_of(studies)
    behind = [pair.behind for pair in across.pairs_of(studies)]
    close = sum(points <= 0.3 for points in behind)
    assert f"at most 0.3 points behind the best single method of the set on {close} of 15 pairs" in text
    assert "| ViT, scenes | 2 | 99.00 |" in text  # blur costs 30 points, noise only 4
    assert "| ConvNeXt, scenes | 1 | 95.00 |" in text
    assert "| **Guard** |" in text


def test_everything_is_written(tmp_path, studies):
    folders = [str(tmp_path / name) for name in ("vit_0", "convnext_0")]
    across.main([str(tmp_path / "all"), *folders])
    assert (tmp_path / "all" / "across.md").read_text().startswith("# Across networks")
    with (tmp_path / "all" / "across.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 10
    assert (tmp_path / "all" / "across.png").stat().st_size > 10_000


def test_a_folder_without_a_study_is_named(tmp_path):
    with pytest.raises(SystemExit, match="has no guard-"):
        across.main([str(tmp_path / "all"), str(tmp_path)])
    with pytest.raises(SystemExit, match="usage"):
        across.main([])
