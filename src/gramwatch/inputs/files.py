"""Finding images: the files of a folder, of a CSV, or of a list of paths."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gramwatch.errors import DataError, MissingDataError, warn
from gramwatch.files.sheets import of_cell
from gramwatch.inputs.sets import missing

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}
PATH_COLUMNS = ("path", "file", "filename", "image")
LABEL_COLUMNS = ("label", "class")


@dataclass(frozen=True)
class Files:
    """Image files, with the names of their classes if these are known."""

    paths: list[str]
    labels: list[str] | None = None
    others: int = 0
    """The number of files that are not images by their names."""

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def classes(self) -> list[str]:
        """The names of the classes, sorted. Empty if they are not known."""
        return sorted(set(self.labels or ()))


def files_of(data: Path) -> Files:
    """The images of a folder or of a CSV, in the order of their paths or of the rows."""
    if data.is_dir():
        return _of_folder(data)
    if data.suffix.lower() in (".csv", ".tsv"):
        return _of_csv(data)
    if data.suffix.lower() in SUFFIXES and data.is_file():
        return Files([str(data)])
    raise missing(data, "folder, CSV or image")


def _of_folder(folder: Path) -> Files:
    paths: list[str] = []
    others = 0
    for path in _walk(folder):
        if Path(path).suffix.lower() in SUFFIXES:
            paths.append(path)
        else:
            others += 1
    if not paths:
        endings = ", ".join(sorted(SUFFIXES))
        raise MissingDataError(f"there is no image in the folder {folder}: no name ends in {endings}")
    return Files(paths, class_folders(paths, folder), others)


def class_folders(files: Sequence[str | Path], folder: Path) -> list[str] | None:
    """The first level of subfolders, for each file. None if there is one alone, or a file beside them."""
    parts = [Path(path).relative_to(folder).parts for path in files]
    if len({part[0] for part in parts}) < 2 or min(map(len, parts)) < 2:
        return None
    return [part[0] for part in parts]


def _walk(folder: Path) -> Iterator[str]:
    """The files below a folder, sorted. Links are followed, each folder is visited once."""
    seen = {_identity(folder)}

    def unreadable(error: OSError) -> None:
        warn(f"the folder {error.filename} is left out: {error.strerror}")

    for place, folders, names in os.walk(folder, followlinks=True, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in list(folders):
            identity = _identity(Path(place) / name)
            if identity in seen:
                folders.remove(name)
            seen.add(identity)
        for name in sorted(names):
            if not name.startswith("."):
                yield os.path.join(place, name)  # noqa: PTH118


def _identity(folder: Path) -> tuple[int, int]:
    """What all links to a folder share."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def _of_csv(table: Path) -> Files:
    """The files that a CSV names. Their paths are relative to the CSV's folder or the working folder."""
    if not table.is_file():
        raise missing(table)
    with table.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.DictReader(file, delimiter="\t" if table.suffix.lower() == ".tsv" else ",")
        columns = list(rows.fieldnames or ())
        column = next((name for name in PATH_COLUMNS if name in columns), None)
        if column is None:
            raise DataError(
                f"{table} has no column of paths: name one of its columns {', '.join(PATH_COLUMNS[:-1])} or "
                f"{PATH_COLUMNS[-1]}. Its columns are {', '.join(map(repr, columns[:8])) or 'none'}"
            )
        label = next((name for name in LABEL_COLUMNS if name in columns), None)
        entries = [(of_cell(row[column] or ""), of_cell(row[label] or "") if label else None) for row in rows]
    named = [(path, name) for path, name in entries if path]
    if not named:
        raise DataError(f"{table} names no image")
    here = not (table.parent / named[0][0]).exists() and Path(named[0][0]).exists()
    paths = [path if here else str(table.parent / path) for path, _ in named]
    labels = [name for _, name in named if name]
    return Files(paths, labels if len(labels) == len(paths) else None)


def listed(lines: Iterable[str]) -> Iterator[str]:
    """The paths of a list, one in each line. Empty lines are left out."""
    for line in lines:
        if path := line.rstrip("\r\n"):
            yield path
