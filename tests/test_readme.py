"""README.md: its figures are those of the files in docs, and what it says of all networks is so."""

import csv
from pathlib import Path

import pytest

from tests.figures import DOCS, Results, says

PAGE = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
densenet, resnet34 = Results("table2-densenet"), Results("table2-resnet34")


@pytest.mark.parametrize(
    "sentence",
    [
        says(
            "on CIFAR-10 with ResNet-34, Gram finds {} % of iSUN (published: {} %): the same files, weights"
            " of our own.",
            resnet34.tnr("Gram", "iSUN"),
            resnet34.published("Gram", "iSUN"),
        ),
        says(
            "With the paper's DenseNet, Gram finds {} % of Tiny ImageNet reduced as in the paper, and {} % of"
            " the same images reduced properly.",
            densenet.tnr("Gram", "Tiny ImageNet, nearest"),
            densenet.tnr("Gram", "Tiny ImageNet, anti-aliased"),
        ),
    ],
    ids=str,
)
def test_a_sentence_says_what_its_files_say(sentence):
    mistakes = list(sentence.mistakes(PAGE))
    assert not mistakes, "\n".join([f"README.md: {sentence}", *mistakes])


def test_the_page_of_limits_has_the_same_figures():
    sentence = says(
        "Gram flags {} % of Tiny ImageNet reduced by nearest neighbour, and {} % of the same images reduced"
        " with anti-aliasing",
        densenet.tnr("Gram", "Tiny ImageNet, nearest"),
        densenet.tnr("Gram", "Tiny ImageNet, anti-aliased"),
    )
    assert list(sentence.mistakes((DOCS / "limits.md").read_text(encoding="utf-8"))) == []


def test_the_table_of_the_demo_is_that_of_its_file():
    """docs/data/demo.csv is convnet.csv of `gramwatch demo`."""
    with (DOCS / "data" / "demo.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["ood"], row["method"]): row for row in rows}
    sets = list(dict.fromkeys(row["ood"] for row in rows))
    assert len(sets) == 6
    for ood in sets:
        cells = [
            " / ".join(f"{100 * float(found[ood, method][metric]):.1f}" for metric in ("tnr", "auroc"))
            for method in ("Guard", "Gram", "MSP")
        ]
        assert f"| {ood} | {' | '.join(cells)} |" in PAGE
    assert PAGE.count(" / ") >= 3 * (1 + len(sets))
