"""Our figures beside the published ones: lines, tables, tallies, pictures."""

from dataclasses import replace
from typing import Any

import pytest

from gramwatch.evaluation.evaluate import Row
from gramwatch.numerics.metrics import METRICS
from gramwatch_lab.figures.table import APART
from gramwatch_lab.paper.beside import SEEN, Line, markdown_tables, mean_line, tally
from gramwatch_lab.paper.published import Entry
from gramwatch_lab.paper.sets import ood_sets


def row(value: float, ood: str = "a") -> Row:
    return Row("m", ood, 7, dict.fromkeys(METRICS, value), dict.fromkeys(METRICS, 0.01))


def line(ood: str, method: str, value: float | None, **more: Any) -> Line:
    return Line("net", "in", ood, method, None if value is None else row(value), **more)


def entry(value: float, table: str = "t") -> Entry:
    return Entry(table, "in", "net", "a", "m", {"tnr": value})


def test_a_line_shows_ours_published_and_difference() -> None:
    shown = line("a", "m", 0.9, published=(entry(88.0), entry(91.25), entry(88.04)))
    assert shown.cell("tnr") == "90.00 (88.0 or 91.25, +2.00)"
    assert shown.cell("auroc") == "90.00"
    assert line("a", "m", None, published=(entry(88.0),)).cell("tnr") == "(88.0)"
    text = markdown_tables([shown, line("b", "m", None)], ["tnr"])
    assert "| b: data not present |  |" in text
    assert "88.0 (t) and 91.25 (t)" in text


def test_a_table_ends_with_the_mean_and_the_worst() -> None:
    lines = [line("a", "x", 0.9), line("a", "y", 0.8), line("b", "x", 0.5), line("b", "y", 0.7)]
    lines += [line("c", "x", None), line("c", "y", None)]
    text = markdown_tables(lines, ["tnr"])
    assert "| **mean** | 70.00 | 75.00 |\n| **worst** | 50.00 | 70.00 |" in text
    assert "worst" not in markdown_tables(lines[:2], ["tnr"])
    assert "worst" not in markdown_tables([*lines, mean_line(lines, "x"), mean_line(lines, "y")], ["tnr"])


def test_tally_counts_as_the_paper_does() -> None:
    lines = [line("a", "x", 0.9), line("a", "y", 0.895), line("b", "x", 0.5), line("b", "y", 0.7)]
    lines += [line("c", "x", 0.5), line("c", "y", None), line("mean", "x", 1.0, summary=True)]
    assert tally(lines, "x") == [1, 0, 1]
    assert tally(lines, "y") == [1, 1, 0]


def test_means_leave_out_what_was_seen() -> None:
    lines = [line("a", "x", 0.9), line("b", "x", 0.5), line("a", "y", 0.8), line("b", "y", 1.0, note=SEEN)]
    for method, value in (("x", 90.0), ("y", 80.0)):
        result = mean_line(lines, method)
        assert result.our("tnr") == pytest.approx(value)
        assert SEEN in result.ood


def test_the_mean_below_a_table_leaves_out_what_was_seen() -> None:
    lines = [line("a", "x", 0.9), line("b", "x", 0.5), line("c", "x", 0.1, note=SEEN)]
    text = markdown_tables(lines, ["tnr"])
    assert f"| **mean, {SEEN} left out** | 70.00 |\n| **worst, {SEEN} left out** | 50.00 |" in text


def test_sets_that_are_shown_apart_have_no_line_of_notes() -> None:
    text = markdown_tables([line("a", "x", 0.9, note=APART), line("b", "x", 0.5, note="odd")], ["tnr"])
    assert "- x, b: odd." in text
    assert APART not in text


def test_one_line_says_how_far_the_same_files_are_off() -> None:
    theirs = (entry(88.0),)
    lines = [line("a", "x", 0.9, published=theirs), line("b", "x", 0.5)]
    lines += [line("like a", "x", 0.8, published=theirs, like="a"), line("c", "x", None, published=theirs)]
    text = markdown_tables(lines, ["tnr"])
    said = "On the same files as published, ours less published, points of TNR at TPR 95 %: a: x +2.0."
    assert text.splitlines()[0] == said
    assert "same files" not in markdown_tables(lines, ["tnr"], whole=False)
    assert "same files" not in markdown_tables(lines[1:], ["tnr"])
    elsewhere = replace(lines[0], in_distribution="in (indicative)")
    assert "same files" not in markdown_tables([elsewhere], ["tnr"])


def test_no_published_mean_stands_beside_a_mean_of_our_sets() -> None:
    """`mean_line` has nothing to compare with, and "mean" is no set of any experiment."""
    lines = [line("a", "x", 0.9, published=(entry(88.0),)), line("b", "x", 0.5)]
    assert mean_line(lines, "x").published == ()
    for inside in ("cifar10", "cifar100", "svhn", "mnist"):
        assert not {"mean", "MEAN"} & {ood_set.published for ood_set in ood_sets(inside)}
