"""Files of results in docs/, read so that an error names the file and the cell that is missing."""

import csv
import functools
import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"


class MissingCellError(LookupError):
    """A file of results lacks a cell, or is missing."""


class Cells(dict[Any, Any]):
    """A mapping that names its file when a key is missing."""

    def __init__(self, values: dict[Any, Any], source: str) -> None:
        super().__init__({key: named(value, f"{source}, {key}") for key, value in values.items()})
        self.source = source

    def __missing__(self, key: Any) -> Any:
        raise MissingCellError(f"{self.source}: there is no {key!r}")


def named(value: Any, source: str) -> Any:
    """JSON whose mappings name the place where they stand."""
    if isinstance(value, dict):
        return Cells(value, source)
    if isinstance(value, list):
        return [named(entry, f"{source}, {place}") for place, entry in enumerate(value)]
    return value


def text_of(name: str) -> str:
    """The text of a file in docs/."""
    if not (DOCS / name).is_file():
        raise MissingCellError(f"docs/{name} is missing")
    return (DOCS / name).read_text(encoding="utf-8")


@functools.cache
def data(name: str) -> Any:
    """A JSON file in docs/."""
    return named(json.loads(text_of(name)), f"docs/{name}")


@functools.cache
def rows(name: str) -> list[Cells]:
    """The rows of a CSV file in docs/."""
    lines = csv.DictReader(text_of(name).splitlines())
    return [Cells(row, f"docs/{name}, row {place}") for place, row in enumerate(lines, 2)]


def cell(name: str, column: str, **keys: str) -> float:
    """The number in a column of the row with these keys."""
    for row in rows(name):
        if all(row[key] == value for key, value in keys.items()) and row[column]:
            return float(row[column])
    raise MissingCellError(f"docs/{name}: there is no {column} of {', '.join(keys.values())}")
