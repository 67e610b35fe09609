"""The pictures of calibrations: what they say is so, and no word is cut."""

import pytest
import torch

from gramwatch.detect.threshold import p_value, range_of_rates, threshold
from gramwatch.explain import frame
from gramwatch.explain.frame import pyplot
from gramwatch_lab.figures import calibration
from gramwatch_lab.figures.calibration import LEVEL, NEW, SCORES, draw_p_values, draw_sizes, made_up_scores
from lab.tests.figures.test_results import check, shown
from tests.drawings import size_of_drawing


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws a picture, checks its words and returns them."""

    def draw(function) -> list[str]:
        figures = []
        write = frame.write_picture
        monkeypatch.setattr(frame, "write_picture", lambda figure, path: figures.append(figure))
        function(tmp_path / "picture.png")
        (figure,) = figures
        check(figure)
        words = [text.get_text() for text in shown(figure)]
        write(figure, tmp_path / "picture.png")
        width, _ = size_of_drawing(tmp_path / "picture.png")
        assert width == 1600
        pyplot().close("all")
        return words

    return draw


def test_the_p_values_are_those_of_the_library(drawn):
    words = "\n".join(drawn(draw_p_values))
    scores = made_up_scores()
    assert len(scores) == SCORES
    for (name, score), verdict in zip(NEW.items(), ("not flagged", "flagged"), strict=True):
        p = float(p_value(torch.tensor([score]), scores))
        assert (p <= 1 - LEVEL) == (verdict == "flagged") == (score > threshold(scores, LEVEL))
        assert f"{name}: {verdict}" in words
        assert f"= {p:.2f}" in words


def test_the_ranges_are_those_of_the_library(drawn):
    words = drawn(draw_sizes)
    for images in calibration.IMAGES:
        assert f"{images:,}" in words
        for rate in range_of_rates(images - images // 2, LEVEL):
            assert f"{rate:.1%}" in words
