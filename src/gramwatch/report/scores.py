"""Tables of scores, as `gramwatch score` writes them: CSV, JSON lines or Parquet."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gramwatch.errors import DataError, MissingExtraError
from gramwatch.files.sheets import of_cell

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
Truths = np.ndarray[tuple[int], np.dtype[np.bool_]]

NEEDED = ("path", "predicted", "class", "score", "p_value", "is_ood")
"""The columns that every table has."""


@dataclass(frozen=True)
class Scores:
    """The columns of one table, or of several tables that were joined."""

    names: list[str]
    """The names of the sets."""
    set_of: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    """The number of the set of each image, `(N,)`."""
    paths: list[str]
    predicted: list[str]
    """The name of the predicted class, or its number. Empty if the image could not be read."""
    score: Numbers
    """`(N,)`. Infinite if the network's values were not finite; NaN if the image could not be read."""
    p_value: Numbers
    """`(N,)`; NaN if the image could not be read."""
    is_ood: Truths
    selected: Truths | None
    """Whether an image was selected with `--fdr`. None if that was not asked for."""
    parts: Mapping[str, Numbers]
    """The p-values of the members."""
    notes: list[str]
    errors: list[str]

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def readable(self) -> Truths:
        """Whether an image could be read."""
        return ~np.isnan(self.p_value)

    @cached_property
    def by_score(self) -> list[int]:
        """The numbers of the readable images, the most unusual first."""
        order = np.lexsort((np.where(self.readable, -self.score, 0), np.nan_to_num(self.p_value, nan=2.0)))
        return [int(i) for i in order[: int(self.readable.sum())]]

    def of_set(self, number: int) -> Truths:
        """The readable images of a set."""
        chosen: Truths = self.readable & (self.set_of == number)
        return chosen

    @cached_property
    def folders(self) -> list[str]:
        """The folder of each image."""
        return [path.replace("\\", "/").rpartition("/")[0] for path in self.paths]


def read(files: Iterable[Path]) -> Scores:
    """The tables of several files, joined. Each is a set with the name of its file."""
    tables = [(path, list(_rows(path))) for path in files]
    members: list[str] = []
    for path, rows in tables:
        columns = [name for name in (rows[0] if rows else {}) if name.startswith("p_") and name != "p_value"]
        if rows and members and columns != members:
            raise DataError(f"{path} has the members {_listed(columns)}, another table {_listed(members)}")
        members = members or columns
    if not any(rows for _, rows in tables):
        raise DataError(f"{', '.join(str(path) for path, _ in tables)}: there are no rows")
    return _joined(tables, members)


def _listed(columns: list[str]) -> str:
    return ", ".join(name.removeprefix("p_") for name in columns) or "none"


def _joined(tables: list[tuple[Path, list[dict[str, Any]]]], members: list[str]) -> Scores:
    rows = [row for _, rows in tables for row in rows]
    selected = all("selected" in row for row in rows)
    p_value, score = (_numbers(tables, name) for name in ("p_value", "score"))
    return Scores(
        names=_distinct([path for path, _ in tables]),
        set_of=np.repeat(np.arange(len(tables)), [len(rows) for _, rows in tables]),
        paths=[_text(row["path"]) for row in rows],
        predicted=[_text(row["class"]) or _number_of(row["predicted"]) for row in rows],
        score=np.where(np.isnan(score) & ~np.isnan(p_value), np.inf, score),
        p_value=p_value,
        is_ood=np.array([_truth(row["is_ood"]) for row in rows], dtype=bool),
        selected=np.array([_truth(row["selected"]) for row in rows], dtype=bool) if selected else None,
        parts={name.removeprefix("p_"): _numbers(tables, name) for name in members},
        notes=[_text(row.get("note")) for row in rows],
        errors=[_text(row.get("error")) for row in rows],
    )


def _distinct(paths: list[Path]) -> list[str]:
    """The names of the files without their endings, or the whole paths if two are equal."""
    names = [_text(path.stem) for path in paths]
    return names if len(set(names)) == len(names) else [_text(str(path)) for path in paths]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one file."""
    kind = path.suffix.lower()
    reader = {".jsonl": _lines, ".parquet": _parquet}.get(kind, _csv)
    for row in reader(path):
        missing = [name for name in NEEDED if name not in row]
        if missing:
            raise DataError(
                f"{path} is not a table of 'gramwatch score': it has no column {', '.join(missing)}"
            )
        yield row


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        try:
            for row in csv.DictReader(file):
                yield {name: of_cell(cell) if isinstance(cell, str) else cell for name, cell in row.items()}
        except csv.Error as error:
            raise DataError(f"{path} is not a CSV file: {error}") from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: not a JSON object")
            yield row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    arrow = pyarrow()
    try:
        for batch in arrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except arrow.ArrowException as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from None


def pyarrow() -> Any:
    """pyarrow, or an error that names the extra."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise MissingExtraError(
            "Parquet needs pyarrow: install it with pip install 'gramwatch[parquet]'"
        ) from None
    return pyarrow


def _numbers(tables: list[tuple[Path, list[dict[str, Any]]]], name: str) -> Numbers:
    """A column of numbers. An empty cell is NaN."""
    numbers = []
    for path, rows in tables:
        for number, row in enumerate(rows, 1):
            value = row.get(name)
            try:
                numbers.append(np.nan if value in (None, "") else float(value))
            except (TypeError, ValueError):
                raise DataError(f"{path}, row {number}: {name} is {value!r}, not a number") from None
    return np.array(numbers, dtype=np.float64)


def _text(value: Any) -> str:
    """The text of a cell. Bytes of a path that are not UTF-8 are replaced."""
    return "" if value is None else str(value).encode(errors="surrogateescape").decode(errors="replace")


def _number_of(value: Any) -> str:
    return "" if value in (None, "") else str(value)


def _truth(value: Any) -> bool:
    return value is True or value == "true"
