"""The paper's experiments on a small made-up MNIST: what they write, and that no finished cell is lost."""

import csv
import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from gramwatch import GramDetector, datasets, demo, networks, training
from gramwatch.cli.app import app
from gramwatch.datasets.digits import digits
from gramwatch.errors import GramwatchWarning, InputError
from gramwatch.evaluate import Row
from gramwatch.methods import fgsm
from gramwatch.metrics import METRICS
from gramwatch.paper import experiment, guard_study, mlp, mlp_study, subject
from gramwatch.paper.beside import SEEN, Line, draw_beside, markdown_tables, mean_line, tally
from gramwatch.paper.cells import Cells
from gramwatch.paper.depth import stage_of
from gramwatch.paper.experiment import command
from gramwatch.paper.published import Entry
from gramwatch.paper.subject import BLOCK_ENDS, GramByOrder, MethodSpec, OodSet, ood_sets
from gramwatch.report.schematic import draw_schematic
from gramwatch.taps import find_taps
from pictures import size_of_drawing

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")

NOISE = [each for each in ood_sets("mnist") if each.name in ("gaussian", "bernoulli")]


def write_idx(path: Path, values: np.ndarray) -> None:
    head = bytes([0, 0, 8, values.ndim]) + b"".join(n.to_bytes(4, "big") for n in values.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def enlarged(images: Tensor) -> np.ndarray:
    large = F.interpolate(images, 28, mode="bilinear").clamp(0, 1)
    return (255 * large[:, 0]).round().byte().numpy()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scikit-learn's digits 0 to 7 in the layout of MNIST, 8 and 9 in that of KMNIST. The rest is absent."""
    root = tmp_path_factory.mktemp("data")
    found = digits()
    for part, images, labels in (
        ("train", found.train, found.train_labels),
        ("t10k", found.test, found.test_labels),
    ):
        write_idx(root / "MNIST/raw" / f"{part}-images-idx3-ubyte.gz", enlarged(images))
        write_idx(root / "MNIST/raw" / f"{part}-labels-idx1-ubyte.gz", labels.numpy())
    write_idx(root / "KMNIST/raw/t10k-images-idx3-ubyte.gz", enlarged(found.held_out))
    write_idx(root / "KMNIST/raw/t10k-labels-idx1-ubyte.gz", np.zeros(len(found.held_out)))
    return root


@pytest.fixture(scope="module")
def weights(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that has learnt those digits a little."""
    torch.manual_seed(0)
    network = networks.build("mnist_convnet")
    found = digits()
    images = F.interpolate(found.train, 28, mode="bilinear").clamp(0, 1)
    demo.train(network, images, found.train_labels, epochs=3)
    path = tmp_path_factory.mktemp("weights") / "convnet.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.fixture
def options(data: Path, weights: Path, tmp_path: Path) -> experiment.Options:
    return experiment.Options(
        tmp_path / "out",
        network="mnist_convnet",
        weights={"convnet": weights},
        data=data,
        subset=60,
        say=lambda text: None,
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# --- cells -------------------------------------------------------------------------------------------


def test_cells_keep_what_they_are_given(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "cells")
    assert cells.read("MSP, KMNIST", {"a": 1}) is None
    cells.keep("MSP, KMNIST", {"a": 1}, {"scores": torch.arange(3.0)})
    assert cells.has("MSP, KMNIST", {"a": 1})
    assert not cells.has("MSP, KMNIST", {"a": 2})
    assert cells.path("MSP, KMNIST", {"a": 1}).name.startswith("msp-kmnist-")
    found = cells.read("MSP, KMNIST", {"a": 1})
    assert found is not None
    assert torch.equal(found["scores"], torch.arange(3.0))


@pytest.mark.filterwarnings("error::gramwatch.GramwatchWarning")
def test_a_damaged_cell_is_said_and_forgotten(tmp_path: Path) -> None:
    cells = Cells(tmp_path)
    cells.keep("x", {}, {"scores": torch.arange(3.0)})
    path = cells.path("x", {})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.warns(GramwatchWarning, match="computed anew"):
        assert cells.read("x", {}) is None
    assert not path.exists()


def test_an_interrupted_experiment_loses_no_finished_cell(
    options: experiment.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at the third set of four; started again, only that and the last are measured."""
    plain, fit = subject.Together.measure, subject.fit_together
    done: list[str] = []
    fits: list[int] = []

    def measuring(together: subject.Together, loader: Any, doing: str) -> Any:
        if len(done) == 2 and not interrupted:
            raise KeyboardInterrupt
        done.append(doing)
        return plain(together, loader, doing, False)

    def fitting(detectors: Any, loader: Any) -> None:
        fits.append(len(detectors))
        fit(detectors, loader, progress=False)

    monkeypatch.setattr(subject.Together, "measure", measuring)
    monkeypatch.setattr(subject, "fit_together", fitting)
    study = options.subject()
    methods = experiment.methods_of(study, "msp,gram")
    sets = [each for each in ood_sets("mnist") if each.name in ("kmnist", "gaussian", "bernoulli")]
    interrupted = False
    with pytest.raises(KeyboardInterrupt):
        study.measure(methods, sets)
    assert done == ["MNIST", "KMNIST"]
    interrupted = True
    first = options.subject().measure(methods, sets)
    assert done == ["MNIST", "KMNIST", "Gaussian noise", "Bernoulli noise"]
    assert fits == [2]  # the fit was kept too
    again = options.subject().measure(methods, sets)
    assert len(done) == 4
    assert torch.equal(first["KMNIST"]["MSP"].values, again["KMNIST"]["MSP"].values)
    assert torch.equal(first["KMNIST"]["Gram"].deviations, again["KMNIST"]["Gram"].deviations)
    # Another method is measured alone, other settings anew.
    options.subject().measure([*methods, MethodSpec("energy", "energy")], sets)
    assert len(done) == 8
    assert fits == [2, 1]
    replace(options, subset=50).subject().measure(methods[:1], sets[:1])
    assert len(done) == 10


def test_a_damaged_cell_is_measured_again(options: experiment.Options) -> None:
    study = options.subject()
    methods = experiment.methods_of(study, "msp")
    before = study.measure(methods, NOISE[:1])
    path = study.cells.path(*study._cell(methods[0], NOISE[0]))
    path.write_bytes(b"nothing")
    after = options.subject().measure(methods, NOISE[:1])
    assert torch.equal(before[NOISE[0].title]["MSP"].values, after[NOISE[0].title]["MSP"].values)


def test_the_logits_of_a_set_are_kept_and_held_once(options: experiment.Options) -> None:
    study = options.subject()
    methods = experiment.methods_of(study, "msp,energy,gram")
    before = study.measure(methods, NOISE[:1])[NOISE[0].title]
    assert before["MSP"].logits is before["energy"].logits is before["Gram"].logits
    path = study.cells.path(*study._logits_cell(NOISE[0]))
    assert len(list(study.cells.folder.glob("*-logits-*"))) == 2  # of the test images, and of the noise
    path.write_bytes(b"nothing")
    after = options.subject().measure(methods, NOISE[:1])[NOISE[0].title]
    for method, found in after.items():
        assert torch.equal(found.logits, before[method].logits)
        assert torch.equal(found.values, before[method].values)


# --- subjects ----------------------------------------------------------------------------------------


def test_images_to_tune_on_are_not_judged(options: experiment.Options) -> None:
    study = replace(options, tune="fgsm").subject()
    which = next(each for each in ood_sets("mnist") if each.name == "kmnist")
    tuning, test = study.tuning_batches(which).images, study.test_batches(which).images
    assert len(tuning) == 12
    assert len(test) == 48
    together = torch.cat([tuning, test]).flatten(1).sort(0).values
    assert torch.equal(together, options.subject().test_batches(which).images.flatten(1).sort(0).values)


def test_adversarial_examples_are_made_by_true_classes(options: experiment.Options) -> None:
    study = replace(options, tune="fgsm", subset=100).subject()
    images = torch.cat(list(study.tuning_batches(study._inside)))
    test = study.load("mnist", count=100)
    assert test.labels is not None
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:20]
    assert torch.equal(images, study.loaded.prepare(test.images[order]))
    expected = fgsm(study.network, images, test.labels[order], scale=study.loaded.std)
    assert torch.equal(torch.cat(study.fgsm_batches()), expected)
    wrong = (test.labels[order] + 1) % 8
    assert not torch.equal(fgsm(study.network, images, wrong, scale=study.loaded.std), expected)


def test_a_part_in_distribution_is_validated_by_its_own_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR-100's part, made up: validation is a split, and the page is marked."""
    generator = np.random.default_rng(0)
    (tmp_path / "cifar100-subset").mkdir()
    labels = np.repeat(np.arange(4), 60)
    images = generator.integers(0, 60, (240, 32, 32, 3)) + 48 * labels[:, None, None, None]
    np.save(tmp_path / "cifar100-subset" / "images.npy", images.astype(np.uint8))
    np.save(tmp_path / "cifar100-subset" / "labels.npy", labels)
    weights = tmp_path / "net.pth"
    torch.save(networks.build("resnet20", 4).state_dict(), weights)
    noise = [each for each in ood_sets("cifar10") if each.name == "gaussian"]
    monkeypatch.setattr("gramwatch.paper.table2.ood_sets", lambda name: noise)
    given = experiment.Options(
        tmp_path / "out",
        network="resnet20",
        weights={"net": weights},
        in_distribution="cifar100_parts",
        data=tmp_path,
        subset=40,
        methods="msp,gram",
        say=lambda text: None,
    )
    study = given.subject()
    assert (study.inside_title, study.published_title) == ("CIFAR-100 (indicative)", "CIFAR-100")
    lines = experiment.run("table2", given)
    assert {each.ours.examples for each in lines if each.ours} == {40}
    page = (given.output / "table2-resnet20-cifar100_parts.md").read_text(encoding="utf-8")
    assert "Indicative: 6,000 images, mostly of the training split" in page
    assert "In-distribution: 40 examples for validation and 40 for test" in page
    measured = study.measure(experiment.methods_of(study, "gram"), noise)
    assert set(measured) == {study.inside_title, subject.VALIDATION, noise[0].title}
    assert len(measured[subject.VALIDATION]["Gram"]) == 40


def test_gram_by_order_is_gram_taken_apart(options: experiment.Options) -> None:
    study = options.subject()
    batches = [batch[0] for batch in study.training_batches()]
    settings: dict[str, Any] = {"taps": ["conv?"], "statistic": "row_sums"}
    fine = GramByOrder(study.network, **settings).fit(batches, progress=False)
    whole = GramDetector(study.network, **settings).fit(batches, progress=False)
    third = GramDetector(study.network, orders=[3], **settings).fit(batches, progress=False)
    images = next(iter(study.test_batches(NOISE[0])))
    by_order = fine.measure(images).deviations.unflatten(1, (2, 10))
    assert torch.allclose(by_order.sum(2), whole.measure(images).deviations, rtol=1e-5)
    assert torch.allclose(by_order[:, :, 2], third.measure(images).deviations, rtol=1e-5)
    assert by_order.sum() > 0


@pytest.mark.parametrize("name", BLOCK_ENDS)
def test_block_ends_are_taps(name: str) -> None:
    names = {tap.name for tap in find_taps(networks.build(name).eval(), torch.rand(2, 3, 32, 32))}
    assert set(BLOCK_ENDS[name]) <= names


def test_stages() -> None:
    taps = ("conv1", "layer3.0.conv1", "block2.layer.1.relu", "trans2.conv1", "block3.output")
    assert [stage_of(tap) for tap in taps] == [1, 3, 2, 2, 3]


def test_sets_fit_their_in_distribution() -> None:
    cifar, mnist = ood_sets("cifar10"), ood_sets("mnist")
    assert "cifar10" not in {each.name for each in cifar}
    assert {each.title for each in cifar if each.near} == {"CIFAR-100", "CIFAR-100 subset"}
    assert not any(each.near or each.name == "mnist" for each in mnist)
    published = {each.name: each.published for each in cifar}
    assert published["gaussian"] is None
    assert published["gaussian_normalised"] == "Gaussian"
    parts = {each.name: each for each in ood_sets("cifar100_parts")}
    assert not {"cifar100", "cifar100_subset", "cifar100_parts"} & parts.keys()
    assert parts["cifar10"].near
    for inside in ("cifar10", "cifar100_parts", "mnist"):
        found = {each.name: each for each in ood_sets(inside)}
        assert found["isun"].exact
        assert not found["svhn_subset"].exact
    assert "svhn_subset" not in {each.name for each in ood_sets("svhn")}


# --- tables ------------------------------------------------------------------------------------------


def row(value: float, ood: str = "a") -> Row:
    return Row("m", ood, 7, dict.fromkeys(METRICS, value), dict.fromkeys(METRICS, 0.01))


def line(ood: str, method: str, value: float | None, **more: Any) -> Line:
    return Line("net", "in", ood, method, None if value is None else row(value), **more)


def entry(value: float, table: str = "t") -> Entry:
    return Entry(table, "in", "net", "a", "m", {"tnr": value})


def test_a_line_shows_ours_published_and_difference() -> None:
    shown = line("a", "m", 0.9, published=(entry(88.0), entry(91.25), entry(88.04)))
    assert shown.cell("tnr") == "90.00 (88.0 or 91.25, +2.00)"
    assert shown.cell("auroc") == "90.00"
    assert line("a", "m", None, published=(entry(88.0),)).cell("tnr") == "(88.0)"
    text = markdown_tables([shown, line("b", "m", None)], ["tnr"])
    assert "| b: data not present |  |" in text
    assert "88.0 (t) and 91.25 (t)" in text


def test_a_table_ends_with_the_mean_and_the_worst() -> None:
    lines = [line("a", "x", 0.9), line("a", "y", 0.8), line("b", "x", 0.5), line("b", "y", 0.7)]
    lines += [line("c", "x", None), line("c", "y", None)]
    text = markdown_tables(lines, ["tnr"])
    assert "| **mean** | 70.00 | 75.00 |\n| **worst** | 50.00 | 70.00 |" in text
    assert "worst" not in markdown_tables(lines[:2], ["tnr"])
    assert "worst" not in markdown_tables([*lines, mean_line(lines, "x"), mean_line(lines, "y")], ["tnr"])


def test_the_command_is_shown_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "x",
        "paper",
        "trained",
        "--weights",
        "oe=/a/b/oe.pth",
        "--data",
        "/c/sets",
        "--network",
        "wrn40_2",
    ]
    monkeypatch.setattr("sys.argv", given)
    assert command() == "gramwatch paper trained --weights oe=oe.pth --data sets --network wrn40_2"


def test_tally_counts_as_the_paper_does() -> None:
    lines = [line("a", "x", 0.9), line("a", "y", 0.895), line("b", "x", 0.5), line("b", "y", 0.7)]
    lines += [line("c", "x", 0.5), line("c", "y", None), line("mean", "x", 1.0, summary=True)]
    assert tally(lines, "x") == [1, 0, 1]
    assert tally(lines, "y") == [1, 1, 0]


def test_means_leave_out_what_was_seen() -> None:
    lines = [line("a", "x", 0.9), line("b", "x", 0.5), line("a", "y", 0.8), line("b", "y", 1.0, note=SEEN)]
    for method, value in (("x", 90.0), ("y", 80.0)):
        found = mean_line(lines, method)
        assert found.our("tnr") == pytest.approx(value)
        assert SEEN in found.ood


def test_the_mean_below_a_table_leaves_out_what_was_seen() -> None:
    lines = [line("a", "x", 0.9), line("b", "x", 0.5), line("c", "x", 0.1, note=SEEN)]
    text = markdown_tables(lines, ["tnr"])
    assert f"| **mean, {SEEN} left out** | 70.00 |\n| **worst, {SEEN} left out** | 50.00 |" in text


def test_one_line_says_how_far_the_same_files_are_off() -> None:
    theirs = (entry(88.0),)
    lines = [line("a", "x", 0.9, published=theirs), line("b", "x", 0.5)]
    lines += [line("like a", "x", 0.8, published=theirs, like="a"), line("c", "x", None, published=theirs)]
    text = markdown_tables(lines, ["tnr"])
    said = "On the same files as published, ours less published, points of TNR at TPR 95 %: a: x +2.0."
    assert text.splitlines()[0] == said
    assert "same files" not in markdown_tables(lines[1:], ["tnr"])
    elsewhere = replace(lines[0], in_distribution="in (indicative)")
    assert "same files" not in markdown_tables([elsewhere], ["tnr"])


def test_no_published_mean_stands_beside_a_mean_of_our_sets() -> None:
    """`mean_line` has nothing to compare with, and "mean" is no set of any experiment."""
    lines = [line("a", "x", 0.9, published=(entry(88.0),)), line("b", "x", 0.5)]
    assert mean_line(lines, "x").published == ()
    for inside in ("cifar10", "cifar100", "svhn", "mnist"):
        assert not {"mean", "MEAN"} & {each.published for each in ood_sets(inside)}


def test_pictures_with_and_without_published_figures(tmp_path: Path) -> None:
    draw_beside(tmp_path / "a.png", [line("a", "x", 0.9, published=(entry(80.0),))], "title", "caption")
    draw_beside(tmp_path / "b.png", [line("a", "x", 0.9), line("b", "x", None)], "title")
    assert all(min(size_of_drawing(tmp_path / name)) > 200 for name in ("a.png", "b.png"))


def test_schematic(tmp_path: Path) -> None:
    from PIL import Image

    draw_schematic(tmp_path / "schematic.png")
    with Image.open(tmp_path / "schematic.png") as picture:
        assert picture.width > 1500
        shades = picture.convert("L").histogram()
    assert sum(count > 0 for count in shades) > 50  # and not one colour, or text alone
    assert max(shades) < 0.95 * sum(shades)


# --- the experiments ---------------------------------------------------------------------------------


def test_table2(options: experiment.Options) -> None:
    lines = experiment.run("table2", replace(options, methods="msp,gram"))
    found = {(each.ood, each.method): each for each in lines}
    assert found["SVHN", "Gram"].ours is None
    assert found["Bernoulli noise", "Gram"].our("auroc") > 90
    assert found["KMNIST", "MSP"].ours.examples == 60
    table = rows_of(options.output / "table2-mnist_convnet.csv")
    assert len(table) == len(lines)
    absent = [r for r in table if r["images"] == "data not present"]
    assert {r["tnr"] for r in absent} == {""}
    page = (options.output / "table2-mnist_convnet.md").read_text(encoding="utf-8")
    assert "SVHN: data not present" in page
    assert "No method saw an outlier" in page
    assert (options.output / "table2-mnist_convnet.png").exists()


@pytest.mark.parametrize("tune", ["fgsm", "outliers"])
def test_table2_tuned(options: experiment.Options, tune: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramwatch.paper.table2.ood_sets", lambda name: NOISE[:1])
    options = replace(options, methods="odin,mahalanobis,gram", tune=tune, subset=100)
    lines = experiment.run("table2", options)
    assert {each.ours.examples for each in lines} == {80}
    page = (options.output / f"table2-mnist_convnet-{tune}.md").read_text(encoding="utf-8")
    words = {"fgsm": "FGSM examples", "outliers": "images of each out-of-distribution set"}
    assert f"ODIN and Mahalanobis tuned on {words[tune]}" in page
    tuned = list((options.output / "cells").glob("*mahalanobis-fitted*"))
    assert len(tuned) == 2  # untuned and tuned


@pytest.mark.parametrize("name", ["ablation", "depth", "order", "triangle"])
def test_variants_of_gram(options: experiment.Options, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"depth": "curves", "order": "curves"}.get(name, name)
    monkeypatch.setattr(f"gramwatch.paper.{module}.ood_sets", lambda name: NOISE[1:])
    lines = experiment.run(name, replace(options, methods="msp,gram"))
    methods = {each.method for each in lines}
    assert len(methods) == {"ablation": 12, "depth": 4, "order": 22, "triangle": 3}[name]
    # Six validation images: a tap on which none of them deviates is left out.
    assert all(each.our("auroc") > 70 for each in lines)
    assert (options.output / f"{name}-mnist_convnet.png").exists()
    page = (options.output / f"{name}-mnist_convnet.md").read_text(encoding="utf-8")
    assert "MEAN, published" not in page
    assert {"ablation": "MEAN", "triangle": "largest, either way"}.get(name, "AUROC") in page


def test_ways_to_join(options: experiment.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramwatch.paper.guard_study.ood_sets", lambda name: NOISE[1:])
    chosen = replace(options, methods="gram,early_mahalanobis,class_ratio,energy")
    plain = {each.method for each in experiment.computed("guard_study", chosen)}
    lines = experiment.computed("guard_study", replace(chosen, forms=True))
    methods = {each.method for each in lines}
    assert {"Guard", "Gram", "class ratio", "energy", "Gram over the last half of taps"} <= plain
    forms = {each.title for each in guard_study.FORMS}
    assert methods - plain == forms  # this network has no blocks with ends
    assert all(each.our("auroc") > 70 for each in lines if each.method in forms)
    page = (options.output / "guard-mnist_convnet.md").read_text(encoding="utf-8")
    assert "| Gram of order 1 |" in page


def test_what_is_missing_for_absent_sets_only_is_not_fitted(options: experiment.Options) -> None:
    absent = next(each for each in ood_sets("mnist") if each.name == "svhn")
    told: list[str] = []
    study = replace(options, say=told.append).subject()
    knn, fdbd = MethodSpec("KNN", "knn"), MethodSpec("fDBD", "fdbd")
    assert list(study.measure([knn], [absent, NOISE[0]])) == ["MNIST", NOISE[0].title]
    (study.cells.folder / study._file(knn).name).unlink()
    told.clear()
    assert list(study.measure([knn, fdbd], [absent, NOISE[0]])["MNIST"]) == ["KNN", "fDBD"]
    assert any("fDBD fitted" in text for text in told)
    assert not any("KNN" in text for text in told)
    assert any("SVHN: data not present" in text for text in told)


def test_gram_is_fitted_on_moved_images_too(options: experiment.Options) -> None:
    study = options.subject()
    settings = {"taps": ["conv?"], "statistic": "row_sums"}
    methods = [MethodSpec("still", "gram", settings), MethodSpec("moved", "gram", settings, moved=True)]
    still, moved = study._fitted(methods).values()
    assert isinstance(still, GramDetector)
    assert isinstance(moved, GramDetector)
    assert moved.class_counts_.sum() == 2 * still.class_counts_.sum()
    images = next(iter(study.training_batches(moved=True)))[0]
    assert still.measure(images).deviations.amax() > 1e-3 > moved.measure(images).deviations.amax()
    assert methods[0].as_json().keys() < methods[1].as_json().keys()


def test_outlier_exposure(options: experiment.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    kmnist = OodSet("KMNIST", "kmnist", source="somewhere")
    monkeypatch.setattr("gramwatch.paper.outlier_exposure.ood_sets", lambda name: [kmnist, *NOISE])
    (file,) = options.weights.values()
    both = {"cross_entropy": file, "outlier_exposure": file}
    lines = experiment.run("outlier_exposure", replace(options, weights=both, auxiliary="somewhere"))
    marked = {(each.network, each.method, each.ood) for each in lines if each.note == SEEN}
    assert marked == {
        *(("MNIST ConvNet, outlier_exposure", m, "KMNIST") for m in ("MSP", "Gram")),
        *(("MNIST ConvNet, outlier_exposure", m, "KMNIST") for m in ("Gram less MSP", "Gram over MSP")),
        ("MNIST ConvNet", "OE", "KMNIST"),
    }
    means = {each.method: each.ours for each in lines if each.summary}
    assert {method: mean.examples for method, mean in means.items()} == {"MSP": 2, "OE": 2, "Gram": 2}
    assert means["MSP"].mean == means["OE"].mean  # the same file
    with pytest.raises(InputError, match="two networks"):
        experiment.run("outlier_exposure", options)


def test_trained(options: experiment.Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gramwatch.paper.trained.ood_sets", lambda name: NOISE)
    (file,) = options.weights.values()
    semantic = tmp_path / "semantic.safetensors"
    images = datasets.load("mnist", options.data, split="train")
    assert images.labels is not None
    training.train(
        networks.build("mnist_convnet"),
        images.images,
        images.labels,
        training.Semantic(),
        mean=[0.0],
        std=[1.0],
        epochs=1,
        checkpoint=semantic,
        name="mnist_convnet",
        progress=False,
    )
    each = {"cross_entropy": file, "prior_network": file, "variational_dirichlet": file, "semantic": semantic}
    lines = experiment.run("trained", replace(options, weights=each))
    random = "Semantic (random label codes)"
    assert {line.method for line in lines} == {"MSP", "Gram", "DPN", "VD", random}
    assert sum(line.summary for line in lines) == 5
    assert all(line.ours is not None for line in lines)
    page = (options.output / "trained-mnist_convnet.md").read_text(encoding="utf-8")
    assert "Trained with outliers: DPN." in page
    assert "random label codes, not the paper's" in page
    assert "reverse-KL" not in page  # what is no file of ours does not say how it was trained
    with pytest.raises(InputError, match="no objective 'nonsense'"):
        experiment.run("trained", replace(options, weights={"nonsense": file}))


def test_mlp(options: experiment.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "RECIPE", {**mlp.RECIPE, "epochs": 4})
    options = replace(options, network="mlp_300_150_50", weights={})
    lines = experiment.run("mlp", options)
    found = {(each.ood, each.method): each for each in lines}
    assert found["KMNIST", "Gram"].their("auroc") == 99.11
    assert found["KMNIST", "Gram"].our("auroc") > 50
    assert found["Fashion-MNIST", "Gram"].ours is None
    told: list[str] = []
    experiment.run("mlp", replace(options, say=told.append))
    assert not any("trained on" in text or "fitted" in text or "judged" in text for text in told)


def test_one_order_stands_for_all_where_nothing_is_negative(options: experiment.Options) -> None:
    loaded = mlp.trained(replace(options, network="mlp_300"), "mlp_300", epochs=1)
    study = options.study(loaded, "mnist")
    batches = [batch[0] for batch in study.training_batches()]
    images = next(iter(study.test_batches(NOISE[0])))
    one, ten = (
        GramDetector(loaded.network, taps="paper", statistic="triangle", orders=orders)
        .fit(batches, progress=False)
        .measure(images)
        .deviations
        for orders in ([1], range(1, 11))
    )
    assert torch.allclose(10 * one, ten, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dropout", "batch_norm"])
def test_study_puts_layers_between(kind: str) -> None:
    network = mlp_study.with_between(kind).eval()
    images = torch.rand(3, 1, 28, 28)
    assert network(images).shape == (3, 10)
    taps = [tap.name for tap in find_taps(network, images, "paper")]
    assert taps == ["layers.relu1", "layers.relu2", "layers.relu3"]


def test_study(options: experiment.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("the recipe", "SGD, learning rate 0.1", "row sums")
    monkeypatch.setattr(mlp_study, "VARIANTS", {name: mlp_study.VARIANTS[name] for name in chosen})
    monkeypatch.setattr(mlp_study, "DIGITS", [each for each in subject.DIGITS if each.name == "kmnist"])
    monkeypatch.setattr(mlp, "RECIPE", {**mlp.RECIPE, "epochs": 2})
    lines = experiment.run("mlp_study", replace(options, network=None, weights={}))
    assert len(lines) == 3 * 2
    trained = list((options.output / "cells").glob("*-trained-*"))
    assert len(trained) == 2  # row sums judge the first network


# --- the command -------------------------------------------------------------------------------------


def test_command_runs_and_lists(data: Path, weights: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    words = ["paper", "table2", "--network", "mnist_convnet", "--weights", str(weights), "--data", str(data)]
    result = CliRunner().invoke(app, [*words, "--subset", "40", "--methods", "msp", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "KMNIST (40)" in result.output
    assert "in all" in result.output
    shown = CliRunner().invoke(app, ["paper", "list", "--data", str(data)]).output
    assert all(name in shown for name in experiment.EXPERIMENTS)
    present = {words[0]: " ".join(words[1:]) for words in map(str.split, shown.splitlines()) if words}
    assert (present["kmnist"], present["svhn"]) == ("present", "not present")


# --- studies of our own ------------------------------------------------------------------------------


def test_the_study_of_guard_sets_it_against_the_best_single_method(
    data: Path, weights: Path, tmp_path: Path
) -> None:
    words = ["study", "guard", "--network", "mnist_convnet", "--weights", str(weights), "--data", str(data)]
    methods = "gram,early_mahalanobis,class_ratio,energy,odin"
    chosen = ["--methods", methods, "--sets", "kmnist,gaussian", "--subset", "60"]
    result = CliRunner().invoke(app, [*words, *chosen, "--device", "cpu", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "guard-mnist_convnet.md").read_text(encoding="utf-8")
    rows = rows_of(tmp_path / "guard-mnist_convnet.csv")
    aurocs = {(row["ood"], row["method"]): float(row["auroc"]) for row in rows}
    for ood in ("KMNIST", "Gaussian noise"):
        singles = ("Gram", "early Mahalanobis", "class ratio", "energy", "ODIN")
        best = max(singles, key=lambda name: aurocs[ood, name])
        start = f"| {ood} | {aurocs[ood, 'Guard']:.2f} | {best} {aurocs[ood, best]:.2f} |"
        assert sum(line.startswith(start) for line in page.splitlines()) == 1
    quick = next(line for line in page.splitlines() if line.startswith("- Against those of one pass"))
    assert "of 2 sets" in quick
    assert "ODIN" not in quick
    known = next(line for line in page.splitlines() if line.startswith("- Against all but early Mahalanobis"))
    assert "(early Mahalanobis)" not in known
    assert "(class ratio)" not in known
    assert "guard-mnist_convnet-why.png" in page
    assert min(size_of_drawing(tmp_path / "guard-mnist_convnet-why.png")) > 200


def test_the_study_of_false_alarms_counts_them(data: Path, weights: Path, tmp_path: Path) -> None:
    words = ["study", "false_alarms", "--network", "mnist_convnet", "--weights", str(weights)]
    result = CliRunner().invoke(
        app, [*words, "--data", str(data), "--device", "cpu", "--output", str(tmp_path)]
    )
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "false_alarms-mnist_convnet.csv")
    assert [(row["ranked"], row["alpha"]) for row in rows] == [
        (ranked, alpha) for ranked in ("together", "per class") for alpha in ("0.0100", "0.0500", "0.1000")
    ]
    for row in rows:
        assert (row["calibration"], row["fresh"]) == ("180", "181")
        # 90 images rank: too few for 1 %, and too few of each class.
        rank = int(float(row["alpha"]) * 91 + 1e-9)
        assert float(row["mean"]) == pytest.approx(100 * rank / 91, abs=0.5)
        assert row["highest_class"] == ""
    page = (tmp_path / "false_alarms-mnist_convnet.md").read_text(encoding="utf-8")
    assert f"| together | 180 | 5 % | {float(rows[1]['mean']):.2f} % |" in page


def test_a_study_without_sets_says_so(options: experiment.Options) -> None:
    with pytest.raises(InputError, match="none of the sets is there: svhn"):
        experiment.computed(
            "guard_study", replace(options, methods="gram,early_mahalanobis,class_ratio,energy", sets="svhn")
        )


def test_there_are_no_other_studies(weights: Path) -> None:
    words = ["study", "nonsense", "--network", "mnist_convnet", "--weights", str(weights)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "guard, false_alarms" in result.output


def test_on_real_digits(shared_data: Path, shared_weights: Path, tmp_path: Path) -> None:
    """The authors' MNIST ConvNet with Outlier Exposure tells KMNIST from MNIST; Gram has no such help."""
    given = experiment.Options(
        tmp_path,
        network="mnist_convnet",
        weights={"oe": shared_weights / "mnist_convnet_outlier_exposure_tuned.pth"},
        data=shared_data,
        subset=300,
        methods="msp,gram",
        say=lambda text: None,
    )
    found = {(each.ood, each.method): each.our("auroc") for each in experiment.run("table2", given)}
    assert found["KMNIST", "MSP"] > 95
    assert found["Fashion-MNIST", "Gram"] > 99
    assert found["KMNIST", "Gram"] > 88
