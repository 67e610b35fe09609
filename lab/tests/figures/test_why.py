"""The picture of why Guard joins methods."""

from pathlib import Path

import pytest

from gramwatch_lab.figures.why import BEST, draw_why, marks_of, read_figures
from lab.tests.paper.test_against import FIGURES
from tests.drawings import size_of_drawing


def test_the_picture_shows_gram_the_best_other_and_guard() -> None:
    figures = {ood: {name: auroc for name, (auroc, _) in result.items()} for ood, result in FIGURES.items()}
    for result in figures.values():
        result["Gram + KNN"] = 100.0  # another rule is no single method
    rows = marks_of(figures)
    assert [row.ood for row in rows] == ["far", "texture", "middle", "near", "mean"]
    assert [(row.others_name, row.other) for row in rows[:2]] == [("ODIN", 80), ("ODIN", 90)]
    mean = rows[-1]
    assert (mean.others_name, mean.other, mean.guard) == ("ODIN", 87, pytest.approx(93.4775))


def test_the_picture_is_drawn_for_several_networks_from_their_tables(tmp_path: Path) -> None:
    table = tmp_path / "guard.csv"
    lines = ["network,in_distribution,ood,method,images,auroc"]
    lines += [
        f"ResNet-20,CIFAR-10,{ood},{method},100,{100.0 if method == 'Guard' else auroc}"
        for ood, result in FIGURES.items()
        for method, (auroc, _) in result.items()
    ]
    lines += ["ResNet-20,CIFAR-10,SVHN,Guard,data not present,"]
    table.write_text("\n".join(lines))
    title, figures = read_figures(table)
    assert title == "ResNet-20, CIFAR-10"
    assert set(figures) == set(FIGURES)
    assert figures["near"]["Guard"] == 100 > BEST
    one, three = tmp_path / "one.png", tmp_path / "three.png"
    draw_why(one, {title: figures})
    draw_why(three, {title: figures, "b": figures, "c": figures})
    (width, height), (wider, higher) = size_of_drawing(one), size_of_drawing(three)
    assert wider == width
    assert 2 * height > higher > 1.5 * height  # two networks side by side, the third below
