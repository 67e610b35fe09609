"""The command `gramwatch explain`."""

import json

import pytest
from PIL import Image

from tests.cli.invoking import invoke, told


@pytest.fixture
def command(own):
    return ["explain", own.guard, next(own.test.rglob("*.png")), "--model", own.model, "--device", "cpu"]


def test_three_sentences_and_a_picture(command, tmp_path):
    result = invoke(*command, "-o", tmp_path / "why.png")
    assert result.exit_code == 0, result.output
    assert "lagged (p = " in result.stdout
    assert f"written: {tmp_path / 'why.png'}" in result.stderr
    assert Image.open(tmp_path / "why.png").width == 1600


def test_the_summary_adds_up(command):
    result = invoke(*command, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert sum(report["members"].values()) == pytest.approx(report["score"], abs=1e-5)
    for member, taps in report["taps"].items():
        assert sum(taps.values()) == pytest.approx(report["members"][member], abs=1e-5)
    assert len(report["sentences"]) == 3


def test_what_is_no_image_is_an_error(command, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    result = invoke(command[0], command[1], tmp_path / "text.png", *command[3:])
    assert result.exit_code == 1
    assert "text.png" in told(result)
    folder = invoke(command[0], command[1], tmp_path, *command[3:])
    assert folder.exit_code == 2
    assert f"{tmp_path} is a folder: name one image" in told(folder)
    assert "gramwatch score" in told(folder)
    missing = invoke(command[0], command[1], tmp_path / "none.png", *command[3:])
    assert missing.exit_code == 2
