"""The command `gramwatch info`."""

import json

from tests.cli.invoking import invoke, told


def test_info_shows_what_a_guard_was_fitted_on(own):
    shown = invoke("info", own.guard).output
    assert f"network        {own.model}" in shown
    assert "middle 16 x 16 (bilinear)" in shown
    assert "classes        bright, dark" in shown
    said = json.loads(invoke("info", own.guard, "--json").output)
    assert said["members"] == ["gram", "profile", "class_ratio", "energy"]
    assert (said["calibrated_on"], said["level"]) == (60, 0.95)
    assert said["fitted_on"]["count"] == 240


def test_a_file_that_is_no_guard_is_refused(own, tmp_path):
    result = invoke("info", own.weights)
    assert result.exit_code == 1
    assert "not one that gramwatch wrote" in told(result)
    (tmp_path / "broken.safetensors").write_bytes(own.guard.read_bytes()[:-10])
    assert "is truncated" in told(invoke("info", tmp_path / "broken.safetensors"))
    assert "there is no file" in told(invoke("info", tmp_path / "missing.safetensors"))
