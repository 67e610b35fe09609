"""Damaged and forged files of every kind, by the thousand: `make fuzz`, or `python -m tests.fuzz --help`.

A failure is an exception other than those that are promised, a crash, a load that takes more than 20 seconds
or 2 GiB, and a damaged file that loads as something else. Forged files have checksums that fit; where one
loads, it must also judge a batch, or say in words why not. Metadata of guards and facts of exports are
forged, too: every command that reads them must work or say why not, and run no code that they name.
"""

import argparse
import copy
import faulthandler
import functools
import gzip
import importlib
import json
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import typer
from fastapi.testclient import TestClient
from PIL import Image
from safetensors.torch import load, save, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import gramwatch
from gramwatch import DataError, GramDetector, Guard, Monitor
from gramwatch.cli.app import app
from gramwatch.cli.options import NetworkOptions, PreprocessingOptions, Voice
from gramwatch.deploy.export import KEY
from gramwatch.deploy.exported import ExportedGuard
from gramwatch.deploy.serve import create_app
from gramwatch.errors import ArtifactError, GramwatchError
from gramwatch.files import artifact
from gramwatch.guard.pretrained import card_of, config_of
from gramwatch.inputs import networks
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.methods import METHODS, TRAINED
from gramwatch_lab import datasets, training
from gramwatch_lab.training import checkpoint
from tests.files.test_artifact import CALIBRATION, FRESH, TRAIN, TinyNet, joined, parts

serving = importlib.import_module("gramwatch.cli.serve")  # the package has the function by this name
SECONDS_PER_LOAD = 20
MEMORY = 2 * 2**30
ALLOWED = (ArtifactError, DataError, FileNotFoundError)
SMALL: dict[str, dict[str, Any]] = {"knn": {"k": 5}, "nnguide": {"k": 5}, "vim": {"dimensions": 2}}


@dataclass(frozen=True)
class Kind:
    """One kind of file: how it is written, and read back as tensors that can be compared."""

    write: Callable[[Path], None]
    read: Callable[[Path], list[Tensor]]
    file: str = "file.safetensors"
    forged: bool = False
    """Whether it has a header that can be forged."""
    checked: bool = True
    """Whether damage must be noticed: whether there is a checksum."""
    forge: Callable[[bytes, random.Random], bytes] | None = None
    """Changes facts in the file, with checksums that fit. Such a file is not damaged otherwise."""


def _network(semantic: bool = False) -> nn.Module:
    network = TinyNet()
    if semantic:
        torch.manual_seed(0)
        training.Semantic(count=2, size=3).prepare(network)
    return network


def _judged(detector: Any, fresh: Tensor = FRESH) -> list[Tensor]:
    """Everything that a detector says of a batch."""
    detection = detector(fresh)
    return [detection.score, detection.p_value, detection.is_ood, detection.logits]


def _detector(make: Callable[[nn.Module], Any], semantic: bool = False, calibrate: bool = True) -> Kind:
    def write(path: Path) -> None:
        detector = make(_network(semantic)).fit(TRAIN.split(80), progress=False)
        if calibrate:
            detector.calibrate([CALIBRATION], progress=False)
        detector.save(path)

    def read(path: Path) -> list[Tensor]:
        detector = gramwatch.load(path, _network(semantic))
        return _judged(detector if calibrate else detector.calibrate([CALIBRATION], progress=False))

    return Kind(write, read, forged=True)


def _of_images() -> Kind:
    """The detector that looks at the images themselves, which are too small for it elsewhere."""

    def enlarged(images: Tensor) -> Tensor:
        return images.repeat_interleave(2, 2).repeat_interleave(2, 3)

    def network() -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(2), _network()).eval()

    def write(path: Path) -> None:
        detector = METHODS["image"](network()).fit(enlarged(TRAIN).split(80), progress=False)
        detector.calibrate([enlarged(CALIBRATION)], progress=False).save(path)

    def read(path: Path) -> list[Tensor]:
        return _judged(gramwatch.load(path, network()), enlarged(FRESH))

    return Kind(write, read, forged=True)


def _interrupted(make: Callable[[nn.Module], Any]) -> Kind:
    """The checkpoint of a fit."""

    def write(path: Path) -> None:
        def batches() -> Iterator[Tensor]:
            yield TRAIN
            raise KeyboardInterrupt

        try:
            make(_network()).fit(batches(), checkpoint=path, progress=False)
        except KeyboardInterrupt:
            return

    def read(path: Path) -> list[Tensor]:
        kept = path.with_name("kept")
        kept.write_bytes(path.read_bytes())  # a fit that is complete removes its checkpoint
        detector = make(_network()).fit([TRAIN], checkpoint=kept, progress=False)
        detector.calibrate([CALIBRATION], progress=False)
        return _judged(detector)

    return Kind(write, read, forged=True)


@functools.cache
def _watched() -> Guard:
    """The guard whose stream is monitored."""
    guard = Guard(_network(), orders=[1]).fit([TRAIN], progress=False)
    return guard.calibrate([CALIBRATION], progress=False)


def _monitor(**how: Any) -> Kind:
    def write(path: Path) -> None:
        monitor = Monitor(_watched(), **how)
        monitor.update(_watched()(TRAIN))
        monitor.save(path)

    def read(path: Path) -> list[Tensor]:
        monitor = Monitor.load(path, _watched())
        monitor.update(_watched()(FRESH))
        repr(monitor)
        return [torch.from_numpy(array) for array in monitor._arrays().values()]

    return Kind(write, read, forged=True)


def _weights(objective: str) -> Kind:
    header = {
        "network": "mlp_300",
        "classes": 10,
        "mean": [0.5],
        "std": [0.25],
        "objective": objective,
        "settings": training.objective_of(objective).settings(),
    }

    def write(path: Path) -> None:
        torch.manual_seed(1)
        network = networks.build("mlp_300")
        training.objective_of(objective).prepare(network)
        checkpoint.write(path, header, network)

    return Kind(write, _read_weights, forged=True)


def _read_weights(path: Path) -> list[Tensor]:
    loaded = networks.load("mlp_300", path)
    return [torch.tensor([loaded.mean, loaded.std]), *loaded.network.state_dict().values()]


def _others_weights(path: Path) -> None:
    state = networks.build("mlp_300").state_dict()
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path)


def _set(name: str, split: str = "test") -> Callable[[Path], list[Tensor]]:
    def read(path: Path) -> list[Tensor]:
        root = next(parent for parent in path.parents if parent.name == "root")
        datasets._load.cache_clear()
        image_set = datasets.load(name, root, split=split)
        return [image_set.images, torch.empty(0) if image_set.labels is None else image_set.labels]

    return read


def _cifar(path: Path) -> None:
    rng = np.random.default_rng(0)
    batch = {
        b"data": rng.integers(0, 256, (3, 3072), np.uint8),
        b"labels": [1, 2, 3],
        b"filenames": [b"a.png", b"b.png", b"c.png"],
    }
    path.write_bytes(pickle.dumps(batch, protocol=2))


def _idx(path: Path) -> None:
    def packed(array: np.ndarray) -> bytes:
        head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
        return gzip.compress(head + array.tobytes(), mtime=0)

    rng = np.random.default_rng(0)
    path.write_bytes(packed(rng.integers(0, 256, (3, 28, 28), np.uint8)))
    path.with_name("t10k-labels-idx1-ubyte.gz").write_bytes(packed(np.arange(3, dtype=np.uint8)))


def _npy(path: Path) -> None:
    np.save(path, np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8))
    np.save(path.with_name("labels.npy"), np.arange(3))


def _svhn(path: Path) -> None:
    from scipy.io import savemat

    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), np.uint8)
    savemat(path, {"X": images, "y": np.uint8([[10], [1], [9], [2]])}, do_compression=True)


# --- metadata: what commands read in guards and exports ------------------------------------------------


SIDE = 28
METADATA = {
    "model": {"name": "mnist_convnet", "weights": "net.safetensors", "pretrained": False, "size": None},
    "preprocessing": Preprocessing((SIDE, SIDE), SIDE, "bilinear", (0.5,), (0.25,)).to_json() | {"given": []},
    "images": {"data": "train", "count": 120, "resizing": {"kept": 100, "reduced": 20}},
    "classes": [f"digit {i}" for i in range(10)],
}
EVIL = "gramwatch_fuzz_evil"
"""A module and a folder whose code leaves a mark where it runs."""


def _evil(folder: Path) -> None:
    """Code that a file may name: a module, and a folder of Hugging Face and of timm."""
    code = f"import pathlib\npathlib.Path({str(folder / 'ran')!r}).touch()\ndef build():\n    pass\n"
    (folder / f"{EVIL}.py").write_text(code)
    (folder / EVIL).mkdir(exist_ok=True)
    (folder / EVIL / "own.py").write_text(code)
    names = {"AutoConfig": "own.Config", "AutoModelForImageClassification": "own.Net"}
    config = {"model_type": "own", "auto_map": names, "architecture": "resnet18"}
    (folder / EVIL / "config.json").write_text(json.dumps(config))


def _hostile(folder: str) -> list[Any]:
    """Values for metadata beside `STRANGE`: names, paths and sizes."""
    return [
        f"{EVIL}:build", f"hf:{folder}/{EVIL}", f"hf+code:{folder}/{EVIL}", f"timm:local-dir:{folder}/{EVIL}",
        "timm:hf-hub:a/b", "timm:resnet18", "torchvision:resnet18", "timm:", "torchvision:", "hf:", ":",
        "os:system", "resnet20", "../../x", "/dev/zero", "/dev/stdin", "/etc/passwd", f"{folder}/pipe", ".",
        "\0", "a" * 10_000, "=cmd", "\x1b[2J", "<script>", "\ud800", "\u202e", "%s", "{}", "nearest",
        "lanczos", [28, 28], [10**9, 10**9], [8000, 8000], [1, 1], [-1, 28], [28, 28, 28], [0.5] * 3, [1e308],
        [float(2**70)], ["a"] * 10, [1] * 10, [[]] * 10, {"kept": "a"}, {"kept": 1, "reduced": "a"},
        {"kept": []}, 10**9, 2**64, -(10**9),
    ]  # fmt: skip


def _forged_facts(facts: Any, rng: random.Random, folder: str) -> None:
    """Change one to three values of some facts in place."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        places = list(_places(facts))
        if rng.random() < 0.6 and places:
            *above, last = rng.choice(places)
            holder: Any = facts
            for key in above:
                holder = holder[key]
            holder[last] = copy.deepcopy(rng.choice(_hostile(folder)))
        else:
            _strange_header(facts, rng)


def _forge_metadata(content: bytes, rng: random.Random) -> bytes:
    """Other metadata in a guard's file; seldom, other values elsewhere in the header."""
    layout, data = parts(content)
    header = json.loads(layout["__metadata__"]["gramwatch"])
    _forged_facts(header["metadata"] if rng.random() < 0.8 else header, rng, os.environ["GRAMWATCH_FUZZ"])
    header.pop("checksum", None)
    header["checksum"] = artifact._header_checksum(header)
    layout["__metadata__"]["gramwatch"] = json.dumps(header)
    return joined(layout, data)


def _noise(count: int, seed: int) -> Tensor:
    return torch.randn(count, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def _write_with_metadata(path: Path) -> None:
    torch.manual_seed(0)
    network = networks.build("mnist_convnet").eval()
    save_file(network.state_dict(), path.with_name("net.safetensors"))
    guard = Guard(network, orders=[1]).fit([_noise(120, 1)], progress=False)
    guard.calibrate([_noise(120, 2)], progress=False)
    guard.metadata = copy.deepcopy(METADATA)
    guard.save(path)
    path.with_name("whole.safetensors").write_bytes(path.read_bytes())
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE), np.uint8)
    Image.fromarray(pixels).save(path.with_name("image.png"))
    _prepare_folder(path.parent)


def _prepare_folder(folder: Path) -> None:
    _evil(folder)
    with suppress(FileExistsError):
        os.mkfifo(folder / "pipe")
    os.environ["GRAMWATCH_FUZZ"] = str(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path.insert(0, str(folder))


def _read_by_commands(path: Path) -> list[Tensor]:
    """Every command that reads metadata must do its work, or say in a line why not."""
    beside, quick = path.with_name, ("--device", "cpu")
    table = beside("scores.csv")
    scored = _command("score", path, beside("image.png"), "-o", table, "--overwrite", "--workers", 0, *quick)
    _command("info", path)
    _command("info", path, "--json")
    page = ("-o", beside("r.html"), "--overwrite", "--minimal")
    _command("report", beside("whole.csv") if scored else table, *page, "--guard", path)
    if scored == 0:
        _command("explain", path, beside("image.png"), *quick)
        _command("merge", path, beside("whole.safetensors"), "-o", beside("merged.safetensors"))
    elif not beside("whole.csv").exists():
        whole = beside("whole.safetensors")
        _command("score", whole, beside("image.png"), "-o", beside("whole.csv"), "--workers", 0, *quick)
    _serve(serving._fitted, path)
    with suppress(GramwatchError):
        saved = artifact.read(path)
        with artifact.reading(path):
            card_of(saved, "network"), config_of(saved.header)
    _check_mark(path)
    return []


def _command(*words: object) -> int:
    """The exit code of a command. Only errors that are told in words are none here."""
    result = CliRunner().invoke(app, [str(word) for word in words], input="y\n" * 20)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise RuntimeError(f"gramwatch {words[0]}: {result.exception!r}") from result.exception
    if "\x1b" in result.output or "\0" in result.output:
        raise RuntimeError(f"gramwatch {words[0]} writes control characters: {result.output!r:.300}")
    return result.exit_code


def _serve(opening: Callable[..., Any], path: Path) -> None:
    """What `gramwatch serve` does with a file before it listens, and one request."""
    try:
        _, judge = opening(path, NetworkOptions(), "cpu", PreprocessingOptions(), Voice(quiet=True))
    except (GramwatchError, OSError, typer.BadParameter):
        return
    with TestClient(create_app(judge), base_url="http://localhost") as client:
        answer = client.post("/score", content=path.with_name("image.png").read_bytes())
    if answer.status_code not in (200, 400):
        raise RuntimeError(f"serve answers {answer.status_code}: {answer.text[:300]}")


def _check_mark(path: Path) -> None:
    if path.with_name("ran").exists():
        path.with_name("ran").unlink()
        raise RuntimeError("code was run that the file names")


def _write_export(path: Path) -> None:
    torch.manual_seed(0)
    network = networks.build("mnist_convnet").eval()
    guard = Guard(network, members=["energy"], level=0.9).fit([_noise(120, 1)], progress=False)
    guard.calibrate([_noise(120, 2)], progress=False)
    guard.metadata = copy.deepcopy(METADATA)
    guard.export(path, _noise(1, 3), preprocessing=True)
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE), np.uint8)
    Image.fromarray(pixels).save(path.with_name("image.png"))
    _prepare_folder(path.parent)


def _forge_export(content: bytes, rng: random.Random) -> bytes:
    """Other facts in an exported guard."""
    model = onnx.load_from_string(content)
    (entry,) = [entry for entry in model.metadata_props if entry.key == KEY]
    facts = json.loads(entry.value)
    _forged_facts(facts, rng, os.environ["GRAMWATCH_FUZZ"])
    entry.value = (
        json.dumps(facts)
        if rng.random() < 0.95
        else rng.choice(["", "[]", "{", "\ufeff{}", entry.value[:-9]])
    )
    return model.SerializeToString()


def _read_export(path: Path) -> list[Tensor]:
    _serve(serving._exported, path)
    exported = ExportedGuard(path, "cpu")
    detection = exported(torch.zeros(2, SIDE, SIDE, 1, dtype=torch.uint8))
    Monitor(exported).update(detection)
    _check_mark(path)
    return [detection.score]


def kinds() -> dict[str, Kind]:
    """Every kind of file that is read."""
    result = {
        "gram": _detector(lambda net: GramDetector(net, orders=[1, 2, 3])),
        "gram float16": _detector(lambda net: GramDetector(net, orders=[1, 2], storage="float16")),
        "gram mean_variance": _detector(lambda net: GramDetector(net, bounds="mean_variance")),
        "gram subtract": _detector(lambda net: GramDetector(net, orders=[1], confidence="subtract")),
        "gram not calibrated": _detector(lambda net: GramDetector(net, orders=[1]), calibrate=False),
        "gram checkpoint": _interrupted(lambda net: GramDetector(net, orders=[1, 2])),
        "guard": _detector(lambda net: Guard(net, orders=[1, 2])),
        "guard per class": _detector(lambda net: Guard(net, orders=[1], per_class=True, level=0.9)),
        "guard not calibrated": _detector(lambda net: Guard(net, orders=[1]), calibrate=False),
        "guard checkpoint": _interrupted(lambda net: Guard(net, orders=[1])),
        "monitor": _monitor(mean_time_to_false_alarm=10),
        "monitor fixed": _monitor(reference="fixed", every=2),
    }
    for name, method in (METHODS | TRAINED).items():
        options = SMALL.get(name, {})
        result[name] = _detector(
            lambda net, method=method, options=options: method(net, **options), name == "semantic"
        )
    result["image"] = _of_images()
    result |= {f"weights {name}": _weights(name) for name in ("cross_entropy", "semantic")}
    result["metadata of a guard"] = Kind(_write_with_metadata, _read_by_commands, forge=_forge_metadata)
    result["facts of an export"] = Kind(_write_export, _read_export, "guard.onnx", forge=_forge_export)
    batch = "root/cifar-10-batches-py/test_batch"
    result |= {
        "weights of others": Kind(_others_weights, _read_weights, "w.safetensors", checked=False),
        "weights by PyTorch": Kind(_others_weights, _read_weights, "w.pth", checked=False),
        "CIFAR": Kind(_cifar, _set("cifar10"), batch, checked=False),
        "IDX": Kind(_idx, _set("mnist"), "root/MNIST/raw/t10k-images-idx3-ubyte.gz", checked=False),
        "npy": Kind(_npy, _set("cifar100_subset"), "root/cifar100-subset/images.npy", checked=False),
        "SVHN": Kind(_svhn, _set("svhn"), "root/svhn/test_32x32.mat", checked=False),
    }
    return result


# --- mutations ---------------------------------------------------------------------------------------


def damaged(content: bytes, rng: random.Random) -> bytes:
    """One to three pieces of damage, as disks and networks do it."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        size = max(1, len(content))
        # As often near the beginning, where headers are, as anywhere.
        place = rng.randrange(size if rng.random() < 0.5 else min(size, 3000))
        length = rng.choice([1, 2, 8, 100, size // 3 + 1])
        other = rng.randrange(size)
        how = rng.randrange(6)
        if how <= 1:
            changed = bytearray(content)
            if changed:
                changed[place] ^= 1 << rng.randrange(8)
            content = bytes(changed)
        elif how == 2:
            content = content[:place]
        elif how == 3:
            content = content[:place] + rng.randbytes(rng.choice([1, 4, 50])) + content[place:]
        elif how == 4:
            content = content[:place] + content[place + length :]
        else:
            a, b = sorted((place, other))
            one, two = content[a : a + 40], content[b : b + 40]
            content = content[:a] + two + content[a + 40 : b] + one + content[b + 40 :]
    return content


STRANGE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 10**6, 2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e308, 1e-308,
    "", "x", "gram", "float16", "mean_variance", "triangle", "\0" * 50,
    [], [[]], {}, [1], ["a"], [None], [0, 0], {"a": 1},
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _places(value[key], (*path, key))


def _strange_header(header: dict[str, Any], rng: random.Random) -> None:
    places = list(_places(header))
    if rng.random() < 0.95:
        seldom = ("checksum", "tensors", "format", "network")
        places = [place for place in places if place[0] not in seldom]
    if not places:
        return
    *above, last = rng.choice(places)
    holder: Any = header
    for key in above:
        holder = holder[key]
    how, old = rng.randrange(7), holder[last]
    if how == 0:
        del holder[last]
    elif how == 1 and isinstance(holder, list):
        holder.append(copy.deepcopy(rng.choice(holder)))
    elif how == 2 and isinstance(holder, dict):
        holder[rng.choice(["", "extra", "state.x_", "model", "options"])] = holder.pop(last)
    elif how == 3 and type(old) in (int, float):
        holder[last] = rng.choice([old + 1, old - 1, -old, old * 1000, float(old), old / 3])
    else:
        holder[last] = copy.deepcopy(rng.choice(STRANGE))


def _strange_tensor(tensors: dict[str, Tensor], header: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(list(tensors))
    tensor, how = tensors[name].clone(), rng.randrange(6)
    if how == 0:
        tensor = tensor.to(
            rng.choice([torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8])
        )
    elif how == 1 and tensor.numel():
        tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice([0, -1, 1, 3, 100])
    elif how == 2 and tensor.is_floating_point() and tensor.numel():
        strange = rng.choice([torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
        tensor.view(-1)[rng.randrange(tensor.numel())] = strange
    elif how == 3:
        tensor = tensor.flip(0) if tensor.ndim else tensor.unsqueeze(0)
    elif how == 4 and tensor.ndim:
        tensor = rng.choice([tensor[:-1], torch.cat([tensor, tensor[:1]]), tensor[:0], tensor.unsqueeze(0)])
    else:
        tensors[rng.choice(["stowaway", "state.x_", f"{name}_"])] = tensors.pop(name)
        return
    tensors[name] = tensor.contiguous()
    if rng.random() < 0.8:
        _tell_shape(header, name, list(tensor.shape))


def _tell_shape(header: dict[str, Any], name: str, shape: list[int]) -> None:
    """Let the header say what shape the tensor has now, wherever it says so."""
    members = header.get("members")
    nested = members.items() if isinstance(members, dict) else ()
    for start, holder in [("", header), *((f"members.{member}.", own) for member, own in nested)]:
        shapes = holder.get("shapes") if isinstance(holder, dict) else None
        if isinstance(shapes, dict) and name.removeprefix(start) in shapes:
            shapes[name.removeprefix(start)] = shape


def forged(content: bytes, rng: random.Random) -> bytes:
    """Other values in the header or the tensors, with checksums that fit."""
    layout, _ = parts(content)
    header, tensors = json.loads(layout["__metadata__"]["gramwatch"]), dict(load(content))
    for _ in range(rng.choice([1, 1, 2])):
        if rng.random() < 0.6:
            _strange_header(header, rng)
        else:
            _strange_tensor(tensors, header, rng)
    header.pop("checksum", None)
    if rng.random() < 0.98:
        header["tensors"] = artifact._checksum(tensors.items())
    header["checksum"] = artifact._header_checksum(header)
    data_of_file = save(tensors, metadata={"gramwatch": json.dumps(header)})
    if rng.random() < 0.1:  # the layout itself, too
        layout, data = parts(data_of_file)
        _strange_header(layout, rng)
        data_of_file = joined(layout, data)
    return data_of_file


# --- trying ------------------------------------------------------------------------------------------


def _too_long(*_: Any) -> None:
    raise RuntimeError(f"it takes more than {SECONDS_PER_LOAD} seconds")


def problem(kind: Kind, path: Path, original: list[Tensor], by_forger: bool) -> str | None:
    """What is wrong with how the file at `path` is read; None if nothing is."""
    signal.alarm(SECONDS_PER_LOAD)
    try:
        result = kind.read(path)
    except ALLOWED:
        return None
    except GramwatchError as error:
        return None if by_forger else f"{type(error).__name__}: {error}"
    except BaseException:  # it is what is looked for
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    if by_forger or not kind.checked:
        return None
    same = len(result) == len(original) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(result, original, strict=True)
    )
    return None if same else "it loads as something else"


def try_one_kind(
    name: str, seconds: float, seed: int, folder: Path, count: int | None = None
) -> dict[str, Any]:
    """Read mutations of one kind of file for so long, or so many of them; how many, and what went wrong."""
    warnings.simplefilter("ignore")
    kind, rng = kinds()[name], random.Random(f"{seed} {name}")
    path = folder / kind.file
    path.parent.mkdir(parents=True, exist_ok=True)
    kind.write(path)
    content = path.read_bytes()
    original = kind.read(path)
    signal.signal(signal.SIGALRM, _too_long)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tried, failures, end = 0, [], time.monotonic() + seconds
    while time.monotonic() < end if count is None else tried < count:
        by_forger = kind.forge is not None or (kind.forged and rng.random() < 0.6)
        changed = (kind.forge or forged if by_forger else damaged)(content, rng)
        path.write_bytes(changed)
        wrong = problem(kind, path, original, by_forger)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - used
        if wrong is None and grown > MEMORY:
            wrong, used = f"it takes {grown / 2**30:.1f} GiB", used + grown
        if wrong is not None:
            failures.append(wrong)
            kept = folder / f"failure-{len(failures)}"
            kept.write_bytes(changed)
        tried += 1
    return {"tried": tried, "failures": failures}


def _worker(name: str, seconds: float, seed: int, folder: Path) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    print(json.dumps(try_one_kind(name, seconds, seed, folder)))


def main() -> None:
    """Each kind in a process of its own, so that a crash is one failure of that kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=list(kinds()), help="only these")
    parser.add_argument("--keep", type=Path, help="a folder for the files that failed")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, seconds, seed, folder = arguments.worker
        return _worker(name, float(seconds), int(seed), Path(folder))
    chosen = arguments.kind or list(kinds())
    weights = {name: 4 if kinds()[name].forge else 1 for name in chosen}  # commands take longer than loads
    tried = failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        for number, name in enumerate(chosen):
            folder = (arguments.keep or Path(temporary)) / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            share = arguments.seconds * weights[name] / sum(weights.values())
            command = [
                sys.executable,
                "-m",
                "tests.fuzz",
                "--worker",
                name,
                str(share),
                str(arguments.seed),
                str(folder),
            ]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
            if done.returncode:
                result = {"tried": 1, "failures": [f"crash, {done.returncode}: {done.stderr[-3000:]}"]}
            else:
                result = json.loads(done.stdout.splitlines()[-1])
            tried, failed = tried + result["tried"], failed + len(result["failures"])
            print(f"{name:24} tried {result['tried']:6,}  failed {len(result['failures'])}", flush=True)
            for failure in result["failures"][:3]:
                print(f"    {failure}", flush=True)
    print(f"{'all':24} tried {tried:6,}  failed {failed}")
    return sys.exit(failed > 0)


if __name__ == "__main__":
    main()
