"""What is checked before a command begins, and names that come from files."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gramwatch.cli.app import app
from gramwatch.files import artifact
from tests.cli.invoking import invoke, told
from tests.cli.own import PREPARED, QUICK
from tests.files.test_artifact import joined, parts


def test_the_check_of_a_folder_leaves_nothing_but_the_folder(tmp_path: Path) -> None:
    from gramwatch.cli.checks import writable_folder

    writable_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a").rglob("*")) == [tmp_path / "a" / "b"]


def with_metadata(guard: Path, to: Path, **changes: Any) -> Path:
    """A copy of a guard's file with other metadata, and a checksum that fits."""
    layout, data = parts(guard.read_bytes())
    header = json.loads(layout["__metadata__"]["gramwatch"])
    header.pop("checksum")
    header["metadata"] |= changes
    header["checksum"] = artifact._header_checksum(header)
    layout["__metadata__"]["gramwatch"] = json.dumps(header)
    to.write_bytes(joined(layout, data))
    return to


@pytest.mark.parametrize("name", ["hf+code:someone/net", "timm:local-dir:/somewhere", "os:system"])
def test_no_code_runs_because_a_file_names_it(own: Any, tmp_path: Path, name: str) -> None:
    forged = with_metadata(own.guard, tmp_path / "g.safetensors", model={"name": name})
    result = invoke("score", forged, own.test, "-o", tmp_path / "s.csv", *QUICK, "-q")
    assert f"name it yourself, --model {name}" in told(result)


def test_names_in_a_file_do_not_reach_the_terminal_as_commands(own: Any, tmp_path: Path) -> None:
    hostile = "x:\x1b[2J\x9d\u202egnp"
    forged = with_metadata(own.guard, tmp_path / "g.safetensors", model={"name": hostile}, classes=[hostile])
    for command in (["info", forged], ["score", forged, own.test, "-o", tmp_path / "s.csv"]):
        output = invoke(*command).output
        assert not {"\x1b", "\x9d", "\u202e"} & set(output)
        assert "\\x1b[2J" in output


def test_an_output_that_is_an_input_is_refused(own: Any, tmp_path: Path) -> None:
    guard, image, table = tmp_path / "guard.safetensors", tmp_path / "a.png", tmp_path / "list.csv"
    guard.write_bytes(own.guard.read_bytes())
    image.write_bytes(next(own.test.rglob("*.png")).read_bytes())
    table.write_text("path\na.png\n")
    link, page = tmp_path / "link.csv", tmp_path / "page.html"
    link.symlink_to(guard)
    page.hardlink_to(guard)
    before = {path: path.read_bytes() for path in (guard, image, table)}
    for words in (
        ["score", guard, table, "-o", link, "--format", "csv", "--overwrite"],
        ["score", guard, table, "-o", guard, "--format", "csv", "--overwrite"],
        ["score", guard, table, "-o", table, "--overwrite"],
        ["score", guard, table, "-o", tmp_path / "s.csv", "--report", page, "--overwrite"],
        ["explain", guard, image, "-o", image],
        ["fit", own.model, own.train, "--weights", guard, "-o", guard, *PREPARED],
        ["merge", guard, own.guard, "-o", guard],
        ["serve", guard, "--monitor-state", guard],
    ):
        result = invoke(*words)
        assert result.exit_code == 2, result.output
        assert "a file that this command reads" in told(result)
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.skipif(os.name != "posix", reason="pipes")
def test_an_output_that_is_a_pipe_or_a_device_is_refused(own: Any, tmp_path: Path) -> None:
    pipe, device = tmp_path / "s.csv", tmp_path / "t.csv"
    os.mkfifo(pipe)
    device.symlink_to("/dev/null")
    for path in (pipe, device):
        result = invoke(*own.score, own.test, "-o", path, "--overwrite")
        assert result.exit_code == 2
        assert "only files are replaced" in told(result)
        assert not path.is_file()


def test_a_cell_of_a_table_is_no_formula_and_is_read_back(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gramwatch.inputs.files import files_of
    from gramwatch.report import scores

    monkeypatch.chdir(tmp_path)
    name, table = "=cmd|'x'!A0.png", tmp_path / "s.csv"
    (tmp_path / name).write_bytes(next(own.test.rglob("*.png")).read_bytes())
    piped = CliRunner().invoke(app, [*map(str, own.score), "-", "-o", str(table)], input=f"{name}\n")
    assert piped.exit_code == 0, piped.output
    assert table.read_text().splitlines()[1].startswith("'=cmd")
    assert scores.read([table]).paths == [name]
    assert files_of(table).paths == [str(tmp_path / name)]
