"""`gramwatch score --nproc`: several processes write the table that one would."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gramwatch.cli.rows import Filed, Ranked
from tests.cli.invoking import invoke, told

ROOT = Path(__file__).parents[2]
COLUMNS = ["path", "is_ood", "error"]


def started(own, *words):
    paths = os.pathsep.join([str(own.folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "gramwatch", *own.score, *words]
    return subprocess.Popen(
        [str(word) for word in command], env={**os.environ, "PYTHONPATH": paths}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_two_processes_write_the_table_of_one_and_go_on_after_a_kill(own, tmp_path):
    one, two = tmp_path / "one.csv", tmp_path / "two.csv"
    assert invoke(*own.score, own.test, "--batch-size", 6, "-o", one).exit_code == 0
    words = (own.test, "--batch-size", 6, "--nproc", 2, "-o", two)
    process = started(own, *words)
    parts = [tmp_path / f"two.csv.rank{rank}of2.part" for rank in range(2)]
    until = time.monotonic() + 120
    while not any(part.exists() and part.stat().st_size > 500 for part in parts) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    assert two.exists() or any(part.exists() for part in parts)
    done = started(own, *words, "--overwrite", "--json")
    said, errors = done.communicate(timeout=170)
    assert done.returncode == 0, errors
    assert two.read_text() == one.read_text()
    assert json.loads(said)["images"] == 40
    assert errors.count("images flagged; about 2 would be") == 1  # nothing is said twice
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.csv", "two.csv"]


def test_rows_of_processes_are_joined_in_the_order_of_the_images(tmp_path):
    output, names = tmp_path / "scores.jsonl", [f"{n}.png" for n in range(11)]
    for rank in (2, 1, 0):
        rows = Filed(output, "jsonl", COLUMNS, {"guard": "x"}, Ranked(rank, 3, 2))
        rows.add([row(name) for i, name in enumerate(names) if i // 2 % 3 == rank])
        if rank:
            rows.close()
    rows.finish()
    assert [json.loads(line)["path"] for line in output.read_text().splitlines()] == names
    assert [path.name for path in tmp_path.iterdir()] == ["scores.jsonl"]


def row(name: str) -> dict[str, object]:
    return {"path": name, "is_ood": False, "error": ""}


def test_a_run_with_another_size_of_batches_does_not_go_on(tmp_path):
    Filed(tmp_path / "s.csv", "csv", COLUMNS, {"guard": "x"}, Ranked(0, 2, 4)).close()
    with pytest.raises(OSError, match="was begun with another batch_size"):
        Filed(tmp_path / "s.csv", "csv", COLUMNS, {"guard": "x"}, Ranked(0, 2, 8))


@pytest.mark.parametrize(
    ("images", "output", "reason"),
    [
        ("-", "s.csv", "standard input is read by one process"),
        ("test", "-", "several processes write a file"),
    ],
)
def test_what_cannot_be_shared_is_refused(own, tmp_path, images, output, reason):
    place = own.test if images == "test" else images
    result = invoke(*own.score, place, "--nproc", 2, "-o", output if output == "-" else tmp_path / output)
    assert result.exit_code == 2
    assert reason in told(result)
