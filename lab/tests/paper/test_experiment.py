"""The paper's experiments on a small made-up MNIST: variants of Gram, and the command."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gramwatch.cli.app import app
from gramwatch_lab.paper import experiment
from gramwatch_lab.paper.experiment import command
from lab.tests.paper.made_up import NOISE
from lab.tests.paper.test_beside import entry, line

pytestmark = pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")


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


def test_sets_are_chosen_by_name() -> None:
    chosen = experiment.Options(Path("out"), sets="tiny_imagenet, mnist").chosen_sets("cifar10")
    assert {ood_set.name for ood_set in chosen} == {"tiny_imagenet", "mnist"}
    assert len(experiment.Options(Path("out")).chosen_sets("cifar10")) > len(chosen)


@pytest.mark.parametrize("name", ["ablation", "depth", "order", "triangle"])
def test_variants_of_gram(options: experiment.Options, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"depth": "curves", "order": "curves"}.get(name, name)
    monkeypatch.setattr(f"gramwatch_lab.paper.{module}.ood_sets", lambda name: NOISE[1:])
    lines = experiment.run(name, replace(options, methods="msp,gram"))
    methods = {line.method for line in lines}
    assert len(methods) == {"ablation": 12, "depth": 4, "order": 22, "triangle": 3}[name]
    # Six validation images: a tap on which none of them deviates is left out.
    assert all(line.our("auroc") > 70 for line in lines)
    assert (options.output / f"{name}-mnist_convnet.png").exists()
    page = (options.output / f"{name}-mnist_convnet.md").read_text(encoding="utf-8")
    assert "MEAN, published" not in page
    assert {"ablation": "MEAN", "triangle": "largest, either way"}.get(name, "AUROC") in page


@pytest.mark.parametrize("subset", [None, 60])
def test_a_part_of_the_files_is_not_called_the_same_files(
    options: experiment.Options, subset: int | None
) -> None:
    told: list[str] = []
    beside = line("a", "x", 0.9, published=(entry(88.0),))
    options.output.mkdir()
    experiment.write(replace(options, subset=subset, say=told.append), "name", "title", [beside], "How.")
    page = (options.output / "name.md").read_text(encoding="utf-8")
    assert "90.00 (88.0, +2.00)" in page
    for text in (page, *told):
        assert ("the same files" in text) == (subset is None)


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
