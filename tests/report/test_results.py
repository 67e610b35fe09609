"""Pictures of the results in docs: all words are there, none is cut, none covers another."""

import itertools
import shutil
from pathlib import Path

import pytest
from matplotlib.text import Text

from gramwatch.report import frame, pyplot, results

RESULTS = Path(__file__).parents[2] / "docs" / "results"
KINDS = {
    "table2-densenet": "untuned",
    "table2-resnet34-fgsm": "tuned on FGSM",
    "table2-resnet34-outliers": "tuned on images of each",
    "ablation-resnet20": "No method saw an outlier",
    "depth-resnet20": "No method saw an outlier",
    "order-densenet": "No method saw an outlier",
    "trained-wrn40_2": "Trained with outliers: ",
    "mlp_study": "No method saw an outlier",
    "guard-densenet": "No method saw an outlier",
}


def shown(figure) -> list[Text]:
    """The texts that are drawn: those of ticks beyond the axes are not."""
    ticks = [axis for axes in figure.axes if axes.axison for axis in (axes.xaxis, axes.yaxis)]
    every = {
        label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in axis.findobj(Text)
    }
    drawn = {label for axis in ticks for tick in axis._update_ticks() for label in (tick.label1, tick.label2)}
    found = [text for text in figure.findobj(Text) if text not in every or text in drawn]
    return [text for text in found if text.get_text() and text.get_visible()]


@pytest.mark.parametrize("name", KINDS)
def test_words_are_whole_and_apart(name, tmp_path, monkeypatch):
    for end in ("csv", "md"):
        shutil.copy(RESULTS / f"{name}.{end}", tmp_path)
    figures = {}
    monkeypatch.setattr(frame, "write_picture", lambda figure, path: figures.update({path.name: figure}))
    results.draw(tmp_path / f"{name}.csv")
    assert set(figures) == {f"{name}.png"} | ({f"{name}-why.png"} if name.startswith("guard") else set())
    for figure in figures.values():
        figure.canvas.draw()
        assert (figure.get_figwidth(), figure.get_facecolor()) == (frame.WIDTH, (1, 1, 1, 1))
        assert figure.get_figheight() < 1.4 * frame.WIDTH  # a page
        width, height = figure.bbox.size
        texts = shown(figure)
        boxes = {text: text.get_window_extent() for text in texts}
        for text, box in boxes.items():
            assert 0 <= box.x0 <= box.x1 <= width, f"'{text.get_text()}' is cut"
            assert 0 <= box.y0 <= box.y1 <= height, f"'{text.get_text()}' is cut"
            assert text.get_fontsize() >= 6.5, f"'{text.get_text()}' is small"
        upright = [text for text in texts if text.get_rotation() in (0, 90)]
        for one, other in itertools.combinations(upright, 2):
            meet = boxes[one].padded(-1).overlaps(boxes[other].padded(-1))
            assert not meet, f"'{one.get_text()}' covers '{other.get_text()}'"
        pyplot().close(figure)
    title = (RESULTS / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("## ")
    words = [text.get_text() for text in figures[f"{name}.png"].texts]
    assert words[0] == title
    assert KINDS[name] in " ".join(words)


def test_every_result_with_a_page_has_its_picture():
    drawn = {path.stem for path in RESULTS.glob("*.png") if not path.stem.endswith("-why")}
    assert drawn == {
        path.stem for path in RESULTS.glob("*.csv") if not path.stem.startswith(results.NO_PICTURE)
    }
    assert len(drawn) > 20
