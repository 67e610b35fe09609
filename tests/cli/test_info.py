"""The command `gramwatch info`."""

import json
from pathlib import Path

import pytest
import torch

import gramwatch
from gramwatch.files import artifact
from gramwatch.guard.guard import MEMBERS
from gramwatch.inputs.models import resolve
from tests.cli.invoking import invoke, told


def test_info_shows_what_a_guard_was_fitted_on(own):
    shown = invoke("info", own.guard).output
    assert f"network         {own.model}" in shown
    assert "middle 16 x 16 (bilinear)" in shown
    assert "classes         bright, dark" in shown
    said = json.loads(invoke("info", own.guard, "--json").output)
    assert said["members"] == list(MEMBERS)
    assert (said["calibrated_on"], said["level"]) == (60, 0.95)
    assert said["fitted_on"]["count"] == 240


def test_info_shows_how_much_each_member_counts(own, rehearsed):
    guard = gramwatch.load(rehearsed[0], resolve(own.model, own.weights).network)
    said = json.loads(invoke("info", rehearsed[0], "--json").output)
    assert said["member_weights"] == pytest.approx(guard.weights_, abs=1e-4)
    first = f"gram: {said['member_weights']['gram']}"
    assert f"member weights  {first}" in invoke("info", rehearsed[0]).output


def test_info_of_a_guard_that_did_not_rehearse_knows_no_weights(rehearsed, tmp_path):
    write_other_weights(rehearsed[0], tmp_path / "earlier.safetensors", None)
    said = json.loads(invoke("info", tmp_path / "earlier.safetensors", "--json").output)
    assert said["member_weights"] is None
    assert said["members"] == list(MEMBERS)


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (torch.full((7,), -1.0, dtype=torch.float64), "a weight of its members is negative"),
        (torch.full((7,), torch.nan, dtype=torch.float64), "not finite"),
        (torch.ones(6, dtype=torch.float64), "(6,)"),
        (torch.ones(7, dtype=torch.int64), "int64"),
    ],
    ids=["negative", "no numbers", "too few", "integers"],
)
def test_weights_of_members_that_cannot_be_are_refused(rehearsed, tmp_path, weights, why):
    write_other_weights(rehearsed[0], tmp_path / "forged.safetensors", weights)
    result = invoke("info", tmp_path / "forged.safetensors")
    assert result.exit_code == 1
    assert why in told(result)


def write_other_weights(guard: Path, path: Path, weights: torch.Tensor | None) -> None:
    """The same file with other weights of members, or with none."""
    saved = artifact.read(guard)
    tensors = {name: saved.file.tensor(name) for name in saved.file.layout if name != "calibration.weights"}
    if weights is not None:
        tensors["calibration.weights"] = weights
    artifact.write(path, saved.header, tensors)


def test_a_file_that_is_no_guard_is_refused(own, tmp_path):
    result = invoke("info", own.weights)
    assert result.exit_code == 1
    assert "not one that gramwatch wrote" in told(result)
    (tmp_path / "broken.safetensors").write_bytes(own.guard.read_bytes()[:-10])
    assert "is truncated" in told(invoke("info", tmp_path / "broken.safetensors"))
    assert "there is no file" in told(invoke("info", tmp_path / "missing.safetensors"))
