"""Networks by name, and their checkpoints: ours, those of others, damaged and forged ones."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gramwatch
import gramwatch_lab
from gramwatch import ArtifactError, InputError
from gramwatch.files import artifact
from gramwatch.inputs import networks
from gramwatch_lab import datasets, training
from gramwatch_lab.training import checkpoint
from tests import real_data
from tests.files.test_artifact import _Largest


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_every_network_is_built_prepared_and_saved_again(name, tmp_path):
    record = networks.NETWORKS[name]
    path = tmp_path / "saved.safetensors"
    save_file(networks.build(name, 7).state_dict(), path)
    loaded = networks.load(name, path)
    assert not loaded.network.training
    assert (loaded.mean, loaded.std) == (record.mean, record.std)
    images = torch.randint(0, 256, (2, *record.shape), dtype=torch.uint8)
    prepared = loaded.prepare(images)
    assert prepared.dtype == torch.float32
    torch.testing.assert_close(prepared, loaded.prepare(images / 255))
    first = (images[0, 0, 0, 0] / 255 - record.mean[0]) / record.std[0]
    torch.testing.assert_close(prepared[0, 0, 0, 0], first)
    with torch.inference_mode():
        assert loaded.network(prepared).shape == (2, 7)
    with pytest.raises(InputError, match=f"takes images of {record.shape[0]} channels"):
        loaded.prepare(images[:, :1].expand(-1, 4, -1, -1))


# Measured on the whole test sets, percent.
THIRD_PARTY = {
    "densenet_bc_100_12_cifar10": ("densenet", 94.54, 100),
    "resnet20_cifar10": ("resnet20", 91.73, 1000),
    "resnet32_cifar10": ("resnet32", 92.63, 1000),
    "mnist_convnet_baseline": ("mnist_convnet", 99.06, 10_000),
    "mnist_convnet_outlier_exposure_scratch": ("mnist_convnet", 98.97, 10_000),
    "mnist_convnet_outlier_exposure_tuned": ("mnist_convnet", 99.08, 10_000),
}


@pytest.mark.parametrize("file", THIRD_PARTY)
def test_third_party_checkpoints_reach_their_accuracy(file, shared_weights, shared_data):
    name, percent, count = THIRD_PARTY[file]
    loaded = networks.load(name, shared_weights / f"{file}.pth")
    if name == "mnist_convnet":
        test = datasets.load("mnist", shared_data)
        images, labels = test.images, test.labels
    else:
        folder = shared_data / "cifar10"
        images = torch.from_numpy(real_data.mosaic(folder / "test_0.webp", count).copy()).permute(0, 3, 1, 2)
        labels = torch.from_numpy(np.load(folder / "test_labels.npy")[:count].astype(np.int64))
    size = 500 if name == "mnist_convnet" else 50  # the feature maps of a batch fit into cache
    with torch.inference_mode():
        right = sum(
            int((loaded.network(loaded.prepare(x)).argmax(1) == y).sum())
            for x, y in zip(images.split(size), labels.split(size), strict=True)
        )
    if count == 10_000:  # the whole test set: to the image
        assert right == round(100 * percent)
    else:  # a part of it: within three standard deviations of a binomial
        p = percent / 100
        assert abs(right / count - p) < 3 * (p * (1 - p) / count) ** 0.5


def test_prefixes_are_stripped_and_the_header_is_heeded(tmp_path):
    state = networks.build("mlp_300", 4).state_dict()
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, tmp_path / "a.pth")
    header = {"network": "mlp_300", "classes": 4, "mean": [0.25], "std": [0.5], "objective": "cross_entropy"}
    artifact.write(tmp_path / "b.safetensors", header, state)
    for file in ("a.pth", "b.safetensors"):
        weights = networks.load("mlp_300", tmp_path / file).network.state_dict()
        assert weights.keys() == state.keys()
        assert all(torch.equal(weights[key], state[key]) for key in state)
    loaded = networks.load("mlp_300", tmp_path / "b.safetensors")
    assert (loaded.mean, loaded.std) == ((0.25,), (0.5,))
    loaded = networks.load("mlp_300", tmp_path / "b.safetensors", mean=[0.0], std=[1.0])
    assert (loaded.mean, loaded.std) == ((0.0,), (1.0,))
    with pytest.raises(ArtifactError, match="holds a 'mlp_300', not a 'mlp_300_150'"):
        networks.load("mlp_300_150", tmp_path / "b.safetensors")


def test_old_checkpoints_without_counters_are_read(tmp_path):
    state = networks.build("resnet20").state_dict()
    kept = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
    assert len(kept) < len(state)
    torch.save(kept, tmp_path / "old.th")
    networks.load("resnet20", tmp_path / "old.th")


def test_wrong_files_are_refused_by_name(tmp_path):
    path = tmp_path / "wrong.pth"
    with pytest.raises(ArtifactError, match=r"no checkpoint .*wrong\.pth"):
        networks.load("mlp_300", path)
    state = networks.build("mlp_300").state_dict()
    torch.save({k: v for k, v in state.items() if k != "layers.linear1.bias"}, path)
    with pytest.raises(ArtifactError, match=r"wrong\.pth does not fit.*missing: layers\.linear1\.bias$"):
        networks.load("mlp_300", path)
    torch.save({**state, "extra": torch.zeros(1)}, path)
    with pytest.raises(ArtifactError, match=r"unknown: extra$"):
        networks.load("mlp_300", path)
    torch.save({**state, "layers.linear1.bias": torch.zeros(3)}, path)
    with pytest.raises(
        ArtifactError, match=r"of another shape: layers\.linear1\.bias \(3,\) instead of \(300,\)"
    ):
        networks.load("mlp_300", path)
    torch.save([1, 2], path)
    with pytest.raises(ArtifactError, match="does not hold parameters by name"):
        networks.load("mlp_300", path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ArtifactError, match="cannot be read as parameters alone"):
        networks.load("mlp_300", path)
    (tmp_path / "wrong.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        networks.load("mlp_300", tmp_path / "wrong.safetensors")
    with pytest.raises(InputError, match="no network 'vgg': choose from resnet34, resnet18, densenet"):
        networks.build("vgg")


def test_a_pickled_module_is_refused_with_a_way_out(tmp_path):
    torch.save(networks.build("mlp_300"), tmp_path / "whole.pth")
    with pytest.raises(ArtifactError, match=r"whole pickled module.*docs/checkpoints\.md"):
        networks.load("mlp_300", tmp_path / "whole.pth")


def test_the_conversion_in_the_docs_works(tmp_path):
    """The script is run as a user would, on a module of ours in place of another project's."""
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    script = next(b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "save_file" in b)
    network = networks.build("mlp_300")
    torch.save(torch.nn.DataParallel(network), tmp_path / "whole.pth")
    (tmp_path / "convert.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "convert.py", "whole.pth", "out.safetensors"]
    folders = [str(Path(package.__file__).parents[1]) for package in (gramwatch, gramwatch_lab)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    weights = networks.load("mlp_300", tmp_path / "out.safetensors").network.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in network.state_dict().items())


HEADER = {"network": "mlp_300", "classes": 10, "mean": [0.25], "std": [0.5], "objective": "cross_entropy"}


def our_weights(path, **changes):
    network = networks.build("mlp_300")
    checkpoint.write(path, {**HEADER, "settings": {}, **changes}, network)
    return network


def test_every_flipped_bit_of_our_own_weights_is_noticed(tmp_path):
    path, rng = tmp_path / "weights.safetensors", random.Random(0)
    our_weights(path)
    content = path.read_bytes()
    assert networks.load("mlp_300", path).mean == (0.25,)
    places = [rng.randrange(len(content)) for _ in range(30)] + [rng.randrange(2000) for _ in range(30)]
    key = content.index(b"gramwatch")  # where the header might be taken for someone else's
    for place in [*places, *range(key, key + 9)]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"weights\.safetensors"):
            networks.load("mlp_300", path)


def test_weights_of_others_load_without_a_checksum(tmp_path):
    state = networks.build("mlp_300", 3).state_dict()
    for metadata in (None, {"format": "pt"}):
        save_file(
            {f"module.{key}": value for key, value in state.items()}, tmp_path / "w.safetensors", metadata
        )
        weights = networks.load("mlp_300", tmp_path / "w.safetensors").network.state_dict()
        assert all(torch.equal(weights[key], value) for key, value in state.items())


def test_a_guard_or_detector_is_not_taken_for_weights(tmp_path):
    network, path = networks.build("mlp_300"), tmp_path / "saved.safetensors"
    images = torch.rand(40, 1, 28, 28)
    guard = gramwatch.Guard(network, orders=[1], taps="ends")
    with pytest.warns(gramwatch.GramwatchWarning, match="fewer than 20"):
        guard.fit([images], progress=False)
    for detector, kind in ((guard, "guard"), (guard.members["gram"], "detector")):
        detector.save(path)
        with pytest.raises(
            ArtifactError, match=rf"saved\.safetensors is a {kind}, not a checkpoint of a net"
        ):
            networks.load("mlp_300", path)


@pytest.mark.parametrize(
    "changes",
    [
        {"classes": 200_000_000},
        {"classes": "many"},
        {"classes": 10.0},
        {"mean": [0.1, 0.2, 0.3]},
        {"mean": "grey"},
        {"std": [0.0]},
        {"std": [-1]},
        {"objective": "dreaming"},
        {"objective": "semantic"},
        {"settings": {"colour": 3}},
        {"settings": []},
        {"network": []},
    ],
    ids=str,
)
def test_a_forged_header_of_weights_is_refused_before_memory_is_taken(changes, tmp_path):
    path = tmp_path / "weights.safetensors"
    our_weights(path, **changes)
    with _Largest() as largest, pytest.raises(ArtifactError, match=r"weights\.safetensors"):
        networks.load("mlp_300", path)
    assert largest.numbers <= 300 * 784  # the network with ten classes


def test_weights_as_wide_as_the_file_claims_are_not_built(tmp_path):
    state = networks.build("mlp_300").state_dict()
    state["layers.linear2.weight"] = torch.zeros(20_000_000, 1, dtype=torch.uint8)
    save_file(state, tmp_path / "wide.safetensors")
    with _Largest() as largest, pytest.raises(ArtifactError, match=r"wide\.safetensors does not fit"):
        networks.load("mlp_300", tmp_path / "wide.safetensors")
    assert largest.numbers <= 300 * 784


def test_weights_of_another_type_are_refused(tmp_path):
    state = networks.build("mlp_300").state_dict()
    state["layers.linear1.weight"] = state["layers.linear1.weight"].to(torch.int64)
    save_file(state, tmp_path / "whole.safetensors")
    with pytest.raises(ArtifactError, match=r"of another type: layers\.linear1\.weight torch\.int64"):
        networks.load("mlp_300", tmp_path / "whole.safetensors")


def test_weights_of_every_objective_come_back(tmp_path):
    for name in training.OBJECTIVES:
        network, objective = networks.build("mlp_300"), training.objective_of(name)
        objective.prepare(network)
        header = {**HEADER, "objective": name, "settings": objective.settings()}
        checkpoint.write(tmp_path / "weights.safetensors", header, network)
        weights = networks.load("mlp_300", tmp_path / "weights.safetensors").network.state_dict()
        assert weights.keys() == network.state_dict().keys()
        assert all(torch.equal(weights[key], value) for key, value in network.state_dict().items())
