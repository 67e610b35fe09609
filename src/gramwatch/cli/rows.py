"""The table of scores: CSV, JSON lines or Parquet. A run that was stopped goes on where it was.

Until a run is complete, its rows are lines of JSON in a file beside the output, `scores.csv.part`. Its first
line says what is scored with which guard. A line that was cut off is dropped when the run goes on. At the
end the rows are written in the format of the output, and the file beside it is removed. Of several processes,
each has such a file, `scores.csv.rank0of2.part`.
"""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

import typer

from gramwatch.errors import DataError
from gramwatch.files.sheets import as_cell
from gramwatch.files.writing import replacing

FORMATS = ("csv", "jsonl", "parquet")
ROWS_AT_ONCE = 10_000
"""The rows that are written to a Parquet file together."""
Row = dict[str, Any]


def format_of(output: Path, given: str | None) -> str:
    """The format of a file: the given one, or that of its suffix."""
    ending = output.suffix.lower().removeprefix(".")
    chosen = given or ("csv" if str(output) == "-" else ending)
    if chosen not in FORMATS:
        raise typer.BadParameter(
            f"'{output}' does not end in .csv, .jsonl or .parquet: name it so, or give --format",
            param_hint="--format" if given else "--output",
        )
    if chosen == "parquet":
        from gramwatch.report.scores import pyarrow

        pyarrow()  # raises the error that names the extra
        if str(output) == "-":
            raise typer.BadParameter("Parquet cannot be written to a pipe: use csv or jsonl", param_hint="-o")
    return chosen


class Piped:
    """Rows that go to standard output as they come."""

    done: frozenset[str] = frozenset()

    def __init__(self, kind: str, columns: Sequence[str], to: TextIO | None = None) -> None:
        self._write = _writer(kind, to or sys.stdout, columns)
        self._to = to or sys.stdout

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows."""
        for row in rows:
            self._write(row)
        self._to.flush()

    def finish(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Nothing is left to do."""


class Ranked(NamedTuple):
    """Which process this is, of how many, and the number of images in each of their batches."""

    rank: int = 0
    size: int = 1
    batch_size: int = 1

    def parts(self, output: Path) -> list[Path]:
        """The files of the rows of all processes."""
        if self.size == 1:
            return [output.with_name(f"{output.name}.part")]
        return [output.with_name(f"{output.name}.rank{n}of{self.size}.part") for n in range(self.size)]


class Filed:
    """Rows that go to a file. `done` are the paths of rows from an earlier run.

    Several processes have a file each. They take batches in turns, and rank 0 joins the rows in this order.
    """

    def __init__(
        self,
        output: Path,
        kind: str,
        columns: Sequence[str],
        identity: Mapping[str, Any],
        ranked: Ranked = Ranked(),  # noqa: B008
    ) -> None:
        self.output, self.kind, self.columns, self.ranked = output, kind, columns, ranked
        self.parts = ranked.parts(output)
        self.part = self.parts[ranked.rank]
        if ranked.size > 1:
            identity = {**identity, "batch_size": ranked.batch_size}
        self.done: set[str] = set()
        self.earlier = {"flagged": 0, "errors": 0}
        """Counts of the rows of earlier runs."""
        begun = self.part.exists() and self.part.stat().st_size > 0
        if begun:
            end = self._resumed(dict(identity))
            os.truncate(self.part, end)
        self._file = self.part.open("ab")
        if not self._file.tell():
            self._line(dict(identity))
            self._file.flush()

    def _resumed(self, identity: Row) -> int:
        """Count the rows of an earlier run. Return the end of its last whole line."""
        end = 0
        with self.part.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                row = _parsed(line, self.part)
                if number == 0:
                    self._check_same(row, identity)
                else:
                    self.done.add(row["path"])
                    self.earlier["flagged"] += bool(row["is_ood"])
                    self.earlier["errors"] += bool(row["error"])
                end += len(line)
        return end

    def _check_same(self, then: Row, now: Row) -> None:
        for name, value in now.items():
            if then.get(name) != value:
                raise DataError(
                    f"{self.part} was begun with another {name} ({then.get(name)}, now {value}): finish that "
                    "run, delete the file, or name another output"
                )

    def _line(self, row: Row) -> None:
        self._file.write(json.dumps(row).encode() + b"\n")

    def add(self, rows: Iterable[Row]) -> None:
        """Write rows. They are on their way to the disk when this returns."""
        try:
            for row in rows:
                self._line(row)
            self._file.flush()
        except OSError as error:
            raise OSError(
                f"cannot write {self.part}: {error.strerror or error}. The rows before are kept: make room, "
                "and the same command goes on"
            ) from error

    def close(self) -> None:
        """Close the file of a run that is not complete."""
        with suppress(OSError):  # the disk is full, which was said before
            self._file.close()

    def rows(self) -> Iterator[Row]:
        """All rows, of earlier runs and of all processes too, in the order of the images."""
        with ExitStack() as opened:
            files = [opened.enter_context(part.open("rb")) for part in self.parts]
            for file in files:
                next(file)
            while lines := [line for file in files for line in islice(file, self.ranked.batch_size)]:
                yield from map(json.loads, lines)

    def p_values(self) -> Iterator[float]:
        """The p-values of all images that could be read."""
        return (row["p_value"] for row in self.rows() if row["p_value"] is not None)

    def finish(self, added: Callable[[Row], Row] = lambda row: {}) -> None:
        """Write the output, whole or not at all, and remove the file of rows.

        `added` returns the columns that are known only when all rows are.
        """
        self._file.close()
        rows = (row | added(row) for row in self.rows())
        try:
            with replacing(self.output) as beside:
                if self.kind == "parquet":
                    _write_parquet(beside, rows, self.columns)
                else:
                    with beside.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
                        write = _writer(self.kind, file, self.columns)
                        for row in rows:
                            write(row)
        except OSError as error:
            raise OSError(
                f"{error}. All rows are kept in "
                f"{', '.join(map(str, self.parts))}: make room, and the same command writes the output"
            ) from error
        for part in self.parts:
            part.unlink()


def _parsed(line: bytes, part: Path) -> Row:
    with suppress(ValueError):
        row = json.loads(line)
        if isinstance(row, dict):
            return row
    raise DataError(f"{part} is damaged: delete it to score anew")


def _writer(kind: str, file: IO[str], columns: Sequence[str]) -> Any:
    """A function that writes one row."""
    if kind == "jsonl":
        return lambda row: file.write(json.dumps(row) + "\n")
    table = csv.DictWriter(file, columns, lineterminator="\n")
    table.writeheader()
    return lambda row: table.writerow({name: _plain(row.get(name)) for name in columns})


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return as_cell(value)
    return "" if value is None else value


def _write_parquet(path: Path, rows: Iterator[Row], columns: Sequence[str]) -> None:
    from gramwatch.report.scores import pyarrow

    arrow = pyarrow()
    kinds = {"path": arrow.string(), "predicted": arrow.int64()}
    kinds |= {name: arrow.bool_() for name in ("is_ood", "selected")}
    kinds |= {name: arrow.string() for name in ("class", "note", "error")}
    schema = arrow.schema([(name, kinds.get(name, arrow.float64())) for name in columns])
    with arrow.parquet.ParquetWriter(path, schema) as writer:
        while chunk := list(islice(rows, ROWS_AT_ONCE)):
            for row in chunk:  # Parquet holds text in UTF-8 only
                row["path"] = row["path"].encode(errors="surrogateescape").decode(errors="replace")
            table = {name: [row.get(name) for row in chunk] for name in columns}
            writer.write_table(arrow.table(table, schema=schema))
