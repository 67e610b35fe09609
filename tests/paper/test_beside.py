"""Our figures beside the published ones: lines, tables, tallies, pictures."""

from pathlib import Path
from typing import Any

import pytest

from gramwatch.evaluate import Row
from gramwatch.metrics import METRICS
from gramwatch.paper.beside import SEEN, Line, draw_beside, markdown_tables, mean_line, tally
from gramwatch.paper.published import Entry
from tests.pictures import size_of_drawing


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
        found = mean_line(lines, method)
        assert found.our("tnr") == pytest.approx(value)
        assert SEEN in found.ood


def test_pictures_with_and_without_published_figures(tmp_path: Path) -> None:
    draw_beside(tmp_path / "a.png", [line("a", "x", 0.9, published=(entry(80.0),))], "title", "caption")
    draw_beside(tmp_path / "b.png", [line("a", "x", 0.9), line("b", "x", None)], "title")
    assert all(min(size_of_drawing(tmp_path / name)) > 200 for name in ("a.png", "b.png"))
