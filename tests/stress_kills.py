"""SIGKILL at random moments of a fit, a save, a scoring, a download and a monitored stream.

A child process works, and is killed at a random moment. Then the files are looked at, the work is done again
as a user would, and the result is compared with that of a run that was not disturbed.
"""

import contextlib
import hashlib
import http.server
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gramwatch
from gramwatch import Guard, Monitor
from gramwatch.detect import detector
from gramwatch.inputs.demo import digits
from gramwatch.inputs.sets import Raw, Source
from gramwatch_lab.datasets import Download, download
from tests.cli.invoking import invoke
from tests.cli.own import PACKAGE, PREPARED, write_classes
from tests.stress_common import Row, file_of, noise, same, tiny_guard

MOMENTS = 10


def rows(moments: int = MOMENTS, seed: int = 0) -> Iterator[Row]:
    torch.set_num_threads(1)  # children are forked
    rng = random.Random(seed)
    for check in (fitting, saving, scoring, downloading, monitoring):
        with tempfile.TemporaryDirectory() as folder:
            yield check(Path(folder), moments, rng)


def seconds_of(work: Callable[[], None]) -> float:
    """How long a child process takes that is not disturbed."""
    begin = time.monotonic()
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
    return time.monotonic() - begin


def killed(work: Callable[[], None], after: float) -> bool:
    """Kill a child process after so many seconds. Return whether it was still at work."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    time.sleep(after)
    assert child.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    child.join()
    return child.exitcode == -signal.SIGKILL


def disturbed(
    what: str, work: Callable[[], None], check: Callable[[], bool], moments: int, rng: random.Random,
    clean: Callable[[], None] = lambda: None,
) -> Row:  # fmt: skip
    """Kill the work at random moments. `check` looks at what is left, does the work again, and compares."""
    clean()
    whole = seconds_of(work)
    survived = inside = after = 0
    while inside < moments and after < 5 * moments:
        clean()
        if killed(work, rng.uniform(0, whole)):
            inside += 1
            survived += check()
        else:  # the machine was faster this time
            after += 1
    return Row(what, inside, survived, "then done again: the same result, nothing left behind")


def emptied(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


# --- fit ---------------------------------------------------------------------------------------------


def fitting(root: Path, moments: int, rng: random.Random) -> Row:
    """A fit with a checkpoint after every batch. Fitting again goes on, and ends with the same guard."""
    data, whole, folder = digits(), tiny_guard(), root / "fit"
    path, checkpoint = folder / "guard.safetensors", folder / "checkpoint.safetensors"

    def fit(pause: float = 0.03) -> Guard:
        def batches() -> Iterator[torch.Tensor]:
            for batch in data.train.split(64):
                time.sleep(pause)
                yield batch

        guard = Guard(whole.model, members=tuple(whole.members), orders=[1])
        guard.fit(batches(), checkpoint=checkpoint, progress=False)
        guard.calibrate([data.validation], progress=False).save(path)
        return guard

    def check() -> bool:
        if checkpoint.exists():
            gramwatch.files.artifact.read(checkpoint)  # raises an error if it is damaged
        if path.exists() and not same(gramwatch.load(path, whole.model)(data.test), whole(data.test)):
            return False
        again = fit(0)
        return same(again(data.test), whole(data.test)) and [*folder.iterdir()] == [path]

    before, detector.CHECKPOINT_SECONDS = detector.CHECKPOINT_SECONDS, 0.0
    try:
        return disturbed(
            "SIGKILL during a fit", lambda: void(fit()), check, moments, rng, lambda: emptied(folder)
        )
    finally:
        detector.CHECKPOINT_SECONDS = before


def void(_: Any) -> None:
    """Nothing: what a child process returns is lost."""


# --- save --------------------------------------------------------------------------------------------


def saving(root: Path, moments: int, rng: random.Random) -> Row:
    """Two guards are saved to the same place in turns. What is there is always one of them, whole."""
    data, one, other = digits(), tiny_guard(), tiny_guard(("energy",))
    path = root / "guard.safetensors"
    expected = [one(data.test), other(data.test)]

    def save() -> None:
        for number in range(60):
            (other if number % 2 else one).save(path)

    def check() -> bool:
        result = gramwatch.load(path, one.model)(data.test)
        one.save(path)  # removes what the killed process left
        return any(same(result, name) for name in expected) and [*root.iterdir()] == [path]

    one.save(path)
    return disturbed("SIGKILL during a save", save, check, moments, rng)


# --- score -------------------------------------------------------------------------------------------


def scoring(root: Path, moments: int, rng: random.Random) -> Row:
    """`gramwatch score` with a decoding process. The same command goes on, and ends with the same table."""
    name = "gramwatch_stress_net"
    (root / f"{name}.py").write_text(PACKAGE)
    sys.path.insert(0, str(root))
    write_classes(root / "train", 60, seed=1)
    write_classes(root / "test", 60, seed=2)
    guard, folder = root / "guard.safetensors", root / "scores"
    prepared = [*PREPARED, "--workers", 0, "--device", "cpu", "-q"]
    few = ["--members", "energy,gram", "--hold-out", 0.5]
    fitted = invoke("fit", f"{name}:build", root / "train", "-o", guard, *few, *prepared)
    assert fitted.exit_code == 0, fitted.output
    words = ["score", guard, root / "test", "--model", f"{name}:build", "--batch-size", 2, "--device", "cpu"]

    def score(path: Path = folder / "s.csv", workers: int = 1) -> None:
        result = invoke(*words, "--workers", workers, "-o", path, "-q")
        assert result.exit_code == 0, result.output

    def check() -> bool:
        done = (folder / "s.csv").exists()
        if not done:
            score()
        same_table = (folder / "s.csv").read_bytes() == (root / "whole.csv").read_bytes()
        return same_table and [*folder.iterdir()] == [folder / "s.csv"]

    score(root / "whole.csv", 0)
    try:
        return disturbed(
            "SIGKILL during `gramwatch score`", score, check, moments, rng, lambda: emptied(folder)
        )
    finally:
        sys.path.remove(str(root))


# --- download ----------------------------------------------------------------------------------------


def archive() -> bytes:
    rng, file = np.random.default_rng(0), BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for number in range(400):
            data = file_of(noise(rng))
            entry = tarfile.TarInfo(f"photos/{number % 4}/{number:03d}.png")
            entry.size = len(data)
            tar.addfile(entry, BytesIO(data))
    return file.getvalue()


@contextlib.contextmanager
def publisher(data: bytes) -> Iterator[str]:
    """A server that sends an archive slowly, from where the client asks."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first = int((self.headers.get("Range") or "bytes=0-")[6:-1])
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            with contextlib.suppress(OSError):  # the client was killed
                for start in range(first, len(data), 1 << 16):
                    self.wfile.write(data[start : start + (1 << 16)])
                    time.sleep(0.02)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/photos.tar.gz"
    finally:
        server.shutdown()


def downloading(root: Path, moments: int, rng: random.Random) -> Row:
    """A download and its unpacking. Getting it again goes on. No half of the set is taken for all of it."""
    data, folder = archive(), root / "data"
    with publisher(data) as url:
        file = Download(url, None, sha256=hashlib.sha256(data).hexdigest(), size=len(data))
        source = Source("photos", "", "photos", lambda *_: Raw([]), downloads=(file,))

        def get() -> None:
            download.get(source, folder, say=lambda _: None)

        def pictures() -> dict[str, bytes]:
            return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.png")}

        def check() -> bool:
            get()
            left = {path.name for path in folder.iterdir()}
            return pictures() == expected and left == {"photos", "photos.tar.gz"}

        get()
        expected = pictures()
        assert len(expected) == 400
        return disturbed("SIGKILL during a download", get, check, moments, rng, lambda: emptied(folder))


# --- monitor -----------------------------------------------------------------------------------------


def monitoring(root: Path, moments: int, rng: random.Random) -> Row:
    """A monitor that is saved after every batch. It goes on from its last state and ends in the same one."""
    guard, folder = tiny_guard(), root / "monitor"
    stream = [guard(batch) for batch in digits().test.split(8)]
    path = folder / "state.safetensors"

    def watch(place: Path = path) -> None:
        monitor = Monitor.load(place, guard) if place.exists() else Monitor(guard)
        for result in stream[monitor.seen // 8 :]:
            monitor.update(result)
            monitor.save(place)

    def check() -> bool:
        watch()
        return path.read_bytes() == (root / "whole").read_bytes() and [*folder.iterdir()] == [path]

    watch(root / "whole")
    return disturbed("SIGKILL during a monitored stream", watch, check, moments, rng, lambda: emptied(folder))
