"""The command `gramwatch evaluate`."""

import csv
import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import gramwatch
from gramwatch.cli.app import app
from gramwatch.datasets.files import files_of
from gramwatch.models import resolve
from gramwatch.preprocessing import Preprocessing
from gramwatch.readers import Images, Tally
from tests.cli.invoking import invoke, told
from tests.cli.own import QUICK


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


def test_a_guard_is_evaluated_on_folders_as_in_python(own, tmp_path):
    noise = tmp_path / "noise"
    noise.mkdir()
    draw = np.random.default_rng(0)
    for i in range(20):
        Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(noise / f"{i:02d}.png")
    (noise / "text.png").write_text("no image")
    words = ["evaluate", own.guard, own.test, noise, "--model", own.model, *QUICK]
    result = invoke(*words, "-o", tmp_path / "tables")
    assert result.exit_code == 0, result.output
    assert "noise/text.png: not an image of a known format" in result.stderr
    assert f"{noise} (20)" in result.stdout
    summary = invoke(*words, "--json", "-q")
    assert not summary.stderr
    found = json.loads(summary.stdout)
    with (tmp_path / "tables" / "evaluation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [row["method"] for row in found["rows"]]
    assert [row["method"] for row in rows][:2] == ["Guard", "Gram"]
    assert (tmp_path / "tables" / "evaluation.md").is_file()
    network = resolve(own.model, own.weights)
    guard = gramwatch.load(own.guard, network.network)
    prepare = Preprocessing.from_json(guard.metadata["preprocessing"])

    def batches(folder):
        return Images(files_of(folder).paths, prepare, batch_size=64).inputs(Tally())

    expected = gramwatch.evaluate(guard, batches(own.test), {"noise": batches(noise)}, progress=False)
    for row, in_python in zip(rows, expected.rows, strict=True):
        assert float(row["auroc"]) == pytest.approx(in_python.mean["auroc"], abs=1e-6)


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
