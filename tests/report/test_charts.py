"""The charts of a page: counts are right, and their size does not grow with the images."""

import json

import numpy as np
import pytest

pytest.importorskip("altair", reason="the extra 'report' is not installed")

from gramwatch.report import charts
from gramwatch.report.scores import read
from lab.tests.figures.tables import many, write_csv


@pytest.fixture
def scores(tmp_path):
    return read([write_csv(tmp_path / "new.csv", many(1000))])


def counted(chart, name):
    return sum(int(row[3].replace(",", "")) for row in chart.rows if row[0] == name)


def test_every_image_is_in_one_bin(scores):
    for chart in (
        charts.score_chart(scores, 2.0, np.linspace(-1, 2, 50)),
        charts.p_value_chart(scores, 0.05),
    ):
        assert counted(chart, "flagged") == 200
        assert counted(chart, "not flagged") == 800
    assert counted(charts.score_chart(scores, 2.0, np.linspace(-1, 2, 50)), "calibration images") == 50


def test_a_p_value_on_the_threshold_is_in_the_flagged_column(tmp_path):
    rows = many(20)
    for row in rows:
        row[4], row[5] = 0.05, True
    chart = charts.p_value_chart(read([write_csv(tmp_path / "t.csv", rows)]), 0.05)
    assert [row[:4] for row in chart.rows] == [["flagged", "0", "0.05", "20"]]


def test_the_threshold_is_drawn_and_said(scores):
    chart = charts.score_chart(scores, 2.5, None)
    assert "the dashed line, 2.5, are flagged" in chart.about
    rules = [layer for layer in chart.spec["layer"] if layer["mark"]["type"] == "rule"]
    assert [layer["data"]["values"] for layer in rules] == [[{"from": 2.5}]]
    assert "dashed" not in charts.score_chart(scores, None, None).about


def test_several_sets_have_a_line_each(tmp_path):
    files = [write_csv(tmp_path / f"{n}.csv", many(100, seed=n)) for n in range(3)]
    chart = charts.p_value_chart(read(files), 0.05)
    assert {row[0] for row in chart.rows} == {"0", "1", "2"}
    assert counted(chart, "1") == 100


def test_a_chart_of_many_images_is_no_larger(tmp_path):
    sizes = []
    for count in (1000, 20_000):
        scores = read([write_csv(tmp_path / "t.csv", many(count))])
        sizes.append(len(json.dumps(charts.score_chart(scores, 2.0, None).spec)))
    assert sizes[1] < 1.3 * sizes[0]


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0], [-5.0, 1e9], [1e-30, 2e-30]])
def test_bins_hold_any_scores(values):
    edges, _ = charts.score_edges(np.array(values))
    assert (np.diff(edges) > 0).all()
    assert np.histogram(values, edges)[0].sum() == len(values)


def test_an_infinite_score_is_said(tmp_path):
    chart = charts.score_chart(read([write_csv(tmp_path / "t.csv")]), None, None)
    assert "Images with an infinite score are not drawn: 1." in chart.about


def test_shares_are_of_the_images_of_a_row():
    chart = charts.share_chart("sets", "Sets", "About.", [("a", 1, 4), ("b", 0, 0)], 0.05, "set")
    assert chart.rows == [["a", "1", "4", "25.0 %"], ["b", "0", "0", "0.0 %"]]
    assert "chance alone would give, 5.0 %" in chart.about
    many_rows = [(str(i), 1, 2) for i in range(50)]
    assert "The first 30 of 50 are drawn" in charts.share_chart("s", "S", "", many_rows, None, "set").about
