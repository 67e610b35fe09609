"""The demo: what it leaves behind, and what it claims."""

import subprocess
import sys

import pytest
import torch

import gramwatch
from gramwatch.datasets import synthetic
from gramwatch.datasets.digits import digits, photograph_patches
from gramwatch.paper import demo


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
        for found in (judged.inside, judged.detector(digits().test)):
            assert low <= found.is_ood.double().mean() <= high


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
        assert figures[near, "Guard"] > figures[near, "Gram"] + 0.03


def test_the_command_knows_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "gramwatch", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == gramwatch.__version__


def test_the_parts_of_the_digits_are_disjoint():
    data = digits()
    parts = [
        {image.numpy().tobytes() for image in part}
        for part in (data.train, data.validation, data.test, data.held_out)
    ]
    for i, part in enumerate(parts):
        for other in parts[i + 1 :]:
            assert not part & other
    assert data.train_labels.unique().tolist() == list(range(8))
    assert len(data.train) + len(data.validation) + len(data.test) + len(data.held_out) == 1797


def test_outliers_are_what_their_description_says():
    shape = (3, 16, 16)
    noise = synthetic.gaussian(50, shape)
    assert noise.shape == (50, *shape)
    assert noise.min() == 0
    assert noise.max() == 1
    assert noise.mean().item() == pytest.approx(0.5, abs=0.01)
    assert synthetic.rademacher(50, shape).unique().tolist() == [-1, 1]
    assert synthetic.bernoulli(50, shape).unique().tolist() == [0, 1]
    blobs = synthetic.blobs(50, shape)
    assert ((blobs == 0) | (blobs >= 0.75)).all()
    assert 0.05 < (blobs > 0).double().mean() < 0.5
    for make in (synthetic.gaussian, synthetic.rademacher, synthetic.bernoulli, synthetic.blobs):
        assert torch.equal(make(3, shape, seed=4), make(3, shape, seed=4))
        assert not torch.equal(make(3, shape, seed=4), make(3, shape, seed=5))
    patches = photograph_patches(20)
    assert patches.shape == (20, 1, 8, 8)
    assert 0 <= patches.min() < patches.max() <= 1


def test_scores_stand_where_they_belong():
    from gramwatch.report.overview import _place

    scores = torch.tensor([-30.0, -3.0, -1.5, 0.0, 1.5, 3.0, 30.0, 300.0, torch.inf])
    places = _place(scores, 3.0)
    assert places[:-1] == pytest.approx([-2, -1, -0.5, 0, 0.5, 1, 2, 3])
    assert places[-1] > 20


def test_scores_that_cannot_be_drawn_are_refused(shown, tmp_path):
    from gramwatch.report.overview import draw_overview

    data = digits()
    detector = gramwatch.GramDetector(shown[2][0].detector.model, confidence="subtract")
    detector.fit([data.train]).calibrate([data.validation])
    assert detector.threshold_ < 0
    with pytest.raises(ValueError, match="units of the threshold"):
        draw_overview(tmp_path / "no.png", detector, {"test": (data.test, detector(data.test))}, "")


def test_a_picture_of_few_colours_looks_like_one_of_all(tmp_path):
    import io

    from PIL import Image, ImageChops

    from gramwatch.report import pyplot, write_picture

    figure, axes = pyplot().subplots()
    axes.imshow(torch.linspace(0, 1, 400).view(20, 20).numpy(), cmap="viridis")
    axes.set_title("a title")
    plain = io.BytesIO()
    figure.savefig(plain, format="png")
    write_picture(figure, tmp_path / "few.png")
    with Image.open(tmp_path / "few.png") as few, Image.open(plain) as many:
        assert few.size == many.size
        assert few.mode == "P"
        difference = ImageChops.difference(few.convert("RGB"), many.convert("RGB")).convert("L").histogram()
    assert sum(difference[24:]) < 0.001 * sum(difference)
    assert (tmp_path / "few.png").stat().st_size < len(plain.getvalue())
    assert not pyplot().fignum_exists(figure.number)
