"""Which methods have a row in a table of shades."""

from gramwatch.evaluation import comparison
from gramwatch.evaluation.comparison import chosen, draw_shades, ranked
from gramwatch.explain import frame
from gramwatch.explain.frame import Words


def figures(count: int, **more: float) -> dict[str, dict[str, float]]:
    values = {f"method {i:02d}": 99.0 - i for i in range(count)} | more
    return {name: {"near": value - 1, "far": value + 1} for name, value in values.items()}


def test_the_best_dozen_and_guard_and_gram_have_rows():
    ranks = ranked(figures(30, Guard=80.5, Gram=50))
    assert list(ranks)[:2] == ["method 00", "method 01"]
    assert (ranks["Guard"], ranks["Gram"]) == (20, 32)
    assert chosen(ranks) == [*(f"method {i:02d}" for i in range(12)), "Guard", "Gram"]
    assert len(chosen(ranked(figures(14)))) == 14


def test_guards_row_is_marked_and_the_whole_table_is_named(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(frame, "write_picture", lambda figure, path: drawn.append(figure))
    draw_shades(tmp_path / "a.png", figures(30, Guard=80.5), Words("a title"), "auroc", "a.md")
    (figure,) = drawn
    axes = figure.axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "1. method 00"
    assert labels[-1] == "20. Guard"
    assert axes.get_yticklabels()[-1].get_weight() == "bold"
    assert any(
        "best 12 of 31 by the mean and Guard. All are in a.md." in text.get_text() for text in figure.texts
    )
    frames = [patch for patch in axes.patches if not patch.get_fill()]
    assert len(frames) == 13 + 1  # the worst set of each, and Guard's row
    assert comparison.pyplot().fignum_exists(figure.number)
    comparison.pyplot().close(figure)
