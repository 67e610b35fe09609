"""The command `gramwatch train`."""

import pytest
import torch

from gramwatch.inputs import networks
from gramwatch.methods import TRAINED
from gramwatch_lab import datasets, training
from gramwatch_lab.datasets import CATALOGUE, ImageSet
from gramwatch_lab.datasets.scenes import CLASSES
from gramwatch_lab.methods.semantic import SemanticHead
from lab.tests.training.small import whole
from tests.inputs.files import write_scenes


@pytest.fixture
def digits(monkeypatch):
    """In the place of real sets: images whose class is which third of them is bright."""

    def load(
        name, root=None, *, split="test", size=None, reduce=None, grey=None, count=None, seed=0, classes=None
    ):
        asked.append((name, split, size, reduce, grey))
        images = whole((60, 1, 28, 28), len(split)) // 4
        labels = torch.arange(60) % 3
        for label in range(3):
            images[labels == label, :, 9 * label : 9 * label + 9] += 150
        return ImageSet(name, images, None if name == "nameless" else labels)

    asked = []
    monkeypatch.setattr("gramwatch_lab.datasets.load", load)
    monkeypatch.setattr("gramwatch_lab.datasets.source_of", lambda name, split: CATALOGUE["mnist"])
    return asked


def command(*arguments):
    from typer.testing import CliRunner

    from gramwatch.cli.app import app

    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def test_the_command_trains_resumes_and_writes_what_networks_load_reads(digits, tmp_path):
    path = tmp_path / "new" / "mlp.safetensors"
    common = [
        "mlp_300",
        "--set",
        "digits",
        "--output",
        path,
        "--epochs",
        10,
        "--batch-size",
        10,
        "--device",
        "cpu",
    ]
    done = command(*common, "--objective", "semantic", "--option", "size=7", "--option", "count=2")
    assert done.exit_code == 0, done.output
    assert "test accuracy 100.00 % after 10 epochs" in done.output
    loaded = networks.load("mlp_300", path)
    (head,) = (part for part in loaded.network.modules() if isinstance(part, SemanticHead))
    assert [m.shape for m in head.labels] == [(3, 7)] * 2
    images = datasets.load("digits").images
    assert torch.equal(loaded.network(loaded.prepare(images)).argmax(1), torch.arange(60) % 3)
    assert TRAINED["semantic"](loaded.network).score_inputs(loaded.prepare(images))[1].isfinite().all()
    refused = command(*common, "--objective", "semantic")
    assert refused.exit_code == 2
    again = command(
        *common, "--objective", "semantic", "--option", "size=7", "--option", "count=2", "--resume"
    )
    assert again.exit_code == 0, again.output


def test_words_of_labels_are_the_names_of_the_classes(tmp_path):
    pytest.importorskip("timm", exc_type=ImportError)
    for split in ("train", "test"):
        write_scenes(tmp_path, count=2, side=32, split=split)
    path, vectors = tmp_path / "vit.safetensors", tmp_path / "words.txt"
    lines = [f"{name} {number} 1 {number * number}" for number, name in enumerate(CLASSES)]
    vectors.write_text("\n".join(["# made up", "lake 1 1 1", *reversed(lines)]), encoding="utf-8")
    words = ["timm:test_vit", "--set", "scenes", "--data", tmp_path, "--output", path, "--device", "cpu"]
    quick = ["--epochs", 1, "--batch-size", 10, "--without", "sea"]
    done = command(*words, *quick, "--objective", "semantic", "--option", f"vectors={vectors}")
    assert done.exit_code == 0, done.output
    (head,) = (
        p for p in networks.load("timm:test_vit", path).network.modules() if isinstance(p, SemanticHead)
    )
    numbers = [number for number, name in enumerate(CLASSES) if name != "sea"]
    assert [labels.tolist() for labels in head.labels] == [[[n, 1, n * n] for n in numbers]]


def test_the_command_fine_tunes_with_outliers(digits, tmp_path):
    plain, tuned = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    common = ["mlp_300", "--set", "digits", "--batch-size", 10, "--device", "cpu"]
    assert command(*common, "--epochs", 2, "--output", plain).exit_code == 0
    arguments = ["--objective", "outlier_exposure", "--auxiliary", "strange:val:nearest,other:val"]
    done = command(*common, *arguments, "--weights", plain, "--output", tuned)
    assert done.exit_code == 0, done.output
    assert "10 epochs of batches of 10, learning rate 0.001" in done.output
    assert digits[-2:] == [("strange", "val", 28, "nearest", True), ("other", "val", 28, None, True)]
    assert training.read(tuned)[0]["plan"]["outliers"] == 120


def test_the_command_says_what_is_missing(digits, tmp_path):
    path = tmp_path / "a.safetensors"
    cases = [
        (["mlp_300", "--output", tmp_path / "a.pth"], "safetensors"),
        (["mlp_300", "--output", path, "--objective", "prior_network"], "--auxiliary"),
        (["mlp_300", "--output", path, "--auxiliary", "x:val"], "no use for"),
        (["mlp_300", "--output", path, "--option", "weight"], "NAME=VALUE"),
        (["mlp_300", "--output", path, "--set", "nameless"], "no labels"),
    ]
    for arguments, told in cases:
        done = command(*arguments)
        assert done.exit_code == 2
        assert told in done.output, done.output
    assert not path.exists()


def test_the_command_trains_a_network_of_timm_without_a_class(tmp_path):
    pytest.importorskip("timm", exc_type=ImportError)
    for split in ("train", "test"):
        write_scenes(tmp_path, count=4, side=32, split=split)
    path = tmp_path / "vit.safetensors"
    words = ["timm:test_vit", "--set", "scenes", "--data", tmp_path, "--output", path, "--device", "cpu"]
    quick = ["--epochs", 2, "--batch-size", 10, "--save-every", 2, "--option", "mixup=0.2"]
    done = command(*words, *quick, "--without", "glacier", "--without", "sea")
    assert done.exit_code == 0, done.output
    assert "2 epochs of batches of 10, learning rate 0.001, adamw" in done.output
    loaded = networks.load("timm:test_vit", path)
    assert loaded.class_names == ("buildings", "forest", "mountain", "street")
    assert loaded.size == 32
    assert loaded.record.shape == (3, 32, 32)
    assert (loaded.mean, loaded.std) == ((0.5,) * 3, (0.5,) * 3)
    header, tensors = training.read(path)
    assert header["accuracy"] is not None
    assert header["plan"]["augment"] == "crops"
    assert header["plan"]["images"] == 16
    state = loaded.network.state_dict()
    assert all(torch.equal(state[key], value) for key, value in tensors.items())
    with torch.inference_mode():
        assert loaded.network(torch.zeros(1, 3, 32, 32)).shape == (1, 4)
    refused = command(*words, "--without", "tundra", "--resume")
    assert refused.exit_code == 2
    assert "no class of 'scenes' 'tundra': choose from buildings" in refused.output
    few = command(*words, "--resume", *(f"--without={name}" for name in header["class_names"] + ["sea"]))
    assert few.exit_code == 2
    assert "two classes" in few.output
