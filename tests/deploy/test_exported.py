"""A guard in an ONNX file, run by ONNX Runtime."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from gramwatch import ArtifactError, GramwatchWarning, Guard, InputError, MissingExtraError, Monitor
from gramwatch.deploy.export import KEY
from gramwatch.deploy.exported import ExportedGuard
from gramwatch.inputs.preprocessing import Preprocessing
from tests.guarded import images, made

PREPARE = Preprocessing((7, 7), 7, "bilinear", (0.5,), (0.25,))
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def guard() -> Guard:
    """It ranks in groups of classes."""
    guard = Guard(made(), members=("gram", "energy"), per_class=True)
    guard.fit(images(400, 1).split(100), progress=False).calibrate(images(2000, 2).split(500), progress=False)
    assert len(guard.groups_) > 1
    guard.metadata |= {"classes": list("abcd"), "preprocessing": PREPARE.to_json()}
    return guard


@pytest.fixture(scope="module")
def path(guard, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "guard.onnx"
    guard.export(path, images(2, 3))
    return path


@pytest.fixture(scope="module")
def exported(path) -> ExportedGuard:
    return ExportedGuard(path, "cpu")


def changed(path, folder, change):
    """A copy of the file whose facts are changed. None: it has none."""
    model = onnx.load(path)
    (entry,) = model.metadata_props
    facts = change(json.loads(entry.value))
    del model.metadata_props[:]
    if facts is not None:
        model.metadata_props.add(key=KEY, value=json.dumps(facts))
    onnx.save(model, folder / "changed.onnx")
    return folder / "changed.onnx"


def test_it_judges_as_the_guard_does(guard, exported):
    x = torch.cat([images(30, 4), images(30, 5, 2.0)])
    actual, want = exported(x), guard(x)
    assert 0 < int(want.is_ood.sum()) < 60
    torch.testing.assert_close(actual.score, want.score, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.logits, want.logits, rtol=1e-4, atol=1e-4)
    assert actual.predicted.tolist() == want.predicted.tolist()
    assert actual.parts.keys() == want.parts.keys()
    assert (actual.is_ood == want.is_ood).double().mean() > 0.95
    assert exported.level == guard.level
    assert exported.classes == ("a", "b", "c", "d")
    assert exported.preprocessing == PREPARE
    assert not exported.takes_pixels


def test_pixels_are_normalised_in_the_graph(guard, tmp_path):
    guard.export(tmp_path / "guard.onnx", images(2, 3), preprocessing=True)
    exported = ExportedGuard(tmp_path / "guard.onnx", "cpu")
    exported.check(PREPARE)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (9, 7, 7, 1), dtype=np.uint8))
    want = guard((pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25)
    assert exported.takes_pixels
    torch.testing.assert_close(exported(pixels).score, want.score, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reference", ["online", "fixed"])
def test_a_monitor_of_it_is_that_of_the_guard_and_takes_over_its_state(guard, exported, reference, tmp_path):
    ordinary, unusual = images(200, 6), images(60, 7, 1.6)
    mine, own = (Monitor(judge, reference=reference) for judge in (exported, guard))
    for monitor, judge in ((mine, exported), (own, guard)):
        monitor.update(judge(ordinary))
    assert not own.alarm
    assert mine.strength == pytest.approx(own.strength, rel=0.05)
    own.save(tmp_path / "state")
    going_on = Monitor.load(tmp_path / "state", exported)
    assert going_on.seen == 200
    assert going_on.strength == own.strength
    for monitor, judge in ((going_on, exported), (own, guard)):
        assert monitor.update(judge(unusual))
    assert abs(going_on.alarm_at - own.alarm_at) <= 2


def test_a_monitor_without_groups_and_one_of_an_older_file(guard, path, tmp_path):
    whole = Guard(made(), members=("energy",))
    whole.fit(images(100, 1).split(100), progress=False).calibrate([images(200, 2)], progress=False)
    whole.export(tmp_path / "guard.onnx", images(2, 3))
    exported = ExportedGuard(tmp_path / "guard.onnx")
    assert exported.preprocessing is None
    assert exported.classes == ()
    assert Monitor(exported)._checksum == Monitor(whole)._checksum
    without = changed(path, tmp_path, lambda facts: {k: v for k, v in facts.items() if k != "calibration"})
    with pytest.raises(ArtifactError, match=r"does not hold the calibration scores.*Export the guard again"):
        Monitor(ExportedGuard(without))


def test_a_file_that_holds_no_guard_is_refused_in_words(path, tmp_path):
    with pytest.raises(ArtifactError, match=r"there is no file .*missing\.onnx"):
        ExportedGuard(tmp_path / "missing.onnx")
    with pytest.raises(ArtifactError, match=r"guard\.pt2: to load a \.pt2 file, PyTorch may run code"):
        ExportedGuard(tmp_path / "guard.pt2")
    (tmp_path / "broken.onnx").write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ArtifactError, match=r"broken\.onnx is corrupt"):
        ExportedGuard(tmp_path / "broken.onnx")
    with pytest.raises(ArtifactError, match="holds no guard: write one with `gramwatch export`"):
        ExportedGuard(changed(path, tmp_path, lambda _: None))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("level", "high", "level cannot be 'high'"),
        ("level", -1, "does not lie between 0 and 1"),
        ("level", 1.0, "does not lie between 0 and 1"),
        ("takes", "anything", "takes cannot be"),
        ("members", ["gram"], "other outputs than a guard"),
        ("members", ["gram", "energy", "knn"], r"no output 'parts\.knn'"),
        ("probe", {"input": 3}, "corrupt"),
        ("classes", [1, 2], "classes cannot be"),
        ("preprocessing", {"size": 3}, "corrupt"),
        ("takes", None, "takes cannot be None"),
    ],
)
def test_forged_facts_are_refused(path, tmp_path, name, value, reason):
    forged = changed(path, tmp_path, lambda facts: {**facts, name: value})
    with pytest.raises(ArtifactError, match=reason):
        ExportedGuard(forged)


def test_a_runtime_that_computes_otherwise_is_noticed(path, tmp_path):
    def drifted(facts):
        result = facts["probe"]
        logits = [value * 1.01 for value in result["logits"]]
        return {**facts, "probe": {**result, "logits": logits}}

    with pytest.warns(GramwatchWarning, match="answers the probe otherwise here than its guard did"):
        ExportedGuard(changed(path, tmp_path, drifted), "cpu")
    ExportedGuard(tmp_path / "changed.onnx", "cpu", check_probe=False)
    earlier = changed(path, tmp_path, lambda facts: {k: v for k, v in facts.items() if k != "probe"})
    ExportedGuard(earlier, "cpu")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("scores", "no base64!", "not base64"),
        ("scores", "AAAAAAAA+H8=", "not finite"),
        ("groups", [0, 10**12, 1, 1], "groups of classes without a class"),
        ("predicted", "AAAA", "corrupt"),
        ("predicted", "/////w==", "no class for a score"),
    ],
)
def test_a_forged_calibration_is_refused(path, tmp_path, name, value, reason):
    def forge(facts):
        return {**facts, "calibration": {**facts["calibration"], name: value}}

    exported = ExportedGuard(changed(path, tmp_path, forge))
    with pytest.raises(ArtifactError, match=reason):
        exported.calibration()


def test_onnx_runtime_reports_nothing(path):
    """Its telemetry is off before it is imported."""
    code = f"""
import os
os.environ.pop("ORT_DISABLE_TELEMETRY", None)
from gramwatch.deploy.exported import ExportedGuard
import importlib, sys
assert "onnxruntime" not in sys.modules
real, seen = importlib.import_module, []
def noted(name):
    seen.append(os.environ.get("ORT_DISABLE_TELEMETRY"))
    return real(name)
importlib.import_module = noted
ExportedGuard({str(path)!r}, "cpu")
assert seen[0] == "1", seen
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_does_not_fit_is_named(exported, path, monkeypatch):
    with pytest.raises(InputError, match=r"takes images of shape \(1, 7, 7\).* makes \(1, 8, 8\)"):
        exported.check(PREPARE.changed(size=8))
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(InputError, match="ONNX Runtime cannot use a GPU here: install onnxruntime-gpu"):
        ExportedGuard(path, "cuda")
    with pytest.raises(InputError, match="ONNX Runtime has no device 'mps'"):
        ExportedGuard(path, "mps")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtraError, match=r"gramwatch\[export\]"):
        ExportedGuard(path)
