"""The study of how little of a network Gram needs to look at, run on a small made-up MNIST."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gramwatch.cli.app import app
from gramwatch.errors import InputError
from gramwatch_lab.paper import effort_study, experiment
from lab.tests.paper.made_up import rows_of

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


def test_every_effort_is_judged_and_the_page_says_what_less_costs(
    data: Path, weights: Path, tmp_path: Path
) -> None:
    words = ["study", "effort", "--network", "mnist_convnet", "--weights", str(weights), "--data", str(data)]
    chosen = ["--sets", "kmnist,gaussian", "--subset", "60", "--device", "cpu", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, *chosen])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("effort-*.csv")
    rows = rows_of(path)
    assert len(rows) == 2 * len(effort_study.EFFORTS)
    assert {row["sets"] for row in rows} == {"2"}  # --sets chooses
    figures = {
        (row["method"], row["pixels"], row["channels"], row["taps"], row["orders"]): float(row["auroc"])
        for row in rows
    }
    assert len(figures) == len(rows)
    assert all(50 < figure <= 100 for figure in figures.values())
    # No tensor of this network has more than 128 channels, and it has fewer than 24 tensors.
    for method in ("Guard", "Gram"):
        whole = figures[method, "256", "", "all", "1 to 10"]
        assert figures[method, "256", "128", "24 spread", "1 to 10"] == whole
        assert figures[method, "256", "", "all", "2"] != whole
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    lines = [
        line for line in page.splitlines() if line.startswith("| all pixels, all taps, orders 1 to 10 |")
    ]
    full = [figures[method, "", "", "all", "1 to 10"] for method in ("Guard", "Gram")]
    assert lines == [
        f"| all pixels, all taps, orders 1 to 10 | {full[0]:.2f} | +0.00 | {full[1]:.2f} | +0.00 |"
    ]


def test_an_effort_study_without_sets_says_so(options: experiment.Options) -> None:
    with pytest.raises(InputError, match="none of the sets is there: svhn"):
        experiment.computed("effort_study", replace(options, sets="svhn"))
