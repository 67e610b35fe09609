"""Pictures of the results in docs: all words are there, none is cut, none covers another."""

import itertools
import shutil
from pathlib import Path

import pytest
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from gramwatch.evaluation import comparison
from gramwatch.explain import frame
from gramwatch.explain.frame import pyplot
from gramwatch_lab.figures import results, table

RESULTS = Path(__file__).parents[3] / "docs" / "results"
METHODS = (
    *("Guard", "Gram", "KNN", "energy", "MSP", "ODIN", "ViM", "GEN", "fDBD", "NCI", "DICE"),
    *("Gram + unit Mahalanobis", "Mahalanobis instead of early Mahalanobis"),
)
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
    result = [text for text in figure.findobj(Text) if text not in every or text in drawn]
    return [text for text in result if text.get_text() and text.get_visible()]


def edges(box: Bbox) -> tuple[float, float, float, float]:
    """Left, right, lower and upper: with a hundred texts, asking a box for each pair takes seconds."""
    return (*sorted((box.x0, box.x1)), *sorted((box.y0, box.y1)))


def check(figure) -> None:
    """No word is cut or small, and none covers another."""
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
    inner = {text: edges(boxes[text].padded(-1)) for text in texts if text.get_rotation() in (0, 90)}
    for one, other in itertools.combinations(inner, 2):
        (left, right, low, high), (its_left, its_right, its_low, its_high) = inner[one], inner[other]
        apart = right < its_left or its_right < left or high < its_low or its_high < low
        assert apart, f"'{one.get_text()}' covers '{other.get_text()}'"


@pytest.mark.parametrize("name", KINDS)
def test_words_are_whole_and_apart(name, tmp_path, monkeypatch):
    for end in ("csv", "md"):
        shutil.copy(RESULTS / f"{name}.{end}", tmp_path)
    figures = {}
    monkeypatch.setattr(frame, "write_picture", lambda figure, path: figures.update({path.name: figure}))
    results.draw(tmp_path / f"{name}.csv")
    assert set(figures) == {f"{name}.png"} | ({f"{name}-why.png"} if name.startswith("guard") else set())
    for figure in figures.values():
        check(figure)
        pyplot().close(figure)
    title = (RESULTS / f"{name}.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("## ")
    words = [text.get_text() for text in figures[f"{name}.png"].texts]
    assert words[0] == title
    assert KINDS[name] in " ".join(words)


def made_up(folder, sets, apart=()):
    """The files of a study of Guard on these sets."""
    lines = ["network,in_distribution,ood,method,images,auroc,note"]
    for place, method in enumerate(METHODS):
        for i, name in enumerate(sets):
            note = table.APART if name in apart else ""
            lines.append(f"net,photographs,{name},{method},800,{99 - place - i % 7},{note}")
    (folder / "guard-net.csv").write_text("\n".join(lines), encoding="utf-8")
    page = "## net, photographs: ways to join\n\n    gramwatch study guard\n\nNo method saw an outlier.\n"
    (folder / "guard-net.md").write_text(page, encoding="utf-8")
    return folder / "guard-net.csv"


@pytest.mark.parametrize("count", [3, comparison.MOST_COLUMNS, 39])
def test_a_picture_of_few_or_many_sets_is_whole_and_leaves_out_those_apart(count, tmp_path, monkeypatch):
    sets = [f"fault {i} of a camera" for i in range(count)]
    figures = {}
    monkeypatch.setattr(frame, "write_picture", lambda figure, path: figures.update({path.name: figure}))
    results.draw(made_up(tmp_path, [*sets, "control"], apart=["control"]))
    assert set(figures) == {"guard-net.png", "guard-net-why.png"}
    for figure in figures.values():
        check(figure)
        drawn = {text.get_text().replace("\n", " ") for text in shown(figure)}
        assert {*sets, "mean"} <= drawn
        assert "control" not in drawn
        pyplot().close(figure)


def test_the_facts_of_sets_have_no_picture(tmp_path):
    (tmp_path / "sets-net-scenes.csv").write_text("ood,name,kind\n", encoding="utf-8")
    results.draw(tmp_path / "sets-net-scenes.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["sets-net-scenes.csv"]


def test_every_result_with_a_page_has_its_picture():
    drawn = {path.stem for path in RESULTS.glob("*.png") if not path.stem.endswith("-why")}
    assert drawn == {
        path.stem for path in RESULTS.glob("*.csv") if not path.stem.startswith(results.NO_PICTURE)
    }
    assert len(drawn) > 20
