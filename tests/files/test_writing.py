"""Writing: a file is replaced whole or not at all, and nothing but a file is replaced."""

import os
import stat
import threading
from pathlib import Path

import pytest

from gramwatch import GramwatchWarning
from gramwatch.files import writing


@pytest.mark.skipif(os.name != "posix", reason="pipes and devices")
def test_only_regular_files_or_nothing_are_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/null")
    for path, kind in ((pipe, stat.S_ISFIFO), (link, stat.S_ISCHR)):
        with pytest.raises(OSError, match="a device, a pipe or a socket"):
            writing.check_writable(path)
        with pytest.raises(OSError, match="a device, a pipe or a socket"), writing.replacing(path):
            pytest.fail("it was begun")
        assert kind(path.stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_a_pipe_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write_meanwhile() -> None:
        with writing.replacing(path) as beside:
            beside.write_text("new")
            os.mkfifo(path)

    with pytest.raises(OSError, match="a device, a pipe or a socket"):
        write_meanwhile()
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_a_folder_that_cannot_be_flushed_is_a_warning_and_the_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.warns(GramwatchWarning, match=r"is written whole.*Invalid argument"):
        writing.write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_belongs_to_a_file_is_moved_before_it(tmp_path: Path) -> None:
    with writing.replacing(tmp_path / "a[1].onnx") as beside:
        beside.write_text("graph")
        beside.with_name("a[1].onnx.data").write_text("numbers")
        beside.with_name("stray").write_text("left")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a[1].onnx", "a[1].onnx.data"]


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    threads = [threading.Thread(target=writing.write_text, args=(path, str(i) * 1000)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in {str(i) * 1000 for i in range(8)}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_every_writer_of_a_path_leaves_a_pipe(tmp_path: Path) -> None:
    import torch

    import gramwatch
    from gramwatch.cli.rows import Filed
    from gramwatch.explain.frame import pyplot, write_picture
    from gramwatch.inputs.demo import small_convnet

    pytest.importorskip("onnxscript")
    x = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    guard = gramwatch.Guard(small_convnet(), members=["energy"])
    guard.fit([x[:100]], progress=False).calibrate([x[100:]], progress=False)
    rows = Filed(tmp_path / "rows.csv", "csv", ["path"], {})
    table = gramwatch.evaluate(guard, [x], {"noise": [3 * x]}, draws=1, progress=False)
    writers = {
        "guard.safetensors": guard.save,
        "monitor.safetensors": gramwatch.Monitor(guard).save,
        "guard.onnx": lambda path: guard.export(path, x[:1]),
        "guard.pt2": lambda path: guard.export(path, x[:1]),
        "rows.csv": lambda path: rows.finish(),
        "table.csv": table.to_csv,
        "figure.png": lambda path: write_picture(pyplot().figure(), path),
    }
    for name, write in writers.items():
        os.mkfifo(tmp_path / name)
        with pytest.raises(OSError, match="a device, a pipe or a socket"):
            write(tmp_path / name)
        assert stat.S_ISFIFO((tmp_path / name).stat().st_mode)
