"""Networks of timm and torchvision by name: built, trained on photographs, saved and loaded."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gramwatch import (
    ArtifactError,
    InputError,
    MissingExtraError,
    TrainingError,
    artifact,
    networks,
    training,
)
from gramwatch.cli.app import app
from gramwatch.networks import foreign
from gramwatch.training import checkpoint, crops
from gramwatch.training.crops import Crops
from test_scenes import write_scenes

pytest.importorskip("timm", exc_type=ImportError)
CPU = torch.device("cpu")
SMALL = "timm:test_vit"
"""The smallest of timm that wants to know the size of images."""
STUDIED = [
    ("torchvision:resnet18", 11_179_590),
    ("timm:efficientnet_b0", 4_015_234),
    ("timm:convnext_atto", 3_376_446),
    ("timm:vit_tiny_patch16_224", 5_500_230),
]


# --- names and records ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "parameters"), STUDIED)
def test_the_networks_of_the_study_are_built_for_128_pixels(name: str, parameters: int) -> None:
    record = networks.record_of(name, 128)
    assert record.shape == (3, 128, 128)
    assert name.partition(":")[2] in record.title
    with torch.device("meta"):
        network = networks.build(name, 6, 128)
        assert sum(each.numel() for each in network.parameters()) == parameters
        assert network(torch.empty(1, 3, 128, 128)).shape == (1, 6)


def test_records_say_the_size_and_the_normalisation_that_are_usual() -> None:
    vit, atto = (networks.record_of(f"timm:{name}") for name in ("vit_tiny_patch16_224", "convnext_atto"))
    assert (vit.shape, vit.mean, vit.std) == ((3, 224, 224), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert (atto.mean, atto.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    inception = networks.record_of("torchvision:inception_v3")
    assert inception.shape == (3, 299, 299)
    with torch.device("meta"):
        torchvisions = networks.build("torchvision:vit_b_16", 3, 64)
        assert torchvisions(torch.empty(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("timm:convnext_ato", "did you mean timm:convnext_atto"),
        ("timm:vit_tiny_patch16_224.augreg_in21k", "no network"),  # weights are not asked for here
        ("torchvision:resnet81", "torchvision:resnet18"),
        ("torchvision:fasterrcnn_resnet50_fpn", "no network"),  # it does not classify
        ("timm:", "list_models"),
        ("keras:vgg", "timm:NAME"),
    ],
)
def test_unknown_names_are_refused_with_a_hint(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        networks.build(name)


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_without_the_package_the_extra_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package} need.*gramwatch\[networks\]"):
        networks.build(f"{package}:resnet18")


def test_a_wheel_without_operators_is_imported() -> None:
    """In a process of its own: this one has declared them already."""
    code = "from gramwatch import networks; print(networks.build('timm:test_vit', 3, 32).num_classes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "3", done.stderr
    assert foreign.is_foreign("timm:x")
    assert not foreign.is_foreign("timm")


# --- crops ---------------------------------------------------------------------------------------------


def test_boxes_lie_inside_and_have_the_areas_and_ratios_they_may_have() -> None:
    width, height, left, top = crops.boxes(20_000, CPU).unbind(1)
    mirrored = width < 0
    assert 0.48 < mirrored.float().mean() < 0.52
    width = width.abs()
    for length, middle in ((width, left), (height, top)):
        assert float((middle.abs() + length).max()) <= 1 + 1e-6
        assert float((middle + length).max()) > 0.99
        assert float((middle - length).min()) < -0.99
    area = width * height
    assert crops.SMALLEST * 0.99 < float(area.min()) < crops.SMALLEST * 1.05
    assert float(area.max()) > 0.95
    ratio = (width / height).log().abs()
    assert math.log(4 / 3) - 0.01 < float(ratio.max()) <= math.log(4 / 3) + 1e-5


def test_the_whole_box_is_the_image_and_a_negative_width_mirrors_it() -> None:
    pixels = torch.randint(0, 256, (2, 8, 6, 3), dtype=torch.uint8)
    whole = torch.tensor([[1.0, 1.0, 0.0, 0.0], [-1.0, 1.0, 0.0, 0.0]])
    found = crops.cropped(pixels, whole)
    torch.testing.assert_close(found[0], pixels[0].float(), atol=1e-3, rtol=0)
    torch.testing.assert_close(found[1], pixels[1].flip(1).float(), atol=1e-3, rtol=0)


def test_a_quarter_is_enlarged_to_the_whole() -> None:
    pixels = torch.zeros(1, 8, 8, 1, dtype=torch.uint8)
    pixels[:, :4, 4:] = 200  # above, on the right
    corner = torch.tensor([[0.5, 0.5, 0.5, -0.5]])
    found = crops.cropped(pixels, corner)
    assert found.shape == pixels.shape
    assert torch.all(found[:, :7, 1:] == 200)
    assert torch.all(crops.cropped(pixels, -corner.abs() * torch.tensor([-1, -1, 1, -1]))[:, 1:, :7] == 0)


def test_crops_come_once_each_normalised_and_the_whole_images_in_order() -> None:
    images = torch.arange(1, 11, dtype=torch.uint8).reshape(10, 1, 1, 1).expand(10, 3, 4, 4).contiguous()
    made = Crops(images, (0.0,) * 3, (1 / 255,) * 3, CPU)
    found = list(made.shuffled(2, 5))
    assert sorted(torch.cat([part for _, part in found]).tolist()) == list(range(10))
    for batch, part in found:
        torch.testing.assert_close(batch, (part + 1.0)[:, None, None, None].expand_as(batch))
    torch.testing.assert_close(torch.cat(list(made.in_order(3))), images.float())


# --- objective and optimiser ---------------------------------------------------------------------------


def test_mixup_weighs_the_losses_of_both_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = torch.randn(8, 3), torch.arange(8) % 3
    order = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0])
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: order)
    monkeypatch.setattr("gramwatch.training.cross_entropy.Beta.sample", lambda self: torch.tensor(0.75))
    loss, logits = training.CrossEntropy(mixup=0.4).loss(lambda x: x, images, labels, None)
    mixed = 0.75 * images + 0.25 * images[order]
    torch.testing.assert_close(logits, mixed)
    log = mixed.log_softmax(1)
    one_hot = 0.75 * nn.functional.one_hot(labels, 3) + 0.25 * nn.functional.one_hot(labels[order], 3)
    torch.testing.assert_close(loss, -(one_hot * log).sum(1).mean())


def test_smoothing_spreads_the_label() -> None:
    images, labels = torch.randn(8, 4), torch.arange(8) % 4
    loss, _ = training.CrossEntropy(smoothing=0.2).loss(lambda x: x, images, labels, None)
    target = 0.8 * nn.functional.one_hot(labels, 4) + 0.2 / 4
    torch.testing.assert_close(loss, -(target * images.log_softmax(1)).sum(1).mean())
    with pytest.raises(TrainingError, match="below 1"):
        training.CrossEntropy(smoothing=1.0)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, 2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )


def noise() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (24, 3, 8, 8), dtype=torch.uint8, generator=generator)


def learnt(net: nn.Module, path: Path | None = None, **options: Any) -> training.History:
    images = torch.randint(
        0, 256, (24, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    settings: dict[str, Any] = {
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
        "epochs": 4,
        "batch_size": 8,
        "optimiser": "adamw",
        "augment": "crops",
        "learning_rate": 0.01,
        "progress": False,
        **options,
    }
    objective = settings.pop("objective", training.CrossEntropy(mixup=0.2))
    return training.train(net, images, torch.arange(24) % 3, objective, checkpoint=path, **settings)


def test_a_step_of_adamw_is_pytorchs_with_clipped_gradients_and_decays_matrices_only() -> None:
    net, other = small(), small()
    plain = training.CrossEntropy()
    learnt(net, epochs=1, batch_size=24, warmup=0.0, weight_decay=0.5, augment=False, objective=plain)
    images = torch.randint(
        0, 256, (24, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    other.train()
    nn.functional.cross_entropy(other((images / 255 - 0.5) / 0.25), torch.arange(24) % 3).backward()
    nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    matrices, rest = ([p for p in other.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, 0.01).step()
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_an_interrupted_training_by_adamw_ends_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parted = small(), small()
    learnt(whole)
    epoch = training.loop._Run.epoch

    def stops(self: Any, number: int, progress: bool) -> Any:
        if number == 4:
            raise KeyboardInterrupt
        return epoch(self, number, progress)

    monkeypatch.setattr(training.loop._Run, "epoch", stops)
    path = tmp_path / "a.safetensors"
    with pytest.raises(KeyboardInterrupt):
        learnt(parted, path, save_every=2)
    header, tensors = checkpoint.read(path)
    assert header["epoch"] == 2  # the third is lost: the file was written after the second
    assert {key.partition("/")[0] for key in tensors if "/" in key} == {"average", "square", "step"}
    monkeypatch.setattr(training.loop._Run, "epoch", epoch)
    resumed = small()
    learnt(resumed, path)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    assert not any("/" in key for key in checkpoint.read(path)[1])


def test_a_file_begun_before_there_was_a_choice_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    plain = training.CrossEntropy()
    learnt(small(), path, optimiser="sgd", objective=plain)
    header, tensors = checkpoint.read(path)
    del header["plan"]["optimiser"], header["tensors"]
    header["plan"]["settings"] = header["settings"] = {}
    artifact.write(path, header, tensors)
    assert len(learnt(small(), path, optimiser="sgd", objective=plain).epochs) == 4
    with pytest.raises(TrainingError, match="optimiser was sgd, is adamw"):
        learnt(small(), path, objective=plain)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"optimiser": "adam"}, "sgd, adamw"),
        ({"augment": "crop"}, "'crops'"),
        ({"save_every": 0}, "at least 1"),
        ({"class_names": ["one"]}, "1 classes are named, the network has 3"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(TrainingError, match=told):
        learnt(small(), **wrong)


# --- the command ---------------------------------------------------------------------------------------


def command(*words: object) -> Any:
    return CliRunner().invoke(app, ["train", *map(str, words)])


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        write_scenes(tmp_path, each=4, side=32, split=split)
    return tmp_path


def test_the_command_trains_a_network_of_others_without_a_class(photographs: Path, tmp_path: Path) -> None:
    path = tmp_path / "vit.safetensors"
    words = [SMALL, "--set", "scenes", "--data", photographs, "--output", path, "--device", "cpu"]
    quick = ["--epochs", 2, "--batch-size", 10, "--save-every", 2, "--option", "mixup=0.2"]
    done = command(*words, *quick, "--without", "glacier", "--without", "sea")
    assert done.exit_code == 0, done.output
    assert "2 epochs of batches of 10, learning rate 0.001, adamw" in done.output
    loaded = networks.load(SMALL, path)
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


def written(photographs: Path, path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The file of a short training: what its header says of the network, and its tensors."""
    words = [SMALL, "--set", "scenes", "--data", photographs, "--output", path, "--device", "cpu"]
    assert command(*words, "--epochs", 1).exit_code == 0
    header, tensors = checkpoint.read(path)
    return {key: header[key] for key in header if key not in ("format", "library", "tensors")}, tensors


def test_weights_rounded_to_half_are_read_as_float32(photographs: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    header, tensors = written(photographs, path)
    halved = {key: value.half() for key, value in tensors.items()}
    artifact.write(path, header, halved)
    state = networks.load(SMALL, path).network.state_dict()
    assert all(state[key].dtype == torch.float32 for key in halved)
    assert all(torch.equal(state[key], value.float()) for key, value in halved.items())


@pytest.mark.parametrize(
    "changes", [{"shape": [3, 64]}, {"shape": [1, 32, 32]}, {"class_names": ["a"]}, {"shape": [3, 64, 64]}]
)
def test_a_header_that_does_not_fit_is_refused(
    changes: dict[str, Any], photographs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    header, tensors = written(photographs, path)
    artifact.write(path, {**header, **changes}, tensors)
    with pytest.raises(ArtifactError, match=r"a\.safetensors"):
        networks.load(SMALL, path)
