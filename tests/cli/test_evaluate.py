"""The command `gramwatch evaluate`."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import gramwatch
from gramwatch.cli.app import app
from gramwatch.inputs.files import files_of
from gramwatch.inputs.models import resolve
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.inputs.readers import Images, Tally
from gramwatch.methods import METHODS
from gramwatch.numerics.metrics import auroc
from tests.cli.invoking import invoke, told
from tests.cli.own import PREPARED, QUICK


def test_the_command_prints_tables_and_draws(tmp_path):
    arguments = [
        "evaluate",
        "--methods",
        "guard,gram,msp",
        "--networks",
        "mlp",
        "--output",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "mlp, AUROC in percent" in result.output
    assert "worst" in result.output
    assert "\nGuard " in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"mlp.csv", "mlp.md", "mlp.png"}
    assert CliRunner().invoke(app, ["evaluate", "--methods", "magic"]).exit_code == 2


@pytest.fixture
def noise(tmp_path) -> Path:
    """Twenty images of noise, and a file that is none."""
    folder = tmp_path / "noise"
    folder.mkdir()
    draw = np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i:02d}.png")
    (folder / "text.png").write_text("no image")
    return folder


@pytest.fixture
def words(own, noise) -> list[object]:
    return ["evaluate", own.guard, own.test, noise, "--model", own.model, *QUICK]


@dataclass(frozen=True)
class InPython:
    """The guard of the file, and batches of the images of folders."""

    guard: Any
    batches: Callable[[Path], Any]


@pytest.fixture
def in_python(own) -> InPython:
    guard = gramwatch.load(own.guard, resolve(own.model, own.weights).network)
    prepare = Preprocessing.from_json(guard.metadata["preprocessing"])
    return InPython(
        guard, lambda folder: Images(files_of(folder).paths, prepare, batch_size=64).inputs(Tally())
    )


@pytest.mark.parametrize("level", [None, 0.8])
def test_the_saved_guard_is_judged_first_as_score_judges(words, own, noise, tmp_path, level):
    choice = [] if level is None else ["--level", level]
    result = invoke(*words, *choice, "--json", "-q")
    assert result.exit_code == 0, result.output
    assert not result.stderr
    said = json.loads(result.stdout)
    assert said["protocol"] is None
    actual = said["verdicts"]
    assert actual["level"] == (level or 0.95)
    scores = []
    for row, folder in zip(actual["rows"], (own.test, noise), strict=True):
        table = tmp_path / f"{folder.name}.csv"
        scored = invoke("score", own.guard, folder, "-o", table, "--model", own.model, *QUICK, *choice)
        assert scored.exit_code == 0, scored.output
        with table.open(newline="") as file:
            rows = [line for line in csv.DictReader(file) if not line["error"]]
        flagged = sum(line["is_ood"] == "true" for line in rows)
        assert (row["name"], row["examples"], row["flagged"]) == (str(folder), len(rows), flagged)
        assert row["low"] <= flagged / len(rows) <= row["high"]
        scores.append([float(line["score"]) for line in rows])
    assert actual["rows"][0]["auroc"] == {}
    assert actual["rows"][1]["auroc"]["Guard"] == pytest.approx(auroc(*scores), abs=1e-9)
    members = ["Gram", "profile", "class ratio", "energy", "Mahalanobis++", "KNN", "image"]
    assert list(actual["rows"][1]["auroc"]) == ["Guard", *members, "MSP"]


def test_the_interval_of_a_share_is_that_of_clopper_and_pearson(in_python, own):
    """Its ends are where the observed count, or one more extreme, has a probability of 2.5 %."""
    from scipy.stats import binom

    rows = gramwatch.judge(
        in_python.guard, in_python.batches(own.test), {"other": in_python.batches(own.train)}, progress=False
    ).rows
    for row in rows:
        if row.flagged:
            assert binom.sf(row.flagged - 1, row.examples, row.low) == pytest.approx(0.025, abs=1e-6)
        assert binom.cdf(row.flagged, row.examples, row.high) == pytest.approx(0.025, abs=1e-6)


def test_quiet_prints_the_table_and_nothing_else(words):
    result = invoke(*words, "-q")
    assert result.exit_code == 0, result.output
    assert not result.stderr
    assert result.stdout == invoke(*words).stdout
    assert "95 % interval" in result.stdout


def test_the_protocol_of_the_paper_is_an_option_and_as_in_python(words, own, noise, in_python, tmp_path):
    result = invoke(*words, "--protocol", "-o", tmp_path / "tables")
    assert result.exit_code == 0, result.output
    assert "noise/text.png: not an image of a known format" in result.stderr
    assert result.stdout.index("95 % interval") < result.stdout.index(f"{noise} (20)")
    with (tmp_path / "tables" / "evaluation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows][:2] == ["Guard", "Gram"]
    assert (tmp_path / "tables" / "evaluation.md").is_file()
    with (tmp_path / "tables" / "verdicts.csv").open(newline="") as file:
        assert [row["examples"] for row in csv.DictReader(file)] == ["40", "20"]
    sets = {"noise": in_python.batches(noise)}
    expected = gramwatch.evaluate(in_python.guard, in_python.batches(own.test), sets, progress=False)
    for row, mean in zip(rows, (row.mean for row in expected.rows), strict=True):
        assert float(row["auroc"]) == pytest.approx(mean["auroc"], abs=1e-6)


def test_methods_beside_a_guard_are_fitted_on_the_training_images(words, own, noise, in_python):
    result = invoke(*words, "--methods", "gram,nci,msp", "--train", own.train, "--json", "-q")
    assert result.exit_code == 0, result.output
    report = {row["method"]: row["mean"]["auroc"] for row in json.loads(result.stdout)["protocol"]["rows"]}
    network = in_python.guard.model
    beside = {"NCI": METHODS["nci"](network), "MSP": METHODS["msp"](network)}
    gramwatch.fit_together(beside, in_python.batches(own.train), progress=False)
    expected = gramwatch.evaluate(
        {"Guard": in_python.guard, "Gram": in_python.guard.members["gram"]} | beside,
        in_python.batches(own.test),
        {"noise": in_python.batches(noise)},
        progress=False,
    )
    assert list(report) == list(expected.methods)
    for row in expected.rows:
        assert report[row.method] == pytest.approx(row.mean["auroc"], abs=1e-6)


def test_methods_that_need_training_images_ask_for_them(words, own):
    result = invoke(*words, "--methods", "energy,vim,guard")
    assert result.exit_code == 2
    assert "vim must be fitted on training images: give --train" in told(result)
    assert str(own.train) in told(result)
    result = invoke(*words, "--methods", "energy,gram,msp", "-q")  # the file has them, or nothing is learnt
    assert result.exit_code == 0, result.output
    assert "MSP" in result.stdout


def test_options_that_would_be_ignored_are_refused(words, own):
    assert "--networks: these are the demo's networks" in told(invoke(*words, "--networks", "mlp"))
    assert "--train: training images belong to a guard" in told(invoke("evaluate", "--train", own.train))


def test_a_guard_without_calibration_follows_the_protocol_and_says_so(words, own, tmp_path):
    guard = tmp_path / "guard.safetensors"
    fit = ["fit", own.model, own.train, "--weights", own.weights, "--hold-out", 0, "-o", guard, *PREPARED]
    assert invoke(*fit, *QUICK).exit_code == 0
    result = invoke(words[0], guard, *words[2:])
    assert result.exit_code == 0, result.output
    assert "not calibrated, so it has no threshold" in result.stderr
    assert "TNR@95" in result.stdout


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "give images like those of the fit, then one set of other images or several"),
        (["train"], "give images like those of the fit, then one set of other images or several"),
        (["train", "missing"], "missing"),
        (["train", "empty"], "empty"),
    ],
)
def test_sets_that_are_missing_are_named(own, words, reason, tmp_path):
    (tmp_path / "empty").mkdir()
    places = {"train": own.train, "empty": tmp_path / "empty"}
    result = invoke("evaluate", own.guard, *[places.get(word, word) for word in words], "--model", own.model)
    assert result.exit_code in (1, 2)
    assert reason in told(result)
