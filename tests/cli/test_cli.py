"""What commands refuse before they look for data, what an interruption leaves, and their help."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from gramwatch import Guard
from gramwatch.inputs import networks
from gramwatch_lab import training
from tests.cli.invoking import invoke, raising, told


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for data, reading weights and computing fail the test."""

    def runs(*_: object, **__: object) -> NoReturn:
        pytest.fail("the command went on")

    for name in (
        "gramwatch_lab.datasets.load",
        "gramwatch_lab.datasets.download.get",
        "gramwatch.inputs.networks.load",
        "gramwatch_lab.paper.experiment.computed",
        "gramwatch.cli.quickstart.run",
        "gramwatch.evaluation.compare.run",
    ):
        monkeypatch.setattr(name, runs)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with files to name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.pth").touch()
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "few.txt").write_text("cat 1 2\ndog 3 4\n")
    return tmp_path


TRAIN = "train mlp_300 --output a.safetensors "
SEMANTIC = TRAIN + "--objective semantic "
TABLE = "paper table2 --network densenet --weights w.pth "
STUDY = "study guard --network densenet --weights w.pth "
WRONG = [
    ("demo --output file", "--output", "is a file"),
    ("demo --output file/below", "--output", "cannot write into"),
    ("evaluate --methods magic", "--methods", "no method 'magic'"),
    ("evaluate --networks mlp,nonsense", "--networks", "choose from convnet, mlp"),
    ("evaluate --networks mlp --output file/below", "--output", "cannot write into"),
    ("paper nonsense", "NAME", "no experiment 'nonsense'"),
    ("paper table2", "--network", "which network"),
    ("paper table2 --network nonsense", "--network", "no network 'nonsense'"),
    ("paper table2 --network densenet", "--weights", "checkpoint of densenet"),
    ("paper table2 --network densenet --weights absent", "--weights", "no file absent"),
    ("paper table2 --network densenet --weights w.pth --weights w.pth", "--weights", "same label 'w'"),
    (TABLE + "--tune it", "--tune", "choose from none, outliers, fgsm"),
    (TABLE + "--methods magic", "--methods", "no method 'magic'"),
    (TABLE + "--in-distribution nonsense", "--in-distribution", "no set and no folder 'nonsense'"),
    (TABLE + "--in-distribution dtd_10_classes", "--in-distribution", "no split 'train'"),
    (TABLE + "--device nonsense", "--device", "'nonsense' cannot be used here"),
    (TABLE + "--device meta", "--device", "'meta' cannot be used here"),
    (TABLE + "--subset 0", "--subset", "20"),
    (TABLE + "--batch 0", "--batch", "1"),
    (TABLE + "--data absent", "--data", "absent"),
    (TABLE + "--output file/below", "--output", "cannot write into"),
    ("paper outlier_exposure --network densenet --weights w.pth", "--weights", "two networks"),
    ("paper trained --network densenet --weights it=w.pth", "--weights", "no objective 'it'"),
    ("paper mlp --weights w.pth", "--weights", "trains its networks itself"),
    ("paper mlp --network densenet", "--network", "choose from mlp_300, "),
    ("study nonsense --network densenet --weights w.pth", "NAME", "no study 'nonsense'"),
    ("study guard --network nonsense --weights w.pth", "--network", "no network 'nonsense'"),
    ("study guard --network densenet --weights absent", "--weights", "absent"),
    (STUDY + "--sets svhn,nonsense", "--sets", "no out-of-distribution set 'nonsense'"),
    (STUDY + "--in-distribution scenes --sets svhn", "--sets", "no out-of-distribution set 'svhn'"),
    (STUDY + "--in-distribution dtd_10_classes", "--in-distribution", "no split 'train'"),
    ("study guard --network torchvision:nonsense --weights w.pth", "--network", "torchvision:nonsense"),
    (STUDY + "--methods gram", "--methods", "gram, profile, class_ratio, energy"),
    (STUDY + "--methods gram,profile,class_ratio,energy,magic", "--methods", "no method 'magic'"),
    (STUDY + "--output file/below", "--output", "cannot write into"),
    ("train nonsense --output a.safetensors", "NETWORK", "no network 'nonsense'"),
    ("train mlp_300", "--output", "Missing"),
    ("train mlp_300 --output a.pth", "--output", ".safetensors"),
    ("train mlp_300 --output folder.safetensors", "--output", "is a folder"),
    ("train mlp_300 --output file/a.safetensors", "--output", "file is a file"),
    ("train mlp_300 --output file/b/a.safetensors", "--output", "cannot write into"),
    ("train timm:nonsense_net --output a.safetensors", "NETWORK", "no network 'timm:nonsense_net'"),
    (TRAIN + "--without sea", "--without", "no class of 'cifar10' 'sea'"),
    (TRAIN + "--set scenes --without lake", "--without", "choose from buildings, forest"),
    (TRAIN + "--save-every 0", "--save-every", "1"),
    (TRAIN + "--epochs 0", "--epochs", "1"),
    (TRAIN + "--batch-size -1", "--batch-size", "1"),
    (TRAIN + "--subset 0", "--subset", "1"),
    (TRAIN + "--seed -1", "--seed", "0"),
    (TRAIN + "--learning-rate nan", "--learning-rate", "nan is not a positive number"),
    (TRAIN + "--learning-rate 0", "--learning-rate", "0.0 is not a positive number"),
    (TRAIN + "--learning-rate inf", "--learning-rate", "inf is not a positive number"),
    (TRAIN + "--device nonsense", "--device", "'nonsense' cannot be used here"),
    (TRAIN + "--precision half", "--precision", "choose from auto, float32, bfloat16"),
    (TRAIN + "--objective nonsense", "--objective", "no objective 'nonsense'"),
    (TRAIN + "--objective semantic --option count", "--option", "'count' is not NAME=VALUE"),
    (TRAIN + "--objective semantic --option it=1", "--option", "has the settings vectors, words, count"),
    (TRAIN + "--objective semantic --option count=many", "--option", "count must be like 5, got 'many'"),
    (TRAIN + "--objective semantic --option vectors=absent.npy", "--option", "no file absent.npy"),
    (SEMANTIC + "--option vectors=few.txt", "--option", "few.txt has no vector for airplane, automobile"),
    (SEMANTIC + '--option vectors=few.txt --option words=["cat","dog"]', "--option", "has 10 classes"),
    (TRAIN + "--set nonsense", "--set", "no set and no folder 'nonsense'"),
    (TRAIN + "--set gaussian", "--set", "no labels to learn"),
    (TRAIN + "--auxiliary svhn", "--auxiliary", "has no use for outliers"),
    (TRAIN + "--objective outlier_exposure", "--auxiliary", "say which"),
    (TRAIN + "--objective outlier_exposure --auxiliary nonsense", "--auxiliary", "'nonsense'"),
    (TRAIN + "--objective outlier_exposure --auxiliary svhn:val", "--auxiliary", "no split 'val'"),
    (TRAIN + "--objective outlier_exposure --auxiliary svhn:test:it", "--auxiliary", "way to reduce 'it'"),
    (TRAIN + "--weights absent", "--weights", "absent"),
    (TRAIN + "--data absent", "--data", "absent"),
    ("data get nonsense", "NAMES", "no set 'nonsense'"),
    ("data get cifar10 cifar100_subset", "NAMES", "cannot be downloaded"),
    ("data get cifar10 --data file/below", "--data", "cannot write into"),
    ("data check nonsense", "NAMES", "no set 'nonsense'"),
]


@pytest.mark.usefixtures("nothing_runs", "place")
@pytest.mark.parametrize(("words", "option", "reason"), WRONG, ids=[words for words, *_ in WRONG])
def test_wrong_usage_is_one_line_that_names_the_option(words: str, option: str, reason: str) -> None:
    result = invoke(*words.split())
    assert result.exit_code == 2, result.output
    line = told(result)
    assert option in line
    assert reason in line


@pytest.mark.usefixtures("nothing_runs", "place")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [TRAIN, TABLE, STUDY])
def test_a_gpu_that_is_not_there_is_one_line(words: str) -> None:
    result = invoke(*words.split(), "--device", "cuda")
    assert result.exit_code == 2
    assert "--device: 'cuda' cannot be used here" in told(result)


@pytest.mark.usefixtures("nothing_runs", "place")
@pytest.mark.parametrize("words", ["demo", "evaluate", "data get cifar10", "train mlp_300"])
def test_a_read_only_folder_is_noticed_at_the_start(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("gramwatch.cli.checks.NamedTemporaryFile", refuse)
    option = "--data" if words.startswith("data") else "--output"
    name = "a.safetensors" if words.startswith("train") else ""
    result = invoke(*words.split(), option, tmp_path / "out" / name)
    assert result.exit_code == 2
    assert f"{option}: cannot write into {tmp_path / 'out'} (Permission denied)" in told(result)


# --- failures and interruptions ----------------------------------------------------------------------


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "where", "kept"),
    [
        ("demo --output out", "gramwatch.cli.quickstart.run", "are in out"),
        ("evaluate --output out", "gramwatch.evaluation.compare.run", "are in out"),
        (TABLE + "--output out", "gramwatch_lab.paper.experiment.computed", "nothing was kept"),
        (TABLE + "--output done", "gramwatch_lab.paper.experiment.computed", "the same command goes on"),
        (STUDY + "--output done", "gramwatch_lab.paper.experiment.computed", "the same command goes on"),
        ("data get cifar10 --data out", "gramwatch_lab.datasets.download.get", "the same command goes on"),
        ("data check --data out", "gramwatch_lab.datasets.download.is_present", "interrupted"),
    ],
)
def test_an_interruption_says_what_was_kept(
    words: str, where: str, kept: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "done" / "cells").mkdir(parents=True)
    (place / "done" / "cells" / "one.safetensors").touch()
    monkeypatch.setattr(where, raising(KeyboardInterrupt()))
    result = invoke(*words.split())
    assert result.exit_code == 130
    line = told(result)
    assert "interrupted" in line
    assert kept in line


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of MNIST: 20 images of noise."""
    from gramwatch_lab.datasets import ImageSet

    images = torch.randint(0, 255, (20, 1, 28, 28), dtype=torch.uint8)
    result = ImageSet("MNIST", images, torch.arange(20) % 10)
    monkeypatch.setattr("gramwatch_lab.datasets.load", lambda *_, **__: result)


@pytest.mark.usefixtures("digits")
def test_an_interrupted_training_says_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    words = ["train", "mlp_300", "--set", "mnist", "--output", path, "--epochs", 2, "--device", "cpu"]
    epoch = training.loop._Run.epoch

    def interrupted_in(number: int) -> Callable[..., Any]:
        def run(self: Any, which: int, progress: bool) -> Any:
            if which == number:
                raise KeyboardInterrupt
            return epoch(self, which, progress)

        return run

    monkeypatch.setattr(training.loop._Run, "epoch", interrupted_in(1))
    first = invoke(*words)
    assert (first.exit_code, path.exists()) == (130, False)
    assert "nothing was kept" in first.output
    monkeypatch.setattr(training.loop._Run, "epoch", interrupted_in(2))
    second = invoke(*words)
    assert (second.exit_code, path.exists()) == (130, True)
    assert f"{path} has the finished epochs: the same command with --resume" in second.output
    monkeypatch.setattr(training.loop._Run, "epoch", epoch)
    assert invoke(*words, "--resume").exit_code == 0


@pytest.mark.usefixtures("digits")
def test_images_of_another_size_are_refused_before_training(tmp_path: Path) -> None:
    result = invoke("train", "resnet34", "--set", "mnist", "--output", tmp_path / "a.safetensors")
    assert result.exit_code == 2
    assert "--set: resnet34 takes images of 3 x 32 x 32, those of 'mnist' are 1 x 28 x 28" in told(result)


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")
def test_a_guard_in_the_place_of_a_checkpoint_is_one_line(tmp_path: Path) -> None:
    network = networks.build("mlp_300")
    guard = Guard(network)
    guard.fit([torch.rand(40, 1, 28, 28)])
    file = tmp_path / "guard.safetensors"
    guard.save(file)
    for words in (["paper", "table2"], ["study", "guard"]):
        result = invoke(*words, "--network", "mlp_300", "--weights", file, "--output", tmp_path / "out")
        assert result.exit_code == 1
        assert str(file) in told(result)
    result = invoke("train", "mlp_300", "--weights", file, "--output", tmp_path / "a.safetensors")
    assert result.exit_code == 1
    assert str(file) in told(result)
    result = invoke("train", "mlp_300", "--output", file, "--resume")
    assert result.exit_code == 2
    assert f"--output: {file} holds a detector" in told(result)


def test_without_matplotlib_a_command_says_so_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import gramwatch.cli.quickstart as demo\n"
        "demo.judge = None\n"
        "sys.argv[1:] = ['demo', '--output', sys.argv[1]]\n"
        "from gramwatch.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("gramwatch: pictures need matplotlib")


# --- help --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["demo", "evaluate", "paper", "study", "train", "data list", "data get", "data check"]
)
def test_every_command_has_an_example_that_parses(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = invoke(*words.split(), "--help").output
    lines = [line.strip().removeprefix("Example: ") for line in shown.splitlines()]
    examples = [line.removeprefix("gramwatch ").split() for line in lines if line.startswith("gramwatch ")]
    assert examples
    for given in examples:
        assert given[: len(words.split())] == words.split()
        for option in (word for word in given if word.startswith("--")):
            assert option in shown
