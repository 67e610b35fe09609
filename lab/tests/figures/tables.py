"""Tables of scores for tests."""

import csv
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = "path predicted class score p_value is_ood p_gram p_energy note error".split()
ROWS: list[list[Any]] = [
    ["a/1.png", 0, "cat", 0.5, 0.6, False, 0.5, 0.7, "", ""],
    ["a/2.png", 1, "dog", 9.0, 0.01, True, 0.01, 0.8, "", ""],
    ["a/3.png", 1, "dog", None, 0.01, True, 0.01, 0.01, "", ""],
    ["b/4.png", 0, "cat", 0.7, 0.5, False, 0.4, 0.3, "first of 4 frames", ""],
    ["b/5.png", 2, "", 3.0, 0.04, True, 0.3, 0.02, "", ""],
    ["b/6.png", None, "", None, None, None, None, None, "", "the file is empty"],
]


def plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else value


def write_csv(path: Path, rows: list[list[Any]] | None = None) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in ROWS if rows is None else rows:
            table.writerow([plain(value) for value in row])
    return path


def many(count: int, folder: str = "camera", seed: int = 0) -> list[list[Any]]:
    """Rows of made-up images, of which every fifth is flagged."""
    rng = np.random.default_rng(seed)
    rows: list[list[Any]] = []
    for i in range(count):
        odd, number = i % 5 == 0, int(rng.integers(0, 4))
        p = float(rng.integers(1, 15) if odd else rng.integers(16, 301)) / 301
        parts = [float(rng.integers(1, 15 if odd else 301)) / 301 for _ in range(2)]
        score = float(rng.normal() + 5 * odd)
        path = f"{folder}/{'front' if i % 2 else 'back'}/recording-2026-11-16-{i:06d}.jpeg"
        rows.append([path, number, ["cat", "dog", "cow", "elk"][number], score, p, odd, *parts, "", ""])
    return rows
