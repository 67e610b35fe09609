"""The study of Guard, run on a small made-up MNIST."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gramwatch.cli.app import app
from gramwatch.errors import InputError
from gramwatch_lab.paper import experiment, guard_study
from lab.tests.paper.made_up import NOISE, rows_of
from tests.drawings import size_of_drawing

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


def test_ways_to_join(options: experiment.Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gramwatch_lab.paper.experiment.ood_sets", lambda name: NOISE[1:])
    chosen = replace(options, methods="gram,profile,early_mahalanobis,class_ratio,energy")
    plain = {line.method for line in experiment.computed("guard_study", chosen)}
    lines = experiment.computed("guard_study", replace(chosen, forms=True))
    methods = {line.method for line in lines}
    assert {
        "Guard",
        "Gram",
        "class ratio",
        "energy",
        "full effort",
        "third rule: Gram + early Mahalanobis + class ratio + energy",
    } <= plain
    forms = {line.title for line in guard_study.FORMS}
    assert methods - plain == forms  # this network has no blocks with ends
    assert all(line.our("auroc") > 70 for line in lines if line.method in forms)
    page = (options.output / "guard-mnist_convnet.md").read_text(encoding="utf-8")
    assert "| Gram of order 1 |" in page


def test_the_study_of_guard_sets_it_against_the_best_single_method(
    data: Path, weights: Path, tmp_path: Path
) -> None:
    words = ["study", "guard", "--network", "mnist_convnet", "--weights", str(weights), "--data", str(data)]
    methods = "gram,profile,class_ratio,energy,odin"
    chosen = ["--methods", methods, "--sets", "kmnist,gaussian", "--subset", "60"]
    result = CliRunner().invoke(app, [*words, *chosen, "--device", "cpu", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "guard-mnist_convnet.md").read_text(encoding="utf-8")
    rows = rows_of(tmp_path / "guard-mnist_convnet.csv")
    aurocs = {(row["ood"], row["method"]): float(row["auroc"]) for row in rows}
    for ood in ("KMNIST", "Gaussian noise"):
        singles = ("Gram", "profile", "class ratio", "energy", "ODIN")
        best = max(singles, key=lambda name: aurocs[ood, name])
        start = f"| {ood} | {aurocs[ood, 'Guard']:.2f} | {best} {aurocs[ood, best]:.2f} |"
        assert sum(line.startswith(start) for line in page.splitlines()) == 1
    quick = next(line for line in page.splitlines() if line.startswith("- Against those of one pass"))
    assert "of 2 sets" in quick
    assert "ODIN" not in quick
    known = next(line for line in page.splitlines() if line.startswith("- Against all but early Mahalanobis"))
    assert "(profile)" not in known
    assert "(class ratio)" not in known
    assert "guard-mnist_convnet-why.png" in page
    assert min(size_of_drawing(tmp_path / "guard-mnist_convnet-why.png")) > 200


def test_a_study_without_sets_says_so(options: experiment.Options) -> None:
    with pytest.raises(InputError, match="none of the sets is there: svhn"):
        experiment.computed(
            "guard_study", replace(options, methods="gram,profile,class_ratio,energy", sets="svhn")
        )


def test_there_are_no_other_studies(weights: Path) -> None:
    words = ["study", "nonsense", "--network", "mnist_convnet", "--weights", str(weights)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "guard, false_alarms" in result.output
