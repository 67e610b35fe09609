"""The command `gramwatch export`, and the example that needs ONNX Runtime alone."""

import csv
import io
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.invoking import invoke, told
from tests.cli.own import QUICK
from tests.pages import ROOT

EXAMPLE = ROOT / "examples" / "onnx_only.py"
WITHOUT = "import sys; sys.modules['torch'] = sys.modules['gramwatch'] = None; "
"""Neither can be imported after this."""


def test_the_example_judges_a_folder_as_gramwatch_score_does(own, robust, graph, tmp_path):
    pytest.importorskip("onnxruntime")
    folder, scored = tmp_path / "images", tmp_path / "scores.csv"
    shutil.copytree(own.test, folder)
    whole = Image.open(min(own.test.rglob("*.png"))).resize((31, 24))
    exif = Image.Exif()
    exif[0x0112] = 6
    whole.save(folder / "turned.jpg", exif=exif)
    whole.quantize(16).save(folder / "a.gif")
    whole.save(folder / "b.tiff")
    Image.fromarray(np.asarray(whole.convert("L")).astype(np.uint16) * 257).save(folder / "c.tif")
    (folder / "damaged.png").write_bytes((folder / "b.tiff").read_bytes()[:-500])
    (folder / "text.jpg").write_text("no image")
    os.mkfifo(folder / "fifo.png")
    assert invoke("score", robust, folder, "--model", own.model, *QUICK, "-o", scored).exit_code == 0
    run = f"{WITHOUT}import runpy; sys.argv[1:] = {[str(graph), str(folder)]!r}; "
    run += f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    said = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True).stdout
    result = {row["path"]: row for row in csv.DictReader(io.StringIO(said))}
    want = {row["path"]: row for row in csv.DictReader(scored.open(encoding="utf-8"))}
    assert want.pop(str(folder / "fifo.png"))["error"] == "not a regular file"
    assert result.keys() == want.keys()
    assert len(result) == 40 + 6
    for path, row in want.items():
        mine = result[path]
        assert bool(mine["error"]) == bool(row["error"])
        if row["error"]:
            assert mine["score"] == ""
            continue
        assert (mine["predicted"], mine["class"]) == (row["predicted"], row["class"])
        assert mine["is_ood"].lower() == row["is_ood"].lower()
        assert float(mine["score"]) == pytest.approx(float(row["score"]), rel=1e-4, abs=1e-4)
        assert float(mine["p_value"]) == pytest.approx(float(row["p_value"]), rel=1e-5)


def test_a_graph_of_inputs_for_pytorch(own, robust, tmp_path):
    path = tmp_path / "guard.pt2"
    result = invoke("export", robust, "--model", own.model, "-o", path, "--inputs")
    assert result.exit_code == 0, result.output
    assert f"written: {path}, for inputs after: shorter side to 16, middle 16 x 16" in result.output
    actual = torch.export.load(path).module()(torch.full((3, 3, 16, 16), 50.0))
    assert actual["is_ood"].tolist() == [True] * 3


def test_a_missing_package_is_no_fault_of_an_option(own, robust, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    result = invoke("export", robust, "--model", own.model, "-o", tmp_path / "guard.onnx")
    assert result.exit_code == 1
    assert told(result).startswith("gramwatch: a guard is exported to ONNX with the package onnxscript")


def test_what_is_wrong_is_named(own, tmp_path):
    result = invoke("export", own.guard, "-o", tmp_path / "guard.bin")
    assert result.exit_code == 2
    assert "must end in .onnx or .pt2" in told(result)
    result = invoke("export", own.guard, "-o", tmp_path / "guard.pt2")
    assert result.exit_code == 1
    assert f"--model {own.model}" in told(result)
