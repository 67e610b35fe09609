"""The study of Guard on photographs: its sets, the accuracy that faults leave, and what is shown apart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from gramwatch import MissingDataError
from gramwatch.cli.app import app
from gramwatch.evaluation.evaluate import Row
from gramwatch.inputs import networks
from gramwatch_lab.datasets import faults, load
from gramwatch_lab.datasets.images import made_grey, resized, through
from gramwatch_lab.datasets.scenes import CLASSES
from gramwatch_lab.figures.why import read_figures
from gramwatch_lab.paper import experiment, scenes
from gramwatch_lab.paper.cells import Cells
from gramwatch_lab.paper.scenes import Facts, SceneSubject
from gramwatch_lab.paper.sets import SceneSet, scene_sets
from gramwatch_lab.paper.subject import MethodSpec
from lab.tests.paper.made_up import rows_of
from tests.drawings import size_of_drawing

pytest.importorskip("timm", exc_type=ImportError)
SIDE = 32
NETWORK = "timm:test_resnet"
LABEL = "timm-test_resnet-scenes-without-glacier"
SETS = {ood_set.name: ood_set for ood_set in scene_sets()}


def textures(count: int, seed: int) -> np.ndarray:
    """Soft patterns with a colour of their own: uint8, N x SIDE x SIDE x 3."""
    generator = torch.Generator().manual_seed(seed)
    colour = torch.rand(1, 3, 1, 1, generator=generator)
    coarse = colour + torch.rand(count, 3, 6, 6, generator=generator)
    fine = nn.functional.interpolate(coarse, SIDE, mode="bilinear") * 110 + 10
    return fine.round().byte().permute(0, 2, 3, 1).numpy()


def save(folder: Path, images: np.ndarray, end: str = "webp") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number + 1:08d}.{end}", lossless=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for label, name in enumerate(CLASSES):
        images = textures(37, label)
        save(root / "scenes" / "train" / name, images[12:])
        save(root / "scenes" / "test" / name, images[:12])
    save(root / "miniplaces" / "val", textures(10, 50), "jpg")
    save(root / "dtd-32", textures(6, 60)[:, :16, :16], "png")
    return root


@pytest.fixture(scope="module")
def weights(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "resnet.safetensors"
    words = ["train", NETWORK, "--set", "scenes", "--data", data, "--output", path, "--device", "cpu"]
    done = CliRunner().invoke(
        app,
        [*map(str, words), "--without=glacier", "--epochs=20", "--batch-size=25", "--learning-rate=0.005"],
    )
    assert done.exit_code == 0, done.output
    return path


@pytest.fixture
def subject(data: Path, weights: Path, tmp_path: Path) -> SceneSubject:
    return SceneSubject(
        networks.load(NETWORK, weights), "scenes", Cells(tmp_path), root=data, batch=16, say=lambda _: None
    )


# --- the sets ------------------------------------------------------------------------------------------


def test_the_network_is_judged_on_its_own_classes_and_the_left_out_one_is_near(
    subject: SceneSubject, data: Path
) -> None:
    assert subject.left_out == ("glacier",)
    assert subject.inside_title == "scenes without glacier"
    assert subject.label == LABEL
    known = tuple(name for name in CLASSES if name != "glacier")
    inside = load("scenes", data, classes=known)
    batches = subject.test_batches(subject._inside)
    assert torch.equal(batches.images, inside.images)
    assert len(subject.training_batches().images) == 5 * 25
    assert subject.present(SETS["glacier"])
    assert not subject.present(SETS["sea"])
    near = subject.test_batches(SETS["glacier"]).images
    unseen = load("scenes", data, split="train", classes=["glacier"]).images
    assert sorted(map(tuple, near.flatten(1).tolist())) == sorted(map(tuple, unseen.flatten(1).tolist()))


def test_images_of_far_sets_are_enlarged_by_bicubic(subject: SceneSubject, data: Path) -> None:
    small = load("dtd_10_classes", data, count=scenes.COUNT).images
    assert small.shape[-1] == 16
    assert torch.equal(subject.test_batches(SETS["dtd_10_classes"]).images, resized(small, SIDE))
    assert subject.test_batches(SETS["gaussian"]).images.shape == (scenes.COUNT, 3, SIDE, SIDE)
    assert subject.test_batches(SETS["miniplaces_without_scenes"]).images.shape[1:] == (3, SIDE, SIDE)
    assert not subject.present(SETS["dtd"])
    with pytest.raises(MissingDataError):
        subject.test_batches(SETS["mnist"])


def test_controls_and_faults_are_made_from_the_same_photographs(subject: SceneSubject) -> None:
    clean = subject.clean().images
    assert len(clean) == 60
    assert torch.equal(subject.test_batches(SETS["control_28"]).images[:, 0], _grey_through(clean)[:, 0])
    assert torch.equal(subject.test_batches(SETS["inverted"]).images, 255 - clean)
    noisy = subject.test_batches(SETS["sensor_noise_40"]).images
    assert torch.equal(noisy, faults.sensor_noise(clean, 40))


def _grey_through(images: torch.Tensor) -> torch.Tensor:
    return through(made_grey(images).expand(-1, 3, -1, -1).contiguous(), 28)


def test_faults_of_the_normalisation_reach_the_network(subject: SceneSubject) -> None:
    clean = subject.clean().images[:16]
    left_out = next(iter(subject.test_batches(SETS["normalisation_left_out"])))
    torch.testing.assert_close(left_out, clean / 255)
    twice = next(iter(subject.test_batches(SETS["normalisation_done_twice"])))
    assert isinstance(twice, torch.Tensor)
    mean, std = (torch.tensor(values)[:, None, None] for values in (subject.loaded.mean, subject.loaded.std))
    torch.testing.assert_close(twice, ((clean / 255 - mean) / std - mean) / std, atol=1e-4, rtol=1e-4)


def test_a_quick_look_takes_fewer_images(data: Path, weights: Path, tmp_path: Path) -> None:
    quick = SceneSubject(
        networks.load(NETWORK, weights), "scenes", Cells(tmp_path), root=data, subset=20, say=lambda _: None
    )
    assert len(quick.test_batches(SETS["inverted"]).images) == 20
    assert len(quick.test_batches(SETS["blobs"]).images) == 20


# --- accuracy, and what is shown apart -----------------------------------------------------------------


def test_facts_tell_the_accuracy_that_is_left(subject: SceneSubject) -> None:
    sets = [SETS[name] for name in ("glacier", "control_32", "inverted", "normalisation_left_out")]
    methods = [MethodSpec("energy", "energy")]
    measured = subject.measure(methods, sets)
    result = {facts.name: facts for facts in scenes.facts_of(subject, measured)}
    assert set(result) == {ood_set.name for ood_set in sets}
    assert (result["glacier"].accuracy, result["glacier"].lost, result["glacier"].apart) == (
        None,
        None,
        False,
    )
    test = subject.clean()
    assert test.labels is not None

    def right(images: torch.Tensor) -> float:
        with torch.inference_mode():
            named = subject.network(subject.loaded.prepare(images)).argmax(1)
        return 100 * float((named == test.labels).double().mean())

    assert result["inverted"].accuracy == pytest.approx(right(255 - test.images))
    assert result["inverted"].lost == pytest.approx(right(test.images) - right(255 - test.images))
    assert result["inverted"].images == 60
    assert result["control_32"].apart


@pytest.mark.parametrize(
    ("kind", "lost", "apart"),
    [("fault", 0.9, True), ("fault", -3.0, True), ("fault", 1.1, False), ("control", 30.0, True)],
)
def test_mild_faults_and_controls_are_apart(kind: str, lost: float, apart: bool) -> None:
    assert Facts("a", "a", kind, 800, 80.0, lost).apart is apart
    assert not Facts("a", "a", "far", 800, None, None).apart


def test_if_all_sets_would_be_apart_none_is() -> None:
    mild, strong = Facts("a", "a", "fault", 800, 80.0, 0.5), Facts("b", "b", "fault", 800, 60.0, 20.0)
    assert scenes.apart_of([mild, strong]) == {"a"}
    assert scenes.apart_of([mild]) == set()
    assert scenes.tables_of([mild], [], [], ["between"]) == ["between", scenes.accuracy_table([mild])]


def row(method: str, ood: str, auroc: float) -> Row:
    return Row(method, ood, 800, {"auroc": auroc}, {"auroc": 0.0})


def test_kinds_weigh_equally_and_what_is_apart_does_not_count() -> None:
    facts = [
        Facts("n", "n", "near", 1, None, None),
        Facts("f", "f", "far", 1, None, None),
        Facts("a", "a", "fault", 1, 70.0, 10.0),
        Facts("b", "b", "fault", 1, 60.0, 20.0),
        Facts("mild", "mild", "fault", 1, 80.0, 0.0),
    ]
    figures: Mapping[str, Any] = {
        "Guard": {"n": 0.6, "f": 0.9, "a": 0.8, "b": 1.0, "mild": 0.1},
        "MSP": {"n": 0.9, "f": 0.9, "a": 0.9, "b": 0.9, "mild": 0.9},
    }
    rows = [row(method, ood, value) for method, result in figures.items() for ood, value in result.items()]
    lines = scenes.table_by_kind(rows, facts, ["Guard", "MSP"]).splitlines()
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "mean AUROC, percent",
        "near (1)",
        "far (1)",
        "fault (2)",
        "mean of kinds",
    ]
    assert lines[2] == "| MSP | 90.00 | 90.00 | 90.00 | 90.00 |"
    assert lines[3] == "| Guard | 60.00 | 90.00 | 90.00 | 80.00 |"


# --- the command ---------------------------------------------------------------------------------------


def test_the_study_runs_over_photographs_and_marks_mild_faults(
    data: Path, weights: Path, tmp_path: Path
) -> None:
    words = ["study", "guard", "--network", NETWORK, "--weights", weights, "--data", data]
    chosen = ["--in-distribution", "scenes", "--methods", "gram,profile,class_ratio,energy"]
    sets = "glacier,sea,gaussian,control_64,inverted,sensor_noise_10,dead_rows_0.25"
    place = ["--sets", sets, "--output", tmp_path, "--device", "cpu"]
    done = CliRunner().invoke(app, [*map(str, [*words, *chosen, *place])])
    assert done.exit_code == 0, done.output
    facts = {line["name"]: line for line in rows_of(tmp_path / f"sets-{LABEL}.csv")}
    assert set(facts) == set(sets.split(",")) - {"sea"}
    assert facts["control_64"]["apart"] == "1"
    assert facts["gaussian"]["accuracy"] == ""
    for name in ("inverted", "sensor_noise_10", "dead_rows_0.25"):
        assert facts[name]["apart"] == str(int(float(facts[name]["lost"]) <= scenes.MILD))
    page = (tmp_path / f"guard-{LABEL}.md").read_text(encoding="utf-8")
    counted = [line["ood"] for line in facts.values() if line["apart"] == "0"]
    verdict, apart = page.split("### Shown apart")
    assert f"of {len(counted)} sets" in verdict
    assert "scenes through 64" in apart.splitlines()[2]
    assert not any(title in apart.splitlines()[2] for title in counted)
    assert "glacier, left out" in verdict
    judged = {line["ood"]: line["note"] for line in rows_of(tmp_path / f"guard-{LABEL}.csv") if line["auroc"]}
    assert judged == {line["ood"]: "shown apart" if line["apart"] == "1" else "" for line in facts.values()}
    assert set(read_figures(tmp_path / f"guard-{LABEL}.csv")[1]) == set(counted)
    for name in (f"guard-{LABEL}.png", f"guard-{LABEL}-why.png"):
        assert min(size_of_drawing(tmp_path / name)) > 200


def test_wrong_names_of_sets_are_refused(weights: Path) -> None:
    words = ["study", "guard", "--network", NETWORK, "--weights", str(weights)]
    done = CliRunner().invoke(app, [*words, "--in-distribution", "scenes", "--sets", "svhn"])
    assert done.exit_code == 2
    assert "no out-of-distribution set 'svhn'" in done.output


def test_a_network_of_others_has_no_taps_of_the_paper(subject: SceneSubject) -> None:
    (gram,) = experiment.methods_of(subject, "gram")
    assert gram.settings["taps"] == "all"
    assert isinstance(SETS["blur_4"], SceneSet)
