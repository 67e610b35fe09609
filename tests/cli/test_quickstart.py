"""The demo: what it leaves behind, and what it claims."""

import pytest
import torch

import gramwatch
from gramwatch.cli import quickstart as demo
from gramwatch.evaluation import compare
from gramwatch.inputs.demo import digits, outlier_sets

pytestmark = pytest.mark.usefixtures("whole_rehearsals")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    folder, said = tmp_path_factory.mktemp("demo"), []
    return folder, said, demo.run(folder, said.append)


def test_it_leaves_a_picture_tables_and_detectors(shown):
    from PIL import Image

    folder, said, _ = shown
    with Image.open(folder / "demo.png") as picture:
        assert picture.width > 900
        assert len(set(picture.convert("L").resize((64, 64)).tobytes())) > 20
    assert (folder / "convnet.csv").read_text().count("\n") == 1 + 18
    assert any("Look at" in line for line in said)
    assert sum("photograph patches" in line for line in said) == 2


def test_its_networks_work_and_its_false_alarms_are_few(shown):
    for judged in shown[2]:
        assert judged.accuracy > 0.95
        low, high = demo.chance_range(judged.guard, len(judged.inside))
        assert 0 < low < 0.05 < high < 0.12
        for result in (judged.inside, judged.detector(digits().test)):
            assert low <= result.is_ood.double().mean() <= high


def test_far_outliers_are_caught_better_than_by_the_baseline(shown):
    for judged in shown[2]:
        figures = {(row.ood, row.method): row.mean for row in judged.evaluation.rows}
        names = {name for name, _ in figures}
        assert len(names) >= 6
        for name in names - {"digits 8 and 9, held out"}:
            assert figures[name, "Gram"]["auroc"] > 0.95
            assert figures[name, "Gram"]["tnr"] > figures[name, "MSP"]["tnr"]


def test_its_saved_detector_loads(shown):
    folder, _, (convnet, _) = shown
    loaded = gramwatch.load(folder / "convnet.safetensors", convnet.detector.model)
    x = digits().test[:50]
    assert torch.equal(loaded(x).score, convnet.detector(x).score)
    guard = gramwatch.load(folder / "convnet-guard.safetensors", convnet.guard.model)
    assert torch.equal(guard(x).score, convnet.guard(x).score)


def test_guard_is_better_than_gram_where_gram_is_weak(shown):
    for judged in shown[2]:
        figures = {(row.ood, row.method): row.mean["auroc"] for row in judged.evaluation.rows}
        near = "digits 8 and 9, held out"
        assert figures[near, "Guard"] > figures[near, "Gram"] + 0.015


def test_scores_that_cannot_be_drawn_are_refused(shown, tmp_path):
    from gramwatch.report.overview import draw_overview

    data = digits()
    detector = gramwatch.GramDetector(shown[2][0].detector.model, confidence="subtract")
    detector.fit([data.train]).calibrate([data.validation])
    assert detector.threshold_ < 0
    with pytest.raises(ValueError, match="units of the threshold"):
        draw_overview(tmp_path / "no.png", detector, {"test": (data.test, detector(data.test))}, "")


def test_the_comparison_of_methods_shows_the_figures_of_the_demo(shown):
    judged, data = shown[2][1], digits()
    beside = compare.fitted(
        judged.detector.model, data.train.split(256), ["guard", "gram", "msp"], progress=False
    )
    beside["Guard"].calibrate([data.validation], progress=False)  # as the demo's guard: it rehearses
    sets = {name: x.split(256) for name, x in outlier_sets(data).items()}
    result = gramwatch.evaluate(beside, data.test.split(256), sets, progress=False)
    theirs = {(row.method, row.ood): row.mean for row in judged.evaluation.rows}
    assert {(row.method, row.ood): row.mean for row in result.rows} == theirs
