"""Curves of depth and order."""

import math

import pytest

from gramwatch.explain import frame
from gramwatch.explain.frame import Words, pyplot
from gramwatch_lab.figures.curves import draw_curves, panels_of
from gramwatch_lab.figures.table import Cell


def cells(published: dict[str, float] | None = None) -> list[Cell]:
    result = []
    for ood in ("a", "b", "absent"):
        for metric in ("Min/Max", "Mean/Var"):
            for order in (1, 2, 3):
                ours = {} if ood == "absent" else {"tnr": 90.0 + order, "auroc": 1.0}
                theirs = {"tnr": 80.0 + order} if metric == "Min/Max" and ood == "a" else {}
                result.append(Cell(ood, f"{metric}, order {order}", ours, theirs))
        result.append(Cell(ood, "MSP", {} if ood == "absent" else {"tnr": 50.0}, {"tnr": 51.0}))
    return result


def test_curves_and_published_ones_come_from_the_table():
    panels = panels_of(cells())
    assert list(panels) == ["a", "b"]
    assert panels["a"].curves == {"Min/Max": [91.0, 92.0, 93.0], "Mean/Var": [91.0, 92.0, 93.0]}
    assert panels["a"].published == {"Min/Max": [81.0, 82.0, 83.0]}
    assert panels["b"].published == {}
    assert panels["a"].whole == {"MSP": 50.0}


def test_published_curves_can_be_given():
    panels = panels_of(cells(), {"b": [1.0, math.nan, 3.0]})
    assert panels["a"].published == {}
    assert panels["b"].published["Min/Max"][::2] == [1.0, 3.0]


@pytest.mark.parametrize("given", [None, {}])
def test_published_curves_and_the_protocol_are_drawn(given, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(frame, "write_picture", lambda figure, path: drawn.append(figure))
    draw_curves(tmp_path / "a.png", cells(), Words("t", "seen", "fitted on 10 images"), given)
    (figure,) = drawn
    dotted = [line for line in figure.axes[0].lines if line.get_linestyle() == ":"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [list(line.get_ydata()) for line in dotted] == ([[81.0, 82.0, 83.0]] if given is None else [])
    assert ("published curve" in labels) == (given is None)
    assert "fitted on 10 images" in [text.get_text() for text in figure.texts]
    pyplot().close(figure)
