"""Finding images in folders and tables."""

import errno
import os
from pathlib import Path

import pytest

from gramwatch import DataError, GramwatchWarning, MissingDataError
from gramwatch.inputs.files import files_of, listed


def touched(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(folder: Path, paths: list[str]) -> list[str]:
    return [str(Path(path).relative_to(folder)) for path in paths]


def test_class_folders_and_flat_folders(tmp_path):
    touched(tmp_path, "a/2.png", "a/1.JPG", "b/deep/3.webp", "b/readme.txt", ".hidden/4.png", "a/.5.png")
    result = files_of(tmp_path)
    assert names(tmp_path, result.paths) == ["a/1.JPG", "a/2.png", "b/deep/3.webp"]
    assert (result.labels, result.classes, result.others) == (["a", "a", "b"], ["a", "b"], 1)
    touched(tmp_path, "loose.png")
    assert files_of(tmp_path).labels is None
    assert files_of(tmp_path / "a").labels is None


def test_links_in_circles_end(tmp_path):
    touched(tmp_path, "a/1.png", "b/2.png")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "self").symlink_to(tmp_path / "a")
    (tmp_path / "b" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "b" / "again").symlink_to(tmp_path / "a")
    assert names(tmp_path, files_of(tmp_path).paths) == ["a/1.png", "b/2.png"]


def test_links_to_other_places_are_followed(tmp_path):
    touched(tmp_path, "elsewhere/1.png")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "linked").symlink_to(tmp_path / "elsewhere")
    assert names(tmp_path, files_of(tmp_path / "images").paths) == ["images/linked/1.png"]


def test_odd_names_are_kept(tmp_path):
    odd = ["a b.png", "日本.png", "new\nline.png", os.fsdecode(b"\xff.png")]
    touched(tmp_path, *odd)
    assert set(names(tmp_path, files_of(tmp_path).paths)) == set(odd)


def test_a_folder_without_permission_is_left_out_in_words(tmp_path, monkeypatch):
    touched(tmp_path, "a/1.png", "b/2.png")
    scandir = os.scandir

    def forbidden(path):
        if str(path).endswith("b"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", forbidden)
    with pytest.warns(GramwatchWarning, match=r"the folder .*b is left out: Permission denied"):
        assert names(tmp_path, files_of(tmp_path).paths) == ["a/1.png"]


def test_tables_of_paths(tmp_path, monkeypatch):
    touched(tmp_path, "images/a, b.png", "images/c.png")
    table = tmp_path / "images" / "list.csv"
    table.write_text('label,path\ncat,"a, b.png"\ndog,c.png\n,\n', encoding="utf-8-sig")
    result = files_of(table)
    assert names(tmp_path / "images", result.paths) == ["a, b.png", "c.png"]
    assert result.labels == ["cat", "dog"]
    monkeypatch.chdir(tmp_path)
    table.write_text("file\nimages/c.png\n")
    assert files_of(table).paths == ["images/c.png"]  # relative to the working folder


@pytest.mark.parametrize(
    ("text", "reason"),
    [("name,size\na.png,3\n", "has no column of paths"), ("path\n\n", "names no image"), ("", "no column")],
)
def test_tables_without_paths_are_refused(tmp_path, text, reason):
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(DataError, match=reason):
        files_of(tmp_path / "list.csv")


def test_what_is_not_there_is_named(tmp_path):
    for name in ("folder", "list.csv", "image.png"):
        with pytest.raises(MissingDataError, match=name):
            files_of(tmp_path / name)
    touched(tmp_path, "one.png")
    assert files_of(tmp_path / "one.png").paths == [str(tmp_path / "one.png")]


def test_lists_of_paths():
    assert list(listed(["a b.png\n", "\n", "c.png\r\n", "d.png"])) == ["a b.png", "c.png", "d.png"]
