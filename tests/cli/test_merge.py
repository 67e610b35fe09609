"""The command `gramwatch merge`."""

import json
from pathlib import Path

import pytest
import torch

from gramwatch.files import artifact
from tests.cli.invoking import invoke, told
from tests.cli.own import PREPARED, QUICK


@pytest.fixture
def shards(own, tmp_path) -> list[Path]:
    """A guard of the bright images, one of the dark images, and one of all, none of them calibrated."""
    paths = []
    for name in ("bright", "dark", ""):
        path = tmp_path / f"{name or 'all'}.safetensors"
        result = invoke(
            "fit", own.model, own.train / name, "--weights", own.weights, "-o", path, "--hold-out", 0,
            "--members", "gram,energy", *PREPARED, *QUICK, "-q",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        paths.append(path)
    return paths


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")  # a shard knows one class only
def test_merged_guards_equal_one_fit_on_all(own, shards, tmp_path):
    bright, dark, whole = shards
    merged = tmp_path / "merged.safetensors"
    result = invoke(
        "merge", bright, dark, "-o", merged, "--calibrate", own.test, "--model", own.model, "--weights",
        own.weights, *QUICK, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"output": str(merged), "merged": 2, "calibrated": True}
    first, second = artifact.read(merged), artifact.read(whole)
    bounds = [name for name in first.file.layout if name.startswith("members.gram")]
    assert bounds
    for name in bounds:
        assert torch.equal(first.file.tensor(name), second.file.tensor(name)), name
    assert first.header["metadata"]["images"]["count"] == 300
    assert first.header["calibration"]["examples"] == 40
    assert first.header["metadata"]["classes"] == ["bright", "dark"]
    assert "right on 100.0% of the calibration images" in result.stderr


@pytest.mark.filterwarnings("ignore::gramwatch.GramwatchWarning")
def test_a_merge_without_calibration_says_so_and_needs_two(own, shards, tmp_path):
    options = ["--model", own.model, "--weights", own.weights, "-o", tmp_path / "m.safetensors", *QUICK]
    result = invoke("merge", *shards[:2], *options)
    assert "not calibrated: it cannot score yet" in result.output
    assert artifact.read(tmp_path / "m.safetensors").header["calibration"] is None
    result = invoke("merge", shards[0], *options)
    assert result.exit_code == 2
    assert "two guards or more" in told(result)
    result = invoke("merge", shards[0], own.guard, *options)
    assert "the two differ in members" in told(result)
