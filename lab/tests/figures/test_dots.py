"""Ours and the published figures side by side."""

import pytest

from gramwatch.explain import frame
from gramwatch.explain.frame import Words, pyplot
from gramwatch_lab.figures.dots import draw_dots
from gramwatch_lab.figures.looks import LOOKS
from gramwatch_lab.figures.table import Cell

CELLS = [
    Cell("near", "Gram", {"tnr": 60.0, "auroc": 80.0}, {"tnr": 70.0}),
    Cell("near", "OE", {"tnr": 90.0, "auroc": 95.0}, {}, "auxiliary source seen"),
    Cell("absent", "Gram", {}, {"tnr": 99.0}),
    Cell("mean", "Gram", {"tnr": 60.0, "auroc": 80.0}, {"tnr": 95.0}),
]


@pytest.fixture
def drawn(monkeypatch):
    result = []
    monkeypatch.setattr(frame, "write_picture", lambda figure, path: result.append(figure))
    yield result
    for figure in result:
        pyplot().close(figure)


def test_ours_are_filled_published_ones_hollow_and_no_published_mean_stands_beside_ours(drawn, tmp_path):
    draw_dots(tmp_path / "a.png", CELLS, Words("a title"))
    tnr, auroc = drawn[0].axes
    marks = [line for line in tnr.lines if len(line.get_xdata()) == 1]
    filled = [line.get_xdata()[0] for line in marks if line.get_markerfacecolor() != "white"]
    hollow = [line.get_xdata()[0] for line in marks if line.get_markerfacecolor() == "white"]
    assert sorted(filled) == [60.0, 60.0, 90.0]
    assert hollow == [70.0]
    assert {line.get_markeredgecolor() for line in marks} == {LOOKS["Gram"].colour, LOOKS["OE"].colour}
    assert len([line for line in auroc.lines if len(line.get_xdata()) == 1]) == 3
    assert [label.get_text() for label in tnr.get_yticklabels()] == ["near *", "mean"]
    assert "* auxiliary source seen: OE." in [text.get_text() for text in drawn[0].texts]


def test_without_any_data_the_published_figures_are_drawn(drawn, tmp_path):
    draw_dots(tmp_path / "a.png", [cell for cell in CELLS if not cell.ours], Words("a title"))
    assert [label.get_text() for label in drawn[0].axes[0].get_yticklabels()] == ["absent"]
