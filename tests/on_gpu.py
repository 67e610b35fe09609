"""The tests that need a GPU: `make test-cuda`, or `python -m tests.on_gpu --help`.

They have the marker `cuda`, and are skipped elsewhere. The tests of the kernels run on the GPU too. With
`--write`, docs/reliability.md says when all of them passed last, and on what.
"""

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lab.benchmarks import document
from lab.benchmarks.measure import save

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "on_gpu.json"
SELECTIONS = (("-m", "cuda", "tests"), ("tests/kernels",))
"""The arguments of pytest, run by run."""


def passed(selection: Sequence[str]) -> int:
    """Run tests. Return how many passed; an error ends the program if one failed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *selection], cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout[-5000:], done.stderr[-5000:], flush=True)
    count = re.search(r"(\d+) passed", done.stdout)
    if done.returncode or count is None:
        sys.exit("these tests did not pass")
    return int(count[1])


def record(kept: Mapping[str, Any]) -> str:
    """The record of a pass, in a line."""
    if not kept["passed"]:
        return "No pass is recorded yet."
    tests, kernels = kept["passed"]
    return f"Last recorded pass: {kept['date']}, {tests} tests and {kernels} of the kernels, on {kept['on']}."


def main(given: Sequence[str] | None = None) -> None:
    """Run all tests that need a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_gpu", description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="keep the record of a pass in docs/reliability.md"
    )
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        sys.exit("there is no CUDA device: these tests need one")
    counts = [passed(selection) for selection in SELECTIONS]
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    kept = {"passed": counts, "date": str(datetime.date.today()), "on": where}
    print(record(kept))
    if options.write:
        save(DATA, kept)
        document.write()


if __name__ == "__main__":
    main()
