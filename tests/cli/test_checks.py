"""What is checked before a command begins."""

from pathlib import Path


def test_the_check_of_a_folder_leaves_nothing_but_the_folder(tmp_path: Path) -> None:
    from gramwatch.cli.checks import writable_folder

    writable_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a").rglob("*")) == [tmp_path / "a" / "b"]
