"""The study of false alarms, run on a small made-up MNIST."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gramwatch.cli.app import app
from lab.tests.paper.made_up import rows_of

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


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
