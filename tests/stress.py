"""Everything that can go wrong, made to go wrong: `make stress`, or `python -m tests.stress --help`.

The parts are `kills`, `disks`, `service`, `memory`, `long`, `fuzz` and `install`. Every line of the table
says how often something was tried, survived and lost. The exit code is 1 if anything was lost. `--write`
keeps the result in docs/data/stress.json, and puts the table into docs/reliability.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.benchmarks import document
from lab.benchmarks.measure import machine
from tests import stress_disks, stress_install, stress_kills, stress_long, stress_memory, stress_service
from tests.stress_common import Row, Skipped

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "stress.json"
FUZZ_SECONDS = 60


def fuzzed() -> Iterator[Row]:
    """`make fuzz`, for a minute."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--seconds", str(FUZZ_SECONDS)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    total = re.search(r"^all +tried +([\d,]+) +failed +(\d+)", done.stdout, re.MULTILINE)
    if done.returncode or total is None:
        print(done.stdout[-3000:], done.stderr[-3000:], file=sys.stderr)
    tried, failed = (int(group.replace(",", "")) for group in total.groups()) if total else (1, 1)
    yield Row("damaged and forged files", tried, tried - failed, "refused in words, or sound")


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "kills": stress_kills.rows,
    "disks": stress_disks.rows,
    "service": stress_service.rows,
    "memory": stress_memory.rows,
    "long": stress_long.rows,
    "fuzz": fuzzed,
    "install": stress_install.rows,
}


def measured(part: str) -> dict[str, Any]:
    """The rows of a part, and what could not be tried here."""
    rows: list[Row] = []
    skipped = ""
    begin = time.monotonic()
    try:
        for row in PARTS[part]():
            print(line(row.to_json()), flush=True)
            rows.append(row)
    except Skipped as reason:
        skipped = str(reason)
        print(f"| not tried: {skipped} |", flush=True)
    return {
        "rows": [row.to_json() for row in rows],
        "skipped": skipped,
        "minutes": round((time.monotonic() - begin) / 60, 1),
        "machine": machine(torch.device("cpu")),
    }


# --- the table ---------------------------------------------------------------------------------------


def line(row: dict[str, Any]) -> str:
    counts = " | ".join(f"{row[name]:,}" for name in ("tried", "survived", "lost"))
    return f"| {row['what']} | {counts} | {row['found']} |"


def table(result: dict[str, Any]) -> str:
    """The table of docs/reliability.md."""
    rows = [row for part in PARTS for row in result.get(part, {}).get("rows", [])]
    skipped = [
        f"- Not tried: {result[part]['skipped']}" for part in PARTS if result.get(part, {}).get("skipped")
    ]
    head = ["| what | tried | survived | lost | |", "| --- | ---: | ---: | ---: | --- |"]
    return "\n".join([*head, *map(line, rows), *(["", *skipped] if skipped else [])])


def keep(part: str, table: dict[str, Any]) -> None:
    """Write the result of a part into docs/."""
    result = (json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}) | {part: table}
    DATA.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    document.write()


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="what to try; by default all")
    parser.add_argument("--write", action="store_true", help="keep the result in docs/")
    options = parser.parse_args(given)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print("| what | tried | survived | lost | |", flush=True)
    results = {}
    for part in options.parts or PARTS:
        results[part] = measured(part)
        if options.write:  # after each part: what comes later may be interrupted
            keep(part, results[part])
    lost = sum(row["lost"] for part in results.values() for row in part["rows"])
    print(f"lost: {lost}")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
