"""Saving and loading: what comes back is what was saved, and nothing else is ever taken for it."""

import json
import math
import multiprocessing
import os
import platform
import re
import runpy
import signal
import stat
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from os import fsync  # conftest.py puts another in its place
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gramwatch
from gramwatch import ArtifactError, GramDetector, NotFittedError
from gramwatch.files import artifact, writing
from gramwatch.numerics.bounds import BOUNDS

DATA = Path(__file__).parents[1] / "data"
MADE = runpy.run_path(str(DATA / "make_detector_v1.py"))
TinyNet, inputs, outliers = MADE["TinyNet"], MADE["inputs"], MADE["outliers"]
TRAIN, CALIBRATION = inputs(240, salt=101), inputs(90, salt=202)
FRESH = torch.cat([inputs(9, salt=319), outliers(3, salt=404)])
METADATA = {"classes": ["dot", "bar", "ring"], "note": "größer als π", "nested": {"a": [1, None, True, 0.1]}}


def fitted(model: nn.Module | None = None, *, calibrated: bool = True, **choices: Any) -> GramDetector:
    model = TinyNet() if model is None else model
    dtype = next(model.parameters()).dtype
    detector = GramDetector(model, **{"orders": [1, 2, 3], **choices})
    detector.fit(TRAIN.to(dtype).split(80), progress=False)
    if calibrated:
        detector.calibrate([CALIBRATION.to(dtype)], seed=3, progress=False)
    detector.metadata = METADATA
    return detector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("artifact")


@pytest.fixture(scope="module")
def detector() -> GramDetector:
    return fitted()


@pytest.fixture(scope="module")
def good(detector: GramDetector, folder: Path) -> bytes:
    """The bytes of a saved detector."""
    detector.save(folder / "good.safetensors")
    return (folder / "good.safetensors").read_bytes()


def damaged(folder: Path, content: bytes) -> Path:
    path = folder / "damaged.safetensors"
    path.write_bytes(content)
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def parts(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The safetensors header, and the data."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(layout: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(layout).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def header_of(content: bytes) -> dict[str, Any]:
    return json.loads(parts(content)[0]["__metadata__"]["gramwatch"])


def rewritten(content: bytes, change: Callable[[dict[str, Any]], Any], *, sealed: bool = True) -> bytes:
    """The file with another gramwatch header. Sealed: with a checksum that fits it, as a forger would."""
    layout, data = parts(content)
    header = json.loads(layout["__metadata__"]["gramwatch"])
    change(header)
    if sealed:
        header.pop("checksum")
        header["checksum"] = artifact._header_checksum(header)
    layout["__metadata__"]["gramwatch"] = json.dumps(header)
    return joined(layout, data)


def assert_same(loaded: GramDetector, saved: GramDetector, images: Tensor = FRESH) -> None:
    """Everything a user can see is equal, bit for bit."""
    assert repr(loaded) == repr(saved)
    assert loaded.taps == saved.taps
    assert loaded.metadata == saved.metadata
    assert loaded.class_counts_.equal(saved.class_counts_)
    assert loaded.settings_as_json() == saved.settings_as_json()
    before, after = saved.measure(images), loaded.measure(images)
    assert after.deviations.equal(before.deviations)
    assert after.logits.equal(before.logits)
    mine, theirs = loaded._bounds.state(), saved._bounds.state()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.equal(theirs[name])
        assert tensor.dtype == theirs[name].dtype
    if saved._calibration is None:
        with pytest.raises(NotFittedError, match="not calibrated"):
            loaded(images)
        return
    assert loaded.threshold_ == saved.threshold_
    assert loaded.calibration_scores_.equal(saved.calibration_scores_)
    actual, expected = loaded(images), saved(images)
    assert actual.score.equal(expected.score)
    assert actual.p_value.equal(expected.p_value)
    assert actual.is_ood.equal(expected.is_ood)
    assert actual.class_support.equal(expected.class_support)


# --- round trips -------------------------------------------------------------------------------------


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "only fitted"])
@pytest.mark.parametrize("bounds", ["min_max", "mean_variance"])
def test_a_loaded_detector_equals_the_saved_one(bounds: str, calibrated: bool, tmp_path: Path) -> None:
    saved = fitted(bounds=bounds, calibrated=calibrated)
    saved.save(tmp_path / "detector.safetensors")
    loaded = gramwatch.load(tmp_path / "detector.safetensors", TinyNet())
    assert_same(loaded, saved)


@pytest.mark.parametrize(
    "choices",
    [
        {"confidence": "subtract"},
        {"confidence": "divide_total", "normalise": False},
        {"confidence": "none", "level": 0.9, "statistic": "diagonal"},
        {"taps": ["conv*", "hidden"], "statistic": "triangle", "orders": [4, 1]},
        {"storage": "float16"},
    ],
    ids=str,
)
def test_every_setting_survives(choices: dict[str, Any], tmp_path: Path) -> None:
    saved = fitted(**choices)
    saved.save(tmp_path / "detector.safetensors")
    loaded = gramwatch.load(tmp_path / "detector.safetensors", TinyNet())
    assert loaded.settings_as_json() | choices == loaded.settings_as_json()
    assert_same(loaded, saved)


def test_a_calibration_without_split_survives(tmp_path: Path) -> None:
    saved = fitted(calibrated=False)
    saved.calibrate([CALIBRATION], split=False, progress=False)
    saved.save(tmp_path / "detector.safetensors")
    loaded = gramwatch.load(tmp_path / "detector.safetensors", TinyNet())
    assert len(loaded.calibration_scores_) == len(CALIBRATION)
    assert_same(loaded, saved)


def test_an_odd_number_of_calibration_examples_survives(tmp_path: Path) -> None:
    saved = fitted(calibrated=False)
    saved.calibrate([CALIBRATION[:77]], progress=False)
    saved.save(tmp_path / "detector.safetensors")
    loaded = gramwatch.load(tmp_path / "detector.safetensors", TinyNet())
    assert len(loaded.calibration_scores_) == 39
    assert_same(loaded, saved)


@pytest.mark.filterwarnings("ignore:.*float64:gramwatch.GramwatchWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_network_of_another_precision_survives(dtype: torch.dtype, tmp_path: Path) -> None:
    saved = fitted(TinyNet().to(dtype))
    saved.save(tmp_path / "detector.safetensors")
    loaded = gramwatch.load(tmp_path / "detector.safetensors", TinyNet().to(dtype))
    assert_same(loaded, saved, FRESH.to(dtype))
    with pytest.raises(ArtifactError, match="other weights"):
        gramwatch.load(tmp_path / "detector.safetensors", TinyNet())


def test_saved_from_a_data_parallel_network_it_loads_for_the_plain_one(tmp_path: Path) -> None:
    saved = fitted(nn.DataParallel(TinyNet()))
    saved.save(tmp_path / "detector.safetensors")
    assert_same(gramwatch.load(tmp_path / "detector.safetensors", TinyNet()), saved)


def test_saved_from_the_plain_network_it_loads_for_a_data_parallel_one(
    detector: GramDetector, tmp_path: Path
) -> None:
    detector.save(tmp_path / "detector.safetensors")
    assert_same(gramwatch.load(tmp_path / "detector.safetensors", nn.DataParallel(TinyNet())), detector)


@pytest.mark.parametrize("bounds", ["min_max", "mean_variance"])
def test_a_loaded_detector_can_be_fitted_further_as_the_saved_one(bounds: str, tmp_path: Path) -> None:
    saved = fitted(bounds=bounds)
    saved.save(tmp_path / "detector.safetensors")
    loaded = gramwatch.load(tmp_path / "detector.safetensors", TinyNet())
    for copy_of in (saved, loaded):
        copy_of.fit([inputs(60, salt=77)], progress=False)
        copy_of.calibrate([CALIBRATION], progress=False)
    assert int(loaded.class_counts_.sum()) == len(TRAIN) + 60
    assert_same(loaded, saved)


def test_saving_the_loaded_detector_again_gives_the_same_contents(good: bytes, folder: Path) -> None:
    loaded = gramwatch.load(damaged(folder, good), TinyNet())
    loaded.save(folder / "again.safetensors")
    assert (folder / "again.safetensors").read_bytes() == good


def test_a_loaded_detector_does_not_depend_on_its_file_any_more(good: bytes, folder: Path) -> None:
    path = damaged(folder, good)
    loaded = gramwatch.load(path, TinyNet())
    expected = loaded(FRESH)
    with path.open("r+b") as file:  # written over in place, as `cp` does
        file.write(bytes(len(good)))
    detection = loaded(FRESH)
    assert detection.score.equal(expected.score)
    assert detection.p_value.equal(expected.p_value)
    assert loaded.class_counts_.sum() == len(TRAIN)


def test_paths_may_be_text_or_path_and_any_length_of_name(detector: GramDetector, tmp_path: Path) -> None:
    names = ["ä b.safetensors", "no suffix", "x" * 250]
    for name in names:
        detector.save(str(tmp_path / name))
        assert_same(gramwatch.load(str(tmp_path / name), TinyNet()), detector)
    assert names_in(tmp_path) == sorted(names)


def test_metadata_may_be_any_json(detector: GramDetector, tmp_path: Path) -> None:
    path = tmp_path / "detector.safetensors"
    kept = detector.metadata
    try:
        detector.metadata = {"mean": (0.5, 0.25), "": "\x00\ud800\n\"'", "big": 10**40, "off": {}, "no": []}
        detector.save(path)
        loaded = gramwatch.load(path, TinyNet()).metadata
        assert loaded == {**detector.metadata, "mean": [0.5, 0.25]}
    finally:
        detector.metadata = kept


# --- what is in the file -----------------------------------------------------------------------------


def test_the_header_holds_everything_but_the_tensors(detector: GramDetector, good: bytes) -> None:
    header = header_of(good)
    assert header["format"] == artifact.FORMAT == 1
    assert header["library"] == gramwatch.__version__
    assert header["detector"] == "GramDetector"
    assert header["settings"] == {
        "taps": "all",
        "orders": [1, 2, 3],
        "statistic": "auto",
        "bounds": "min_max",
        "normalise": True,
        "confidence": "divide",
        "level": 0.95,
    }
    assert header["classes"] == 3
    assert header["metadata"] == METADATA
    calibration = header["calibration"]
    assert (calibration["split"], calibration["seed"], calibration["examples"]) == (True, 3, 90)
    assert header["inputs"] == [[[1, 6, 6], "float32"]]
    assert header["network"]["parameters"] == sum(p.numel() for p in TinyNet().parameters())
    watched = header["taps"]["watched"]
    assert [entry["name"] for entry in watched] == detector.taps.names
    assert watched[2]["shape"] == [1, 5, 2, 2]
    assert (watched[2]["batch_axis"], watched[2]["channel_axis"]) == (0, 1)


def test_the_tensors_are_class_counts_bounds_and_calibration(detector: GramDetector, good: bytes) -> None:
    layout, _ = parts(good)
    names = layout.keys() - {"__metadata__"}
    bounds = {"bounds.minimum", "bounds.maximum"}
    assert names == {"class_counts", "calibration.scores", "calibration.expectation"} | bounds
    features = 3 * (4 + 4 + 5 + 5) + 2 * (21 + 21)  # three orders of row sums, two of the pairs of vectors
    assert layout["bounds.minimum"]["shape"] == [3, features]
    assert layout["calibration.scores"]["shape"] == [45]


def test_it_is_an_ordinary_safetensors_file(detector: GramDetector, good: bytes, folder: Path) -> None:
    tensors = load_file(damaged(folder, good))
    assert tensors["class_counts"].equal(detector.class_counts_)
    assert tensors["calibration.scores"].equal(detector.calibration_scores_)


# --- the fingerprint of a network --------------------------------------------------------------------


def test_wrappers_do_not_change_the_fingerprint() -> None:
    plain = artifact.fingerprint(TinyNet())
    compiled_inside = TinyNet()
    compiled_inside.conv2 = torch.compile(compiled_inside.conv2)
    wrapped = [
        nn.DataParallel(TinyNet()),
        torch.compile(TinyNet()),
        torch.compile(nn.DataParallel(TinyNet())),
        nn.DataParallel(torch.compile(TinyNet())),
        compiled_inside,
    ]
    assert [artifact.fingerprint(network) for network in wrapped] == [plain] * len(wrapped)


@pytest.mark.parametrize("name", ["conv1.weight", "hidden.bias", "norm.running_mean", "norm.running_var"])
def test_one_changed_value_of_a_parameter_or_buffer_changes_the_weights_only(name: str) -> None:
    model = TinyNet()
    before = artifact.fingerprint(model)
    tensor = model.state_dict()[name].flatten()
    tensor[-1] = math.nextafter(tensor[-1].item(), 9.0) + 1e-7
    after = artifact.fingerprint(model)
    assert after["structure"] == before["structure"]
    assert after["weights"] != before["weights"]


def test_other_names_or_shapes_change_the_structure() -> None:
    plain = artifact.fingerprint(TinyNet())["structure"]
    renamed, reshaped, extended = TinyNet(), TinyNet(), TinyNet()
    renamed.add_module("first", renamed.conv1)
    del renamed.conv1
    reshaped.conv1.weight = nn.Parameter(reshaped.conv1.weight.reshape(1, 4, 3, 3))
    extended.register_buffer("extra", torch.zeros(()))
    structures = {plain, *(artifact.fingerprint(m)["structure"] for m in (renamed, reshaped, extended))}
    assert len(structures) == 4


def test_another_precision_counts_as_other_weights() -> None:
    single, double = artifact.fingerprint(TinyNet()), artifact.fingerprint(TinyNet().double())
    assert single["structure"] == double["structure"]
    assert single["weights"] != double["weights"]


class _Twice(nn.Module):
    """A network with a part that really is called `module`, holding names that occur outside it too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.module = nn.ModuleDict({"layer": nn.Linear(2, 2)})


def test_parts_of_equal_name_after_dropping_prefixes_all_count() -> None:
    model = _Twice()
    seen = {artifact.fingerprint(model)["weights"]}
    for part in (model.layer, model.module["layer"]):
        with torch.no_grad():
            part.bias.add_(1)
        seen.add(artifact.fingerprint(model)["weights"])
    assert len(seen) == 3


class _Odd(nn.Module):
    """Tensors of every unusual kind, and extra state that is not a tensor."""

    def __init__(self, last: int = 3) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("number", torch.tensor(last))
        self.register_buffer("truth", torch.tensor([True, False]))
        self.register_buffer("waves", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("brief", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("turned", torch.arange(6).reshape(2, 3).t())

    def get_extra_state(self) -> dict[str, object]:
        return {"not": object()}

    def set_extra_state(self, state: object) -> None:
        pass


def test_unusual_tensors_have_a_fingerprint_too() -> None:
    assert artifact.fingerprint(_Odd()) == artifact.fingerprint(_Odd())
    assert artifact.fingerprint(_Odd(3))["weights"] != artifact.fingerprint(_Odd(4))["weights"]


# --- files that must be refused ----------------------------------------------------------------------


def test_another_network_is_refused_even_if_other_weights_are_accepted(good: bytes, folder: Path) -> None:
    path, wider = damaged(folder, good), TinyNet()
    wider.hidden, wider.classify = nn.Linear(20, 7), nn.Linear(7, 3)
    for accept in (False, True):
        with pytest.raises(ArtifactError, match=r"another network.*380 parameters then, 404 now") as caught:
            gramwatch.load(path, wider, accept_other_weights=accept)
        assert str(path) in str(caught.value)


def test_other_weights_are_refused_unless_accepted(detector: GramDetector, good: bytes, folder: Path) -> None:
    path, model = damaged(folder, good), TinyNet()
    with torch.no_grad():
        model.conv1.bias[0] += 0.25
    with pytest.raises(ArtifactError, match=r"other weights.*accept_other_weights=True") as caught:
        gramwatch.load(path, model)
    assert str(path) in str(caught.value)
    loaded = gramwatch.load(path, model, accept_other_weights=True)
    assert loaded.threshold_ == detector.threshold_
    assert not loaded(FRESH).score.equal(detector(FRESH).score)


def test_a_newer_format_is_refused_and_says_to_upgrade(good: bytes, folder: Path) -> None:
    def newer(header: dict[str, Any]) -> None:
        # The rest may then look quite different.
        header.update(format=2, library="9.8.7", taps=None, settings=7, checksum="another kind")

    path = damaged(folder, rewritten(good, newer, sealed=False))
    with pytest.raises(ArtifactError, match=r"format 2.*9\.8\.7.*upgrade") as caught:
        gramwatch.load(path, TinyNet())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", ["1", None, 1.5, [1], {}], ids=str)
def test_a_format_that_is_no_number_is_corrupt(value: object, good: bytes, folder: Path) -> None:
    path = damaged(folder, rewritten(good, lambda header: header.update(format=value)))
    with pytest.raises(ArtifactError, match="corrupt"):
        gramwatch.load(path, TinyNet())


def test_an_unknown_kind_of_detector_is_refused(good: bytes, folder: Path) -> None:
    path = damaged(folder, rewritten(good, lambda header: header.update(detector="FutureDetector")))
    with pytest.raises(ArtifactError, match="FutureDetector"):
        gramwatch.load(path, TinyNet())


def test_a_file_cut_anywhere_is_refused_as_truncated(good: bytes, folder: Path) -> None:
    (length,) = struct.unpack("<Q", good[:8])
    in_the_length = list(range(8))
    in_the_header = [8, 9, 8 + length // 2, 8 + length - 1]
    in_the_data = [8 + length, 8 + length + 1, (8 + length + len(good)) // 2, len(good) - 1]
    for cut in in_the_length + in_the_header + in_the_data:
        path = damaged(folder, good[:cut])
        with pytest.raises(ArtifactError, match="truncated") as caught:
            gramwatch.load(path, TinyNet())
        assert str(path) in str(caught.value), cut


def test_bytes_added_to_a_file_are_noticed(good: bytes, folder: Path) -> None:
    for more in (b"\0", good):
        with pytest.raises(ArtifactError, match="corrupt"):
            gramwatch.load(damaged(folder, good + more), TinyNet())


def test_every_flipped_bit_in_one_of_many_places_of_the_tensors_is_noticed(good: bytes, folder: Path) -> None:
    (length,) = struct.unpack("<Q", good[:8])
    places = range(8 + length, len(good), 97)
    assert len(places) > 20
    for number, place in enumerate(places):
        content = bytearray(good)
        content[place] ^= 1 << number % 8
        with pytest.raises(ArtifactError, match="corrupt: its tensors do not match"):
            gramwatch.load(damaged(folder, bytes(content)), TinyNet())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'\\"level\\": 0.95', b'\\"level\\": 0.85'),
        (b'\\"orders\\": [1, 2, 3]', b'\\"orders\\": [1, 2, 5]'),
        (b'\\"seed\\": 3', b'\\"seed\\": 7'),
        (b'\\"channel_axis\\": 1', b'\\"channel_axis\\": 2'),
        (b'\\"call\\": 1', b'\\"call\\": 0'),
        (b"gr\\\\u00f6\\\\u00dfer", b"gr\\\\u00f7\\\\u00dfer"),
        (b"leaky_relu", b"leaky_relV"),
    ],
    ids=str,
)
def test_one_changed_character_of_the_header_is_noticed(
    old: bytes, new: bytes, good: bytes, folder: Path
) -> None:
    assert old in good
    path = damaged(folder, good.replace(old, new, 1))
    with pytest.raises(ArtifactError, match="corrupt: its header does not match"):
        gramwatch.load(path, TinyNet())


def test_a_damaged_fingerprint_is_not_taken_for_another_network(good: bytes, folder: Path) -> None:
    def damage(header: dict[str, Any]) -> None:
        header["network"]["structure"] = "0" + header["network"]["structure"][1:]

    with pytest.raises(ArtifactError, match="corrupt"):
        gramwatch.load(damaged(folder, rewritten(good, damage, sealed=False)), TinyNet())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"a text file of some length, which is not a detector at all\n" * 9,
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        b"PK\x03\x04" + bytes(range(256)),
        bytes(64),
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 200_000) + b"[" * 200_000,
        struct.pack("<Q", 2**63) + b"{}",
        joined({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, "8"]}}, bytes(8)),
        joined({"a": {"dtype": "F32", "shape": [2], "data_offsets": []}}, bytes(8)),
        joined({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4e300]}}, bytes(8)),
        joined({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
        joined({"a": 3}, bytes(8)),
        joined({"__metadata__": {"gramwatch": 3}}, b""),
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_file_that_is_not_safetensors_is_refused(content: bytes, folder: Path) -> None:
    path = damaged(folder, content)
    with pytest.raises(ArtifactError, match=r"not a safetensors file|truncated|corrupt") as caught:
        gramwatch.load(path, TinyNet())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}], ids=str)
def test_a_safetensors_file_of_someone_else_is_refused(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(TinyNet().state_dict(), path, metadata=metadata)
    with pytest.raises(ArtifactError, match="not one that gramwatch wrote"):
        gramwatch.load(path, TinyNet())


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', "{}", '{"format": 1}', "[" * 100_000])
def test_a_gramwatch_header_that_makes_no_sense_is_corrupt(text: str, tmp_path: Path) -> None:
    path = tmp_path / "strange.safetensors"
    save_file({"class_counts": torch.ones(3)}, path, metadata={"gramwatch": text})
    with pytest.raises(ArtifactError, match="corrupt"):
        gramwatch.load(path, TinyNet())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.safetensors", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no file") as caught:
            gramwatch.load(path, TinyNet())
        assert str(path) in str(caught.value)


# --- sizes that do not match -------------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """Notes the largest tensor with memory that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self.numbers = max(self.numbers, tensor.numel())
        return result


def _put(*path: str | int) -> Callable[[dict[str, Any], Any], None]:
    def put(header: Any, value: Any) -> None:
        for step in path[:-1]:
            header = header[step]
        header[path[-1]] = value

    return put


CHANNELS, VECTOR = (_put("taps", "watched", i, "shape", 1) for i in (2, 5))
CLASSES, EXAMPLES = _put("classes"), _put("calibration", "examples")


@pytest.mark.parametrize(
    ("put", "values", "tensor"),
    [
        (CHANNELS, [4, 6, 50, 10**9, 10**15], "bounds."),
        (VECTOR, [5, 7, 10**4, 10**8], "bounds."),
        (CLASSES, [2, 4, 1000, 10**9], "bounds."),
        (EXAMPLES, [0, 88, 91, 10**9, 10**18], "calibration.scores"),
        (_put("calibration", "split"), [False], "calibration.scores"),
        (_put("settings", "orders"), [[1], [1, 2, 3, 4], list(range(1, 101))], "bounds."),
        (_put("settings", "bounds"), ["mean_variance"], "bounds."),
        (_put("settings", "statistic"), ["triangle", "diagonal"], "bounds."),
        (_put("settings", "storage"), ["float16"], "bounds.exponent"),
        (_put("calibration"), [None], "calibration.expectation"),
    ],
    ids="channels vector classes examples split orders bounds statistic storage calibration".split(),
)
def test_a_size_that_does_not_match_the_file_is_refused_before_memory_is_taken(
    put: Callable[[dict[str, Any], Any], None], values: list[Any], tensor: str, good: bytes, folder: Path
) -> None:
    for value in values:
        path = damaged(folder, rewritten(good, lambda header, value=value: put(header, value)))
        with _Largest() as largest, pytest.raises(ArtifactError) as caught:
            gramwatch.load(path, TinyNet())
        assert str(path) in str(caught.value)
        assert f"the tensor '{tensor}" in str(caught.value), value
        assert largest.numbers < 10_000, value  # bytes of the network's weights, for the fingerprint


@pytest.mark.parametrize(
    ("put", "value"),
    [
        (CHANNELS, 0),
        (CHANNELS, -5),
        (CHANNELS, 10**30),
        (CHANNELS, math.inf),
        (CHANNELS, math.nan),
        (CHANNELS, "many"),
        (VECTOR, 10**10),
        (CLASSES, -1),
        (CLASSES, 10**19),
        (CLASSES, math.inf),
        (CLASSES, None),
        (EXAMPLES, math.nan),
        (EXAMPLES, None),
        (_put("settings", "orders"), [0]),
        (_put("settings", "orders"), [10**7]),
        (_put("settings", "level"), 1.5),
        (_put("settings", "bounds"), "none"),
        (_put("settings", "storage"), "float8"),
        (_put("settings"), {"colour": "red"}),
        (_put("taps", "watched", 0, "channel_axis"), 4),
        (_put("taps", "watched", 0, "channel_axis"), 0),
        (_put("taps", "watched", 0, "batch_axis"), -1),
        (_put("taps", "watched", 0, "shape"), []),
        (_put("taps", "watched", 0), {}),
        (_put("taps"), None),
        (_put("network"), None),
        (_put("network"), {"structure": 1}),
        (_put("inputs"), [3]),
        (_put("metadata"), 3),
        (_put("calibration", "maximum"), None),
    ],
)
def test_impossible_values_in_the_header_are_refused_before_memory_is_taken(
    put: Callable[[dict[str, Any], Any], None], value: Any, good: bytes, folder: Path
) -> None:
    path = damaged(folder, rewritten(good, lambda header: put(header, value)))
    with _Largest() as largest, pytest.raises(ArtifactError) as caught:
        gramwatch.load(path, TinyNet())
    assert str(path) in str(caught.value)
    assert largest.numbers < 10_000


@pytest.mark.parametrize("name", ["class_counts", "bounds.maximum", "calibration.expectation"])
def test_a_missing_tensor_is_named(name: str, good: bytes, tmp_path: Path) -> None:
    path = damaged(tmp_path, good)
    tensors = {n: t.clone() for n, t in load_file(path).items() if n != name}
    save_file(tensors, path, metadata=parts(good)[0]["__metadata__"])
    with pytest.raises(ArtifactError, match=f"'{name}' is missing"):
        gramwatch.load(path, TinyNet())


def test_a_tensor_too_many_is_named(good: bytes, tmp_path: Path) -> None:
    path = damaged(tmp_path, good)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({**tensors, "stowaway": torch.ones(2)}, path, metadata=parts(good)[0]["__metadata__"])
    with pytest.raises(ArtifactError, match="'stowaway' does not belong there"):
        gramwatch.load(path, TinyNet())


def test_tensors_of_another_type_are_noticed(good: bytes, tmp_path: Path) -> None:
    path = damaged(tmp_path, good)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["bounds.minimum"] = tensors["bounds.minimum"].double()
    save_file(tensors, path, metadata=parts(good)[0]["__metadata__"])
    with pytest.raises(ArtifactError, match="corrupt"):
        gramwatch.load(path, TinyNet())


def test_a_huge_tensor_claimed_by_the_file_itself_is_refused_before_memory_is_taken(
    good: bytes, folder: Path
) -> None:
    layout, data = parts(good)
    layout["class_counts"].update(shape=[10**12], data_offsets=[0, 8 * 10**12])
    path = damaged(folder, joined(layout, data))
    with _Largest() as largest, pytest.raises(ArtifactError, match="truncated"):
        gramwatch.load(path, TinyNet())
    assert largest.numbers < 10_000


# --- any damage --------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_one_changed_byte_is_refused_or_changes_nothing(
    data: st.DataObject, detector: GramDetector, good: bytes, folder: Path
) -> None:
    (length,) = struct.unpack("<Q", good[:8])
    # As often in the length and the header as in the data.
    place = data.draw(st.one_of(st.integers(0, 8 + length - 1), st.integers(0, len(good) - 1)))
    content = bytearray(good)
    content[place] ^= data.draw(st.integers(1, 255))
    try:
        loaded = gramwatch.load(damaged(folder, bytes(content)), TinyNet())
    except ArtifactError:
        return
    assert_same(loaded, detector)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_cut_and_any_garbage_is_refused(data: st.DataObject, good: bytes, folder: Path) -> None:
    cut = data.draw(st.integers(0, len(good) - 1))
    garbage = data.draw(st.binary(max_size=40))
    if good.startswith(good[:cut] + garbage) and cut + len(garbage) == len(good):
        garbage = b""
    with pytest.raises(ArtifactError):
        gramwatch.load(damaged(folder, good[:cut] + garbage), TinyNet())


# --- forged files, with checksums that fit -----------------------------------------------------------


def forged(content: bytes, name: str, change: Callable[[Tensor], Tensor], folder: Path) -> Path:
    """The file with one tensor changed and all checksums made to fit, as a forger would."""
    tensors = {key: tensor.clone() for key, tensor in load(content).items()}
    tensors[name] = change(tensors[name]).contiguous()
    header = {key: value for key, value in header_of(content).items() if key != "tensors"}
    header.pop("checksum")
    path = folder / "forged.safetensors"
    artifact.write(path, header, tensors)
    return path


def put(value: float) -> Callable[[Tensor], Tensor]:
    """The first number replaced."""

    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("choices", "name", "change", "says"),
    [
        ({}, "class_counts", put(-1), "from 0 to"),
        ({}, "class_counts", torch.zeros_like, "it has seen no example"),
        ({}, "class_counts", Tensor.double, "is torch.float64, not torch.int64"),
        ({}, "bounds.minimum", put(math.nan), "must be numbers"),
        ({}, "bounds.minimum", put(1e30), "exceeds the largest"),
        ({}, "bounds.maximum", put(math.inf), "exceeds the largest, or one of them is infinite"),
        ({}, "bounds.maximum", Tensor.half, "is torch.float16, not torch.float32"),
        ({}, "calibration.scores", put(math.nan), "must be finite and ascending"),
        ({}, "calibration.scores", put(1e30), "must be finite and ascending"),
        ({}, "calibration.expectation", put(-1), "must be finite and not negative"),
        ({}, "calibration.expectation", put(math.inf), "must be finite and not negative"),
        ({"storage": "float16"}, "bounds.exponent", put(-128), "must be from -125 to 113"),
        ({"bounds": "mean_variance"}, "bounds.count", put(-2), "must be finite and not negative"),
        ({"bounds": "mean_variance"}, "bounds.mean", put(math.inf), "must be finite"),
        ({"bounds": "mean_variance"}, "bounds.squares", put(-1e-9), "must be finite and not negative"),
    ],
)
def test_forged_numbers_are_refused_by_name(
    choices: dict[str, Any], name: str, change: Callable[[Tensor], Tensor], says: str, tmp_path: Path
) -> None:
    fitted(**choices).save(tmp_path / "good.safetensors")
    path = forged((tmp_path / "good.safetensors").read_bytes(), name, change, tmp_path)
    with pytest.raises(ArtifactError, match=re.escape(says)) as caught:
        gramwatch.load(path, TinyNet())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("put", "value"),
    [
        (_put("detector"), []),
        (_put("detector"), {"a": 1}),
        (_put("detector"), None),
        (_put("settings", "normalise"), "yes"),
        (_put("settings", "level"), True),
        (_put("settings", "orders"), [1.0]),
        (_put("settings", "orders"), list(range(1, 2000))),
        (_put("settings", "taps"), [3]),
        (_put("calibration", "examples"), 90.0),
        (_put("calibration", "split"), 1),
        (_put("taps", "watched", 0, "call"), 99),
        (_put("taps", "watched", 0, "name"), 5),
        (_put("taps", "calls"), "conv"),
        (_put("taps", "watched"), []),
        (_put("inputs"), [[[1], 3]]),
        (_put("metadata"), [["a", 1]]),
    ],
)
def test_forged_values_of_another_type_are_refused(
    put: Callable[[dict[str, Any], Any], None], value: Any, good: bytes, folder: Path
) -> None:
    path = damaged(folder, rewritten(good, lambda header: put(header, value)))
    with pytest.raises(ArtifactError) as caught:
        gramwatch.load(path, TinyNet())
    assert str(path) in str(caught.value)


def test_a_forged_guard_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "guard.safetensors", TinyNet()
    guard = gramwatch.Guard(model, orders=[1]).fit([TRAIN], progress=False)
    guard.calibrate([CALIBRATION], progress=False).save(path)
    content = path.read_bytes()
    for name, value, says in [
        ("calibration.tail", 0.0, "must be positive"),
        ("calibration.tail", math.nan, "must be positive"),
        ("calibration.median", math.nan, "must be finite"),
        ("calibration.scores", math.inf, "must be finite"),
        ("calibration.predicted", 3, "must be from 0 to 2"),
        ("calibration.expectation.gram", -1.0, "must be finite and not negative"),
        ("members.class_ratio.state.ranks_", 10**6, "has .* numbers, not"),
    ]:
        with pytest.raises(ArtifactError, match=says):
            gramwatch.load(forged(content, name, put(value), tmp_path), model)
    for put_there, value in [
        (_put("calibration", "classes"), 10**12),
        (_put("settings", "members"), ["energy"]),
        (_put("settings", "per_class"), 1),
        (_put("members", "gram", "detector"), []),
        (_put("members"), []),
    ]:
        forgery = rewritten(content, lambda header, put=put_there, value=value: put(header, value))
        with pytest.raises(ArtifactError):
            gramwatch.load(damaged(tmp_path, forgery), model)


def test_a_file_of_another_kind_is_refused_by_its_name(good: bytes, folder: Path) -> None:
    saved = artifact.read(damaged(folder, good))
    with pytest.raises(ArtifactError, match="holds a 'GramDetector', not a 'Guard'"):
        gramwatch.Guard.from_artifact(saved, TinyNet())


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 6 * 2**30))
        file.truncate(8 + 6 * 2**30)
    with pytest.raises(ArtifactError, match="at most 100,000,000 are read"):
        gramwatch.load(path, TinyNet())


def test_lists_that_would_take_hours_or_gigabytes_are_refused(good: bytes, folder: Path) -> None:
    layout, data = parts(good)
    layout["bounds.minimum"]["shape"] = [2**62] * 300_000
    with pytest.raises(ArtifactError, match="300,000 axes"):
        gramwatch.load(damaged(folder, joined(layout, data)), TinyNet())

    def many(header: dict[str, Any]) -> None:
        header["settings"]["orders"] = list(range(1, 101))
        header["taps"]["watched"] = header["taps"]["watched"] * 2000

    with pytest.raises(ArtifactError, match="12,000 taps are too many"):
        gramwatch.load(damaged(folder, rewritten(good, many)), TinyNet())


def test_tensors_that_overlap_or_leave_gaps_are_refused(good: bytes, folder: Path) -> None:
    layout, data = parts(good)
    layout["bounds.minimum"]["data_offsets"] = layout["bounds.maximum"]["data_offsets"]
    with pytest.raises(ArtifactError, match="do not lie side by side"):
        gramwatch.load(damaged(folder, joined(layout, data)), TinyNet())


# --- beside another process --------------------------------------------------------------------------


def test_what_is_loaded_beside_a_process_that_saves_is_whole(tmp_path: Path) -> None:
    path, models = tmp_path / "detector.safetensors", [TinyNet(), TinyNet()]
    both = [fitted(models[0], level=0.95), fitted(models[1], level=0.9, orders=[1, 2])]
    both[0].save(path)
    stop = threading.Event()

    def save() -> None:
        while not stop.is_set():
            for detector in both:
                detector.save(path)

    writer = threading.Thread(target=save)
    writer.start()
    try:
        loaded = [gramwatch.load(path, TinyNet()) for _ in range(400)]
    finally:
        stop.set()
        writer.join()
    assert {copy_of.level for copy_of in loaded} == {0.9, 0.95}
    scores = {detector.level: detector.calibration_scores_ for detector in both}
    orders = {detector.level: detector.orders for detector in both}
    assert all(copy_of.calibration_scores_.equal(scores[copy_of.level]) for copy_of in loaded)
    assert all(copy_of.orders == orders[copy_of.level] for copy_of in loaded)


# --- places that cannot be written -------------------------------------------------------------------


def test_saving_into_a_missing_directory_names_the_path(detector: GramDetector, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "detector.safetensors"
    with pytest.raises(OSError, match="cannot write") as caught:
        detector.save(path)
    assert str(path) in str(caught.value)
    assert names_in(tmp_path) == []


def test_saving_below_a_file_or_over_a_directory_names_the_path(
    detector: GramDetector, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "directory").mkdir()
    for path in (tmp_path / "file" / "detector.safetensors", tmp_path / "directory", tmp_path):
        with pytest.raises(OSError, match="cannot write") as caught:
            detector.save(path)
        assert str(path) in str(caught.value)
    assert names_in(tmp_path) == ["directory", "file"]
    assert (tmp_path / "file").read_text() == "mine"
    assert names_in(tmp_path / "directory") == []


class _Halfway:
    """A `save_file` that fails when half of the file is written."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.written: list[Path] = []

    def __call__(self, tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        save_file(tensors, path, metadata=metadata)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        self.written.append(path)
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        PermissionError(13, "Permission denied"),
        SafetensorError("I/O error: Input/output error"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("before", [True, False], ids=["over an old file", "afresh"])
def test_a_write_that_fails_halfway_leaves_the_old_file_whole(
    before: bool,
    error: Exception,
    detector: GramDetector,
    good: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "detector.safetensors"
    if before:
        path.write_bytes(good)
    failing = _Halfway(error)
    monkeypatch.setattr(artifact, "save_file", failing)
    with pytest.raises(OSError, match="cannot write") as caught:
        detector.save(path)
    assert str(path) in str(caught.value)
    assert str(error) in str(caught.value)
    assert len(failing.written) == 1
    assert names_in(tmp_path) == (["detector.safetensors"] if before else [])
    if before:
        assert path.read_bytes() == good


def test_an_interrupted_write_leaves_the_old_file_whole(
    detector: GramDetector, good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(tmp_path, good)
    monkeypatch.setattr(artifact, "save_file", _Halfway(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        detector.save(path)
    assert names_in(tmp_path) == [path.name]
    assert path.read_bytes() == good


def test_a_file_that_cannot_be_put_in_place_leaves_the_old_one_whole(
    detector: GramDetector, good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(tmp_path, good)

    def replace(self: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="cannot write") as caught:
        detector.save(path)
    assert str(path) in str(caught.value)
    assert names_in(tmp_path) == [path.name]
    assert path.read_bytes() == good


def test_saving_over_a_file_replaces_it_whole(good: bytes, tmp_path: Path) -> None:
    path = damaged(tmp_path, good)
    other = fitted(level=0.9)
    other.save(path)
    assert gramwatch.load(path, TinyNet()).level == 0.9
    assert names_in(tmp_path) == [path.name]


def test_a_new_file_can_be_read_by_those_who_can_read_other_new_files(
    detector: GramDetector, tmp_path: Path
) -> None:
    (tmp_path / "other").touch()
    detector.save(tmp_path / "detector.safetensors")
    assert (tmp_path / "detector.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_old_file_keeps_its_permissions(detector: GramDetector, good: bytes, tmp_path: Path) -> None:
    path = damaged(tmp_path, good)
    path.chmod(0o640)
    detector.save(path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_and_its_folder_are_on_the_disk_before_and_after_it_is_put_in_place(
    detector: GramDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    replace = Path.replace

    def noting(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def placing(self: Path, target: Path) -> Path:
        done.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "replace", placing)
    detector.save(tmp_path / "detector.safetensors")
    assert done == ["file", "replace", "folder"]


def test_what_killed_writers_left_is_removed_and_nothing_else(detector: GramDetector, tmp_path: Path) -> None:
    target = tmp_path / "detector.safetensors"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mine = writing._beside(target)
    dead = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{gone.pid}-"))
    machine = writing._short_hash(platform.node())
    elsewhere = dead.with_name(dead.name.replace(machine, "0" * len(machine)))
    old = writing._beside(target)
    others = writing._beside(tmp_path / "other.safetensors")
    others = others.with_name(others.name.replace(f"-{os.getpid()}-", f"-{gone.pid}-"))
    mine_of_before = tmp_path / ".gramwatch-notes"
    dead_folder = dead.with_name(f"{dead.name}0")
    dead_folder.mkdir()
    for path in (mine, dead, elsewhere, old, others, mine_of_before, dead_folder / "file"):
        path.write_bytes(b"half of a file")
    os.utime(old, (0, 0))
    detector.save(target)
    kept = [mine, elsewhere, others, mine_of_before, target]
    assert names_in(tmp_path) == sorted(path.name for path in kept)


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_temporary_files_of_safetensors_do_not_outlive_a_killed_writer(
    detector: GramDetector, good: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors 0.8 writes to a file `.tmp...` beside the one that it was given, and renames it."""
    path = damaged(tmp_path, good)

    def killed_while_writing(_: object, beside: Path, metadata: dict[str, str]) -> None:
        (beside.parent / ".tmpAbCdEf").write_bytes(b"half of a file")
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(artifact, "save_file", killed_while_writing)
        child = multiprocessing.get_context("fork").Process(target=detector.save, args=(path,))
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(names_in(tmp_path)) == 2
    assert path.read_bytes() == good
    detector.save(path)
    assert names_in(tmp_path) == [path.name]


def test_a_link_stays_and_what_it_points_to_is_replaced(detector: GramDetector, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "detector.safetensors", tmp_path / "link.safetensors"
    link.symlink_to(target)
    for _ in range(2):  # once where nothing is there yet
        detector.save(link)
        assert link.is_symlink()
        assert not target.is_symlink()
        assert_same(gramwatch.load(target, TinyNet()), detector)
    assert names_in(tmp_path / "real") == ["detector.safetensors"]


def test_a_place_that_cannot_be_written_is_told_before_any_work(
    detector: GramDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = gramwatch.Guard(TinyNet(), orders=[1]).fit([TRAIN], progress=False)
    rival = gramwatch.methods.METHODS["energy"](TinyNet())
    monkeypatch.setattr(artifact, "fingerprint", lambda model: pytest.fail("work was begun"))
    for path in (tmp_path / "missing" / "d.safetensors", Path("/proc/d.safetensors"), tmp_path):
        with pytest.raises(OSError, match="cannot write") as caught:
            writing.check_writable(path)
        assert str(path) in str(caught.value)
        for subject in (detector, guard, rival):
            with pytest.raises(OSError, match="cannot write"):
                subject.save(path)
    assert names_in(tmp_path) == []
    writing.check_writable(tmp_path / "new.safetensors")
    assert names_in(tmp_path) == []


def test_a_detector_that_is_not_fitted_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(NotFittedError):
        GramDetector(TinyNet()).save(tmp_path / "detector.safetensors")
    assert names_in(tmp_path) == []


def _endless() -> dict[str, Any]:
    nest: dict[str, Any] = {}
    nest["again"] = nest
    return nest


def _deep() -> dict[str, Any]:
    nest: list[Any] = []
    for _ in range(100_000):
        nest = [nest]
    return {"deep": nest}


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": object()},
        {"a": {1, 2}},
        {"a": torch.ones(2)},
        {"a": b"bytes"},
        {"a": math.nan},
        {"a": [math.inf]},
        {(1, 2): "a"},
        _endless(),
        _deep(),
        ["a", "list"],
        "text",
        None,
    ],
    ids="object set tensor bytes nan infinity key endless deep list text none".split(),
)
def test_metadata_that_is_not_json_is_refused_with_a_clear_error(
    metadata: Any, good: bytes, tmp_path: Path
) -> None:
    path = damaged(tmp_path, good)
    loaded = gramwatch.load(path, TinyNet())
    loaded.metadata = metadata
    with pytest.raises(ArtifactError, match=r"metadata must be (plain JSON values|a dictionary)"):
        loaded.save(path)
    assert names_in(tmp_path) == [path.name]
    assert path.read_bytes() == good


# --- the file of format 1, kept for ever -------------------------------------------------------------


def test_the_file_of_format_1_is_still_read() -> None:
    path = DATA / "detector_v1.safetensors"
    noted = json.loads((DATA / "detector_v1.json").read_text(encoding="utf-8"))
    assert path.stat().st_size < 30_000
    assert header_of(path.read_bytes())["format"] == 1
    loaded = gramwatch.load(path, TinyNet())
    assert repr(loaded) == noted["repr"]
    assert loaded.taps.names == noted["taps"]
    assert loaded.class_counts_.tolist() == noted["class_counts"]
    assert loaded.threshold_ == noted["threshold"]
    assert loaded.metadata == MADE["METADATA"]
    assert loaded.level == 0.95
    assert loaded.orders == (1, 2, 3)
    assert loaded.storage == "float32"
    detection = loaded(FRESH)
    assert detection.predicted.tolist() == noted["predicted"]
    assert detection.score.tolist() == pytest.approx(noted["score"], rel=1e-4)
    assert detection.p_value.tolist() == noted["p_value"]
    assert detection.is_ood.tolist() == noted["is_ood"]
    assert detection.class_support.tolist() == noted["class_support"]


def test_the_file_of_format_1_can_be_fitted_and_saved_further(tmp_path: Path) -> None:
    loaded = gramwatch.load(DATA / "detector_v1.safetensors", TinyNet())
    loaded.fit([inputs(60, salt=77)], progress=False)
    loaded.calibrate([CALIBRATION], progress=False)
    loaded.save(tmp_path / "detector.safetensors")
    assert_same(gramwatch.load(tmp_path / "detector.safetensors", TinyNet()), loaded)


def test_what_a_file_must_hold_is_known_for_every_kind_of_bounds() -> None:
    for kind in BOUNDS.values():
        assert tuple(kind(2, (1, 3), "meta").state()) == kind.state_names


@pytest.mark.parametrize("size", ["classes", "examples", "taps", "width"])
def test_a_tensor_of_nothing_is_refused(size: str) -> None:
    declared = {"state.centres_": artifact.Field((size, "more"), torch.float64, artifact.FINITE)}
    given = {"state.centres_": artifact.Field((0, 4), torch.float64, artifact.FINITE)}
    with pytest.raises(ValueError, match=f"'state.centres_' is of no {size}"):
        artifact.resolved(declared, given)


# --- headers that are made to harm -------------------------------------------------------------------


def of_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b'{"__metadata__":{"a":"1","a":"2"}}', "the name 'a' twice"),
        (b'\xef\xbb\xbf{"__metadata__":{"a":"1"}}', "BOM"),
        ('{"__metadata__":{"a":"1"}}'.encode("utf-16"), "decode"),
        ('{"__metadata__":{"a":"1"}}'.encode("utf-16-le"), "corrupt"),
        ('{"__metadata__":{"a":"1"}}'.encode("utf-32"), "corrupt"),
    ],
)
def test_a_header_that_readers_understand_in_two_ways_is_refused(
    header: bytes, reason: str, tmp_path: Path
) -> None:
    path = damaged(tmp_path, of_header(header))
    with pytest.raises(ArtifactError, match=reason):
        artifact.File(path)


def test_a_name_that_comes_twice_in_the_inner_header_is_refused(good: bytes, tmp_path: Path) -> None:
    layout, data = parts(good)
    text = layout["__metadata__"]["gramwatch"]
    layout["__metadata__"]["gramwatch"] = text.replace('"format": 1', '"format": 1, "format": 1')
    with pytest.raises(ArtifactError, match="the name 'format' twice"):
        artifact.read(damaged(tmp_path, joined(layout, data)))


def test_a_header_takes_little_more_memory_than_its_size(tmp_path: Path) -> None:
    many = b'{"__metadata__":[' + b"[]," * 3_000_000 + b"[]]}"
    most = b'{"a":[' + b"[]," * 490_000 + b"[]]" + b" " * 20_000_000 + b"}"
    for header, limit in ((many, 2 * len(many)), (most, 200 * 2**20)):
        path = damaged(tmp_path, of_header(header))
        tracemalloc.start()
        with pytest.raises(ArtifactError, match="corrupt"):
            artifact.File(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < limit


def test_metadata_that_could_not_be_read_back_are_not_written(tmp_path: Path) -> None:
    detector = fitted()
    detector.metadata = {"numbers": list(range(artifact.MOST_VALUES))}
    with pytest.raises(ArtifactError, match="over 1,000,000 values"):
        detector.save(tmp_path / "detector.safetensors")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "adapters",
    [{"model": "x"}, {"inputs": 3}, {"logits": [1]}, {"logits": "__class__"}, {"mask": True}, ["inputs"]],
)
def test_forged_adapters_are_refused(adapters: Any, good: bytes, tmp_path: Path) -> None:
    layout, data = parts(good)
    header = json.loads(layout["__metadata__"]["gramwatch"])
    header.pop("checksum")
    header["adapters"] = adapters
    header["checksum"] = artifact._header_checksum(header)
    layout["__metadata__"]["gramwatch"] = json.dumps(header)
    with pytest.raises(ArtifactError, match=r"corrupt.*(adapters are|cannot be)"):
        gramwatch.load(damaged(tmp_path, joined(layout, data)), TinyNet())
