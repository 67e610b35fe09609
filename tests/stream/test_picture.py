"""The picture of a stream."""

import itertools

import numpy as np
import pytest

from gramwatch.explain import frame
from gramwatch.explain.frame import OUTSIDE, pyplot
from gramwatch.stream.picture import HIGHEST, draw_stream
from lab.tests.figures.test_results import shown


@pytest.fixture
def figures(monkeypatch):
    drawn = []
    monkeypatch.setattr(frame, "write_picture", lambda figure, path: drawn.append(figure))
    yield drawn
    for figure in drawn:
        pyplot().close(figure)


def draw(images: int, **how) -> None:
    time = np.arange(1, images + 1) * 10
    strength = np.logspace(0, 200, images) if images else np.zeros(0)
    draw_stream("stream.png", time, strength, np.full(images, 0.07), alarm_level=1e6, rate=0.05, **how)


@pytest.mark.parametrize("alarm_at", [None, 120, 9_500])
def test_words_are_whole_and_apart(figures, alarm_at):
    draw(1_000, alarm_at=alarm_at, since=None if alarm_at is None else alarm_at - 100)
    (figure,) = figures
    figure.canvas.draw()
    width, height = figure.bbox.size
    boxes = {text: text.get_window_extent() for text in shown(figure)}
    for text, box in boxes.items():
        assert 0 <= box.x0 <= box.x1 <= width, f"'{text.get_text()}' is cut"
        assert 0 <= box.y0 <= box.y1 <= height, f"'{text.get_text()}' is cut"
    for one, other in itertools.combinations(boxes, 2):
        meet = boxes[one].padded(-1).overlaps(boxes[other].padded(-1))
        assert not meet, f"'{one.get_text()}' covers '{other.get_text()}'"
    said = " ".join(text.get_text() for text in boxes)
    assert "alarm level 1,000,000" in said
    assert (f"alarm at image {alarm_at or 0:,}" in said) == (alarm_at is not None)


def test_the_curves_are_those_given(figures):
    draw(1_000, alarm_at=60, since=30)
    above, below = figures[0].axes
    x, y = above.lines[1].get_data() if above.lines[0].get_color() == OUTSIDE else above.lines[0].get_data()
    assert x[-1] == 10_000
    assert y[0] == 1
    assert y[-1] == HIGHEST * 1e6  # cut off at the end of the axis
    values = below.patches[-1].get_data().values
    np.testing.assert_allclose(values, 7)


@pytest.mark.parametrize("images", [0, 1, 3])
def test_short_streams_are_drawn(figures, images):
    draw(images)
    assert len(figures) == 1
