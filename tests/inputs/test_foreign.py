"""Networks of timm and torchvision by name: built, trained, saved and loaded."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from gramwatch import ArtifactError, InputError, MissingExtraError
from gramwatch.cli.app import app
from gramwatch.files import artifact
from gramwatch.inputs import foreign, networks
from gramwatch_lab.training import checkpoint
from tests.inputs.files import write_scenes

pytest.importorskip("timm", exc_type=ImportError)
SMALL = "timm:test_vit"
"""A small network of timm that is built for the size of images."""
STUDIED = [
    ("torchvision:resnet18", 11_179_590),
    ("timm:efficientnet_b0", 4_015_234),
    ("timm:convnext_atto", 3_376_446),
    ("timm:vit_tiny_patch16_224", 5_500_230),
]


@pytest.mark.parametrize(("name", "parameters"), STUDIED)
def test_the_networks_of_the_study_are_built_for_128_pixels(name: str, parameters: int) -> None:
    record = networks.record_of(name, 128)
    assert record.shape == (3, 128, 128)
    assert name.partition(":")[2] in record.title
    with torch.device("meta"):
        network = networks.build(name, 6, 128)
        assert sum(parameter.numel() for parameter in network.parameters()) == parameters
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
    code = "from gramwatch.inputs import networks; print(networks.build('timm:test_vit', 3, 32).num_classes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "3", done.stderr
    assert foreign.is_foreign("timm:x")
    assert not foreign.is_foreign("timm")


# --- files --------------------------------------------------------------------------------------------


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        write_scenes(tmp_path, count=4, side=32, split=split)
    return tmp_path


def written(photographs: Path, path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The file of a short training: what its header says of the network, and its tensors."""
    words = [SMALL, "--set", "scenes", "--data", photographs, "--output", path, "--device", "cpu"]
    assert CliRunner().invoke(app, ["train", *map(str, words), "--epochs", "1"]).exit_code == 0
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


def test_a_network_that_computes_while_it_is_made_is_read(tmp_path: Path) -> None:
    """RegNet computes its widths from tensors, which fails on the device that a file is first compared on."""
    network = networks.build("timm:regnety_002", 3, 64)
    save_file(network.state_dict(), tmp_path / "regnet.safetensors")
    loaded = networks.load("timm:regnety_002", tmp_path / "regnet.safetensors")
    expected, actual = network.state_dict(), loaded.network.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)
