"""The command `gramwatch score`."""

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import gramwatch
from gramwatch.cli.score import Scoring
from gramwatch.detect.threshold import rank_of_threshold
from gramwatch.guard.guard import MEMBERS
from gramwatch.inputs.foreign import import_torchvision
from gramwatch.inputs.models import resolve
from gramwatch.inputs.preprocessing import Preprocessing
from tests.cli.invoking import invoke, told
from tests.cli.own import PREPARED, QUICK, picture, write_classes

PARTS = " ".join(f"p_{name}" for name in MEMBERS)
COLUMNS = f"path predicted class score p_value is_ood {PARTS} note error"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def test_rows_are_those_of_the_guard_in_python(own, tmp_path):
    result = invoke(*own.score, own.test, "-o", tmp_path / "s.csv")
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "s.csv")
    assert list(rows[0]) == COLUMNS.split()
    assert [row["path"] for row in rows] == sorted(map(str, own.test.rglob("*.png")))
    assert all(row["class"] == Path(row["path"]).parent.name for row in rows)
    from gramwatch.inputs.models import resolve

    guard = gramwatch.load(own.guard, resolve(own.model, own.weights).network)
    prepare = Preprocessing.from_json(guard.metadata["preprocessing"])
    detection = guard(torch.stack([prepare(Image.open(row["path"])) for row in rows]))
    assert [float(row["score"]) for row in rows] == pytest.approx(detection.score.tolist())
    assert [float(row["p_value"]) for row in rows] == detection.p_value.tolist()
    assert [row["is_ood"] == "true" for row in rows] == detection.is_ood.tolist()
    assert [float(row["p_gram"]) for row in rows] == detection.parts["gram"].tolist()


def test_workers_change_nothing(own, tmp_path):
    assert invoke(*own.score, own.test, "-o", tmp_path / "a.csv", "-q").exit_code == 0
    two = [*own.score[:-4], "--workers", 2, "--device", "cpu", "--batch-size", 64]
    assert invoke(*two, own.test, "-o", tmp_path / "b.csv", "-q").exit_code == 0
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


def test_thin_images_and_fifos_stop_nothing(own, tmp_path, monkeypatch):
    """Resized whole, the thin image would be of a thousand million pixels. To open the FIFO would not end."""
    folder = tmp_path / "new"
    folder.mkdir()
    Image.new("L", (3_000_000, 1), 200).save(folder / "a thin.png")
    os.mkfifo(folder / "b fifo.png")
    picture(np.random.default_rng(0), bright=True, side=31).save(folder / "c large.png")
    picture(np.random.default_rng(0), bright=True).save(folder / "d.png")
    call = Preprocessing.__call__

    def exhausted(self, image):
        if image.size == (31, 31):
            raise MemoryError
        return call(self, image)

    monkeypatch.setattr(Preprocessing, "__call__", exhausted)
    for given in (folder, tmp_path / "list.csv"):
        (tmp_path / "list.csv").write_text(
            "path\n" + "\n".join(f"new/{path.name}" for path in sorted(folder.iterdir()))
        )
        result = invoke(*own.score, given, "-o", tmp_path / "s.csv", "--overwrite", "-q")
        assert result.exit_code == 0, result.output
        rows = rows_of(tmp_path / "s.csv")
        errors = ["", "not a regular file", "there is not enough memory to decode it", ""]
        assert [row["error"] for row in rows] == errors
        assert [bool(row["score"]) for row in rows] == [not error for error in errors]


def test_strange_images_are_flagged_and_the_exit_code_says_so(own, tmp_path):
    stripes = np.zeros((24, 24, 3), np.uint8)
    stripes[:, ::4, 0] = 255
    (tmp_path / "new").mkdir()
    for i in range(5):
        Image.fromarray(np.roll(stripes, i, 1)).save(tmp_path / "new" / f"{i}.png")
    arguments = [*own.score, tmp_path / "new", "-o", tmp_path / "s.jsonl", "--json", "-q"]
    result = invoke(*arguments, "--fail-if-flagged")
    said = json.loads(result.stdout)
    assert (said["images"], said["flagged"], said["errors"]) == (5, 5, 0)
    assert said["expected_by_chance"] == pytest.approx(0.25)
    assert result.exit_code == 3
    assert invoke(*arguments, "--overwrite").exit_code == 0
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row["is_ood"] for row in rows] == [True] * 5


def test_bad_images_are_rows_with_their_errors_and_odd_ones_have_notes(own, tmp_path):
    folder = tmp_path / "ünïcode and spaces"
    folder.mkdir()
    rng = np.random.default_rng(0)
    whole = picture(rng, True)
    whole.save(folder / "good, with a comma.png")
    whole.save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:-200])
    (folder / "text.png").write_text("not an image")
    (folder / "empty.png").touch()
    (folder / "notes.txt").write_text("other files are left out")
    (folder / "circle").symlink_to(folder)
    whole.save(folder / "moving.gif", save_all=True, append_images=[picture(rng, True) for _ in range(3)])
    result = invoke(*own.score, folder, "-o", tmp_path / "s.csv")
    assert result.exit_code == 0, result.output
    rows = {Path(row["path"]).name: row for row in rows_of(tmp_path / "s.csv")}
    assert rows.keys() == {"good, with a comma.png", "cut.jpg", "text.png", "empty.png", "moving.gif"}
    assert rows["text.png"]["error"].startswith("not an image of a known format")
    assert rows["empty.png"]["error"] == "the file is empty"
    assert rows["cut.jpg"]["error"].startswith("cannot be read: image file is truncated")
    assert rows["cut.jpg"]["score"] == rows["cut.jpg"]["is_ood"] == ""
    assert rows["moving.gif"]["note"] == "first of 4 frames"
    good = rows["good, with a comma.png"]
    assert (good["class"], good["error"], good["note"]) == ("bright", "", "")
    assert "3 could not be read" in result.output


def test_if_no_image_can_be_read_the_command_fails(own, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").touch()
    assert invoke(*own.score, tmp_path / "bad", "-o", tmp_path / "s.csv", "-q").exit_code == 1
    assert rows_of(tmp_path / "s.csv")[0]["error"] == "the file is empty"


def test_an_interrupted_run_goes_on_and_equals_one_run(own, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.csv", tmp_path / "parts.csv"
    by_five = [*own.score, own.test, "--batch-size", 5]
    assert invoke(*by_five, "-o", whole, "-q").exit_code == 0
    judged, calls = Scoring.judged, []

    def interrupted(self, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return judged(self, batch)

    monkeypatch.setattr(Scoring, "judged", interrupted)
    result = invoke(*by_five, "-o", parts)
    assert result.exit_code == 130
    assert "the same command goes on from there" in result.output
    assert not parts.exists()
    monkeypatch.setattr(Scoring, "judged", judged)
    with (tmp_path / "parts.csv.part").open("ab") as file:
        file.write(b'{"path": "cut off in the mid')
    result = invoke(*by_five, "-o", parts, "--json")
    assert "going on: 15 images were scored before" in result.output
    assert json.loads(result.stdout)["images"] == 40
    assert not (tmp_path / "parts.csv.part").exists()
    assert parts.read_text() == whole.read_text()


def test_a_real_ctrl_c_keeps_what_was_scored(own, tmp_path):
    """The process gets the signal while it works, with decoding workers, on paths that come slowly."""
    paths = sorted(map(str, own.test.rglob("*.png")))
    words = [*own.score, "-", "-o", tmp_path / "s.csv", "--batch-size", 1]
    words[words.index("--workers") + 1] = 1
    running = subprocess.Popen(
        [sys.executable, "-m", "gramwatch", *map(str, words)],
        cwd=own.folder, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdin is not None
    running.stdin.write("\n".join(paths[:30]) + "\n")
    running.stdin.flush()
    part, waited = tmp_path / "s.csv.part", time.monotonic()
    while not part.exists() or len(part.read_bytes().splitlines()) < 3:
        assert time.monotonic() - waited < 120
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors
    assert "interrupted. The rows so far are in" in errors
    assert "Traceback" not in errors
    done = [json.loads(line) for line in part.read_bytes().splitlines()[1:]]
    assert [row["path"] for row in done] == paths[: len(done)]


def test_a_full_disk_loses_nothing(own, tmp_path, monkeypatch):
    from gramwatch.cli.rows import Filed

    by_five = [*own.score, own.test, "--batch-size", 5, "-q", "-o", tmp_path / "s.csv"]
    line, written = Filed._line, []

    def full(self, row):
        written.append(row)
        if len(written) > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        line(self, row)

    monkeypatch.setattr(Filed, "_line", full)
    result = invoke(*by_five)
    assert result.exit_code == 1
    assert "No space left on device. The rows before are kept: make room" in told(result)
    monkeypatch.setattr(Filed, "_line", line)
    assert invoke(*by_five).exit_code == 0
    paths = [row["path"] for row in rows_of(tmp_path / "s.csv")]
    assert paths == sorted(map(str, own.test.rglob("*.png")))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_below_standard_output_is_one_line(own):
    words = [sys.executable, "-m", "gramwatch", *map(str, own.score), str(own.test), "-q"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, cwd=own.folder, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_paths_from_a_pipe_and_rows_to_a_pipe(own):
    paths = sorted(map(str, own.test.rglob("*.png")))[:3]
    words = [sys.executable, "-m", "gramwatch", *map(str, own.score), "-", "-o", "-", "--format", "jsonl"]
    done = subprocess.run(
        words, cwd=own.folder, input="\n".join([*paths, "missing.png", paths[0]]), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["path"] for row in rows] == [*paths, "missing.png"]  # a path that comes twice has one row
    assert rows[-1]["error"] == "cannot be read: No such file or directory"


def test_another_run_does_not_continue_this_one(own, tmp_path):
    (tmp_path / "s.csv.part").write_text('{"guard": "of someone else", "images": "x"}\n')
    result = invoke(*own.score, own.test, "-o", tmp_path / "s.csv", "-q")
    assert result.exit_code == 1
    assert "was begun with another guard" in told(result)
    (tmp_path / "s.csv.part").write_text("no JSON\n")
    assert "is damaged: delete it" in told(invoke(*own.score, own.test, "-o", tmp_path / "s.csv", "-q"))


def test_an_output_that_exists_is_kept(own, tmp_path):
    (tmp_path / "s.csv").write_text("precious")
    result = invoke(*own.score, own.test, "-o", tmp_path / "s.csv", "-q")
    assert result.exit_code == 2
    assert "exists: name another file, or give --overwrite" in told(result)
    assert (tmp_path / "s.csv").read_text() == "precious"


def test_another_preprocessing_is_said(own, tmp_path):
    result = invoke(*own.score, own.test, "-o", tmp_path / "s.csv", "--resize", "nearest")
    assert result.exit_code == 0
    assert "prepared otherwise than in the fit. resize: nearest, not bilinear" in result.output
    result = invoke(*own.score, own.test, "-o", tmp_path / "t.csv")
    assert "otherwise" not in result.output


def test_a_network_whose_own_preprocessing_changed_is_said(tmp_path, monkeypatch):
    import_torchvision()
    import timm

    from gramwatch.inputs import models

    torch.manual_seed(0)
    save_file(timm.create_model("resnet10t", num_classes=2).state_dict(), tmp_path / "net.safetensors")
    write_classes(tmp_path / "images", 20, seed=8)

    def said_of(name: str, *options: object) -> str:
        fitted = invoke(
            "fit", "timm:resnet10t", tmp_path / "images", "--weights", tmp_path / "net.safetensors", "-o",
            tmp_path / f"{name}.safetensors", "--hold-out", 0.5, "--level", 0.9, "--members", "energy",
            *options, *QUICK, "-q",
        )  # fmt: skip
        assert fitted.exit_code == 0, fitted.output
        original = models._of_timm
        with monkeypatch.context() as patch:
            patch.setattr(models, "_of_timm", lambda values: original(values).changed(resize="lanczos"))
            scored = invoke(
                "score", tmp_path / f"{name}.safetensors", tmp_path / "images" / "dark", "-o",
                tmp_path / f"{name}.csv", *QUICK,
            )  # fmt: skip
        assert scored.exit_code == 0, scored.output
        return scored.output

    assert "own preprocessing is now resize: lanczos, not bicubic in the fit" in said_of("found")
    assert "own preprocessing" not in said_of("given", "--resize", "nearest")  # it differed on purpose


def test_images_that_were_resized_before_are_said(own, tmp_path):
    (tmp_path / "small").mkdir()
    for path in own.test.rglob("*.png"):
        small = Image.open(path).resize((16, 16), Image.Resampling.NEAREST)
        small.save(tmp_path / "small" / f"{path.parent.name}-{path.name}")
    result = invoke(*own.score, tmp_path / "small", "-o", tmp_path / "s.csv")
    assert (
        "most of these images already had the right size, most images of the fit were reduced"
        in result.output
    )
    assert "bilinear resizes images" in result.output
    same = invoke(*own.score, own.test, "-o", tmp_path / "t.csv")
    assert "most of these images" not in same.output


def test_no_code_runs_because_a_file_says_so(own, tmp_path):
    result = invoke("score", own.guard, own.test, "-o", tmp_path / "s.csv", *QUICK, "-q")
    assert result.exit_code == 1
    assert f"name it yourself, --model {own.model}" in told(result)


def test_the_guard_of_another_network_is_refused(own, tmp_path):
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    other(torch.zeros(1, 3, 16, 16))
    name = own.model.partition(":")[0]
    (own.folder / f"{name}_other.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(784, 2))\n"
    )
    result = invoke(
        "score", own.guard, own.test, "--model", f"{name}_other:build", "-o", tmp_path / "s.csv", *QUICK, "-q"
    )
    assert result.exit_code == 1
    assert "was fitted on another network" in told(result)
    changed = __import__(name).build()
    save_file(changed.state_dict(), tmp_path / "untrained.safetensors")
    result = invoke(
        *own.score, own.test, "--weights", tmp_path / "untrained.safetensors", "-o", tmp_path / "s.csv", "-q"
    )
    assert "a network of the same form with other weights" in told(result)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["missing.safetensors", "IMAGES", "-o", "s.csv"], "there is no file missing.safetensors"),
        (["GUARD", "no_such_folder", "-o", "s.csv"], "there is no folder, CSV or image no_such_folder"),
        (["GUARD", "IMAGES", "-o", "s.txt"], "does not end in .csv, .jsonl or .parquet"),
        (["GUARD", "IMAGES", "--format", "parquet"], "Parquet"),
        (["GUARD", "IMAGES", "-o", "s.csv", "--fdr", "1.5"], "1.5 does not lie between 0 and 1"),
        (["GUARD", "IMAGES", "--fdr", "0.1"], "selected when all of them are scored: give -o FILE"),
        (["GUARD", "IMAGES", "--json"], "the table takes standard output"),
        (["GUARD", "IMAGES", "-o", "s.csv", "--device", "abacus"], "'abacus' cannot be used here"),
    ],
)
def test_wrong_usage_is_one_line(own, tmp_path, words, reason, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [{"GUARD": own.guard, "IMAGES": own.test}.get(word, word) for word in words]
    result = invoke("score", *given, "--model", own.model, "-q")
    assert result.exit_code in (1, 2)
    assert reason in told(result)
    assert list(tmp_path.iterdir()) == []


def test_parquet_has_the_same_rows(own, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert invoke(*own.score, own.test, "-o", tmp_path / "s.csv", "-q").exit_code == 0
    assert invoke(*own.score, own.test, "-o", tmp_path / "s.parquet", "-q").exit_code == 0
    rows = parquet.read_table(tmp_path / "s.parquet").to_pylist()
    assert [row["path"] for row in rows] == [row["path"] for row in rows_of(tmp_path / "s.csv")]
    assert [row["score"] for row in rows] == [float(row["score"]) for row in rows_of(tmp_path / "s.csv")]
    assert all(type(row["is_ood"]) is bool for row in rows)


def test_a_guard_that_is_not_calibrated_says_so(own, tmp_path):
    guard = tmp_path / "g.safetensors"
    fitted = invoke(
        "fit", own.model, own.train, "--weights", own.weights, "-o", guard, "--hold-out", 0, *PREPARED,
        *QUICK, "-q",
    )  # fmt: skip
    assert fitted.exit_code == 0, fitted.output
    result = invoke(
        "score", guard, own.test, "--model", own.model, "--weights", own.weights, "-o", tmp_path / "s.csv",
        *QUICK, "-q",
    )  # fmt: skip
    assert result.exit_code == 1
    assert f"{guard} is not calibrated, so it cannot judge: fit it with --calibrate FOLDER" in told(result)


def test_weights_that_were_moved_are_asked_for(own, tmp_path):
    lonely = tmp_path / "guard.safetensors"
    lonely.write_bytes(own.guard.read_bytes())
    result = invoke("score", lonely, own.test, "--model", own.model, "-o", tmp_path / "s.csv", *QUICK, "-q")
    assert result.exit_code == 1
    assert "which are not there: give --weights" in told(result)


def with_stripes(own, folder: Path, count: int) -> Path:
    """The test images, and `count` images of stripes."""
    for path in own.test.rglob("*.png"):
        copy = folder / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    stripes = np.zeros((24, 24, 3), np.uint8)
    stripes[:, ::4, 0] = 255
    (folder / "stripes").mkdir()
    for i in range(count):
        Image.fromarray(np.roll(stripes, i, 1)).save(folder / "stripes" / f"{i}.png")
    return folder


def test_a_set_of_outliers_is_that_of_select(own, tmp_path):
    images = with_stripes(own, tmp_path / "new", 20)
    (images / "broken.png").touch()
    for name in ("s.csv", "s.jsonl"):
        result = invoke(*own.score, images, "-o", tmp_path / name, "--fdr", 0.2, "--json")
        assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "s.csv")
    assert list(rows[0])[:7] == "path predicted class score p_value is_ood selected".split()
    read = [row for row in rows if not row["error"]]
    chosen = gramwatch.select(torch.tensor([float(row["p_value"]) for row in read]), 0.2)
    assert [row["selected"] == "true" for row in read] == chosen.is_selected.tolist()
    assert 20 <= len(chosen) < 35
    assert all(row["selected"] == "true" for row in read if "stripes" in row["path"])
    assert [row["selected"] for row in rows if row["error"]] == [""]
    lines = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert [row["selected"] for row in lines if not row["error"]] == chosen.is_selected.tolist()
    said = json.loads(result.stdout)
    assert (said["selected"], said["fdr"]) == (len(chosen), 0.2)
    assert f"{len(chosen)} of 60 images selected. On average at most 20%" in result.output


def test_too_few_calibration_images_for_a_selection_are_said(own, tmp_path):
    """30 of 60 calibration images rank: 1 / 31 is at most 0.2 k / 45 from k = 8 on."""
    images = with_stripes(own, tmp_path / "new", 5)
    result = invoke(*own.score, images, "-o", tmp_path / "s.csv", "--fdr", 0.01)
    assert result.exit_code == 0, result.output
    assert "0 of 45 images selected at a false-discovery rate of 0.01" in result.output
    assert "30 calibration images rank. With so few, nothing can be selected among 45" in result.output
    assert "To select a single outlier, 4,499 must rank" in result.output
    assert {row["selected"] for row in rows_of(tmp_path / "s.csv")} == {"false"}
    selection = invoke(*own.score, images, "-o", tmp_path / "some.csv", "--fdr", 0.2)
    assert "either none or at least 8 of 45 images are selected" in selection.output
    enough = invoke(*own.score, own.test / "dark" / "000.png", "-o", tmp_path / "t.csv", "--fdr", 0.1)
    assert "calibration images rank" not in enough.output


def test_a_run_that_goes_on_selects_among_all_rows(own, tmp_path, monkeypatch):
    images = with_stripes(own, tmp_path / "new", 20)
    words = [*own.score, images, "--batch-size", 10, "--fdr", 0.2, "-q"]
    assert invoke(*words, "-o", tmp_path / "whole.csv").exit_code == 0
    judged, calls = Scoring.judged, []

    def interrupted(self, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return judged(self, batch)

    monkeypatch.setattr(Scoring, "judged", interrupted)
    assert invoke(*words, "-o", tmp_path / "parts.csv").exit_code == 130
    monkeypatch.setattr(Scoring, "judged", judged)
    assert invoke(*words, "-o", tmp_path / "parts.csv").exit_code == 0
    assert (tmp_path / "parts.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert "true" in {row["selected"] for row in rows_of(tmp_path / "parts.csv")}


def test_folders_and_files_without_permission(own, tmp_path, monkeypatch):
    """As root nothing is forbidden, so the refusal is made up."""
    from PIL import Image as Pillow

    monkeypatch.setattr(Pillow, "open", _forbidden)
    assert invoke(*own.score, own.test / "dark", "-o", tmp_path / "s.csv", "-q").exit_code == 1
    assert {row["error"] for row in rows_of(tmp_path / "s.csv")} == {"cannot be read: Permission denied"}


def _forbidden(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def test_another_level_changes_the_verdicts_alone(own, tmp_path):
    tables = {level: tmp_path / f"{level}.csv" for level in (0.95, 0.8, 0.5)}
    for level, table in tables.items():
        result = invoke(*own.score, own.test, "-o", table, "--level", level)
        assert result.exit_code == 0, result.output
        assert f"about {40 * (1 - level):,.0f} would be" in result.output
    assert invoke(*own.score, own.test, "-o", tmp_path / "own.csv").exit_code == 0
    assert (tmp_path / "own.csv").read_bytes() == tables[0.95].read_bytes()
    guard = gramwatch.load(own.guard, resolve(own.model, own.weights).network)
    ranking = len(guard.calibration_scores_)
    usual = rows_of(tmp_path / "own.csv")
    for level, table in tables.items():
        needed = rank_of_threshold(ranking, level)
        for row, before in zip(rows_of(table), usual, strict=True):
            lower = round((1 - float(row["p_value"])) * (ranking + 1))
            assert (row["is_ood"] == "true") == (lower >= needed)
            assert {**row, "is_ood": ""} == {**before, "is_ood": ""}
    flagged = [sum(row["is_ood"] == "true" for row in rows_of(table)) for table in tables.values()]
    assert flagged[0] < flagged[2]


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        (1.5, "1.5 does not lie between 0 and 1"),
        (0.99, "30 calibration"),
        (0.0, "0.0 does not lie"),
    ],
)
def test_a_level_that_the_calibration_cannot_support_is_refused(own, tmp_path, level, reason):
    result = invoke(*own.score, own.test, "-o", tmp_path / "s.csv", "--level", level)
    assert result.exit_code == 2
    assert f"Invalid value for --level: {reason}" in told(result)
    assert not (tmp_path / "s.csv").exists()
