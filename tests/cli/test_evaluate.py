"""The command `gramwatch evaluate`."""

import subprocess
import sys

from typer.testing import CliRunner

from gramwatch.cli.app import app
from tests.cli.invoking import invoke


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


def test_the_command_shows_warnings_as_notes(tmp_path):
    arguments = [
        "evaluate",
        "--methods",
        "relative_mahalanobis",
        "--networks",
        "mlp",
        "--output",
        str(tmp_path),
    ]
    result = subprocess.run(
        [sys.executable, "-m", "gramwatch", *arguments], capture_output=True, text=True, check=True
    )
    assert "note: the covariance of 128 features" in result.stderr
    assert "GramwatchWarning" not in result.stderr


def test_evaluate_says_which_networks_it_is_for() -> None:
    shown = " ".join(invoke("evaluate", "--help").output.split())
    assert "the two small networks of 'gramwatch demo', and on no others" in shown
