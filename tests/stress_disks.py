"""A full disk and a read-only one: a save, a fit, a scoring, and the state of a monitor.

The disks are small file systems in memory, mounted for one process alone (`unshare`). What was there before
stays whole, the error is one line, and with room the same work succeeds.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tests.stress_common import Row, Skipped

WORK = """
import errno, sys, warnings
from pathlib import Path
import torch
import gramwatch
from gramwatch import Guard, Monitor
from gramwatch.detect import detector
from gramwatch.cli.rows import Filed
from gramwatch.inputs.demo import digits
from tests.stress_common import same, tiny_guard
import subprocess

torch.set_num_threads(1)
kind, disk = sys.argv[1], Path(sys.argv[2])
data, guard = digits(), tiny_guard()
monitor = Monitor(guard)
monitor.update(guard(data.test[:40]))
detector.CHECKPOINT_SECONDS = 0.0
places = {name: disk / name for name in ("guard", "state", "checkpoint")}
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
guard.save(places["guard"])
monitor.save(places["state"])
before = {name: place.read_bytes() for name, place in places.items() if place.exists()}
filler = disk / "filler"
if kind == "full":
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError as error:
            assert error.errno == errno.ENOSPC
else:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)

def fit():
    again = Guard(guard.model, members=tuple(guard.members), orders=[1])
    again.fit(data.train.split(64), checkpoint=places["checkpoint"], progress=False)
    return again

def score():
    rows = Filed(disk / "s.csv", "csv", ["path", "error"], {"guard": "a", "images": "b", "preprocessing": {}})
    try:
        rows.add([{"path": "x" * 200, "error": ""}] * 8000)
        rows.finish()
    finally:
        rows.close()

works = {"save": lambda: guard.save(places["guard"]), "monitor": lambda: monitor.save(places["state"]),
         "fit": fit, "score": score}
for name, work in works.items():
    try:
        work()
        print(name, "did not notice")
        continue
    except (OSError, gramwatch.GramwatchError) as error:
        told = "\\n" not in str(error)
    whole = all(places[key].read_bytes() == value for key, value in before.items())
    print(name, "refused" if told and whole else f"told {told}, whole {whole}")
if kind == "full":
    filler.unlink()
else:
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
works["save"](); works["monitor"](); fit()
right = same(gramwatch.load(places["guard"], guard.model)(data.test), guard(data.test))
right &= Monitor.load(places["state"], guard).seen == 40
left = {path.name for path in disk.iterdir()} - set(places) - {"s.csv.part", "s.csv"}
print("again", "right" if right and not left else f"right {right}, left {left}")
"""
KINDS = {"full": "a full disk", "read-only": "a read-only disk"}


def rows() -> Iterator[Row]:
    for kind, name in KINDS.items():
        yield disk(kind, name)


def disk(kind: str, name: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        words = ["unshare", "-rm", sys.executable, "-W", "ignore", "-c", WORK, kind, folder]
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except FileNotFoundError:
            raise Skipped("there is no unshare here") from None
    if "mount" in done.stderr and done.returncode:
        raise Skipped(f"file systems cannot be mounted here: {done.stderr.strip().splitlines()[-1]:.100}")
    said = done.stdout.splitlines()
    right = [line for line in said if line.endswith(("refused", "right"))]
    if len(right) < 5:
        print(done.stdout, done.stderr[-3000:], file=sys.stderr)
    return Row(
        f"save, fit, score and monitor on {name}",
        5,
        len(right),
        "refused in one line; then, with room, right",
    )
