"""The service under a memory limit of the operating system, with thin, huge and slow images."""

import base64
import csv
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image

from tests.stress_common import Row, Skipped, file_of, memory_of
from tests.stress_service import NETWORK, Guarded, Service

MEMORY = 1536 * 2**20
"""Bytes that the service may take beyond those it has when it is ready."""
JUDGE_SECONDS = 10
"""How long a request may take. Answers may come later: a decoder at work is not interrupted."""
ANSWERS = {200, 400, 413, 429, 503}
ROUNDS = 3
COLOUR = (90, 120, 30)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        guarded = Guarded.made(Path(folder))
        for name, images in (("thin", thin()), ("huge", huge()), ("slow", slow())):
            with served(guarded) as service, limited(service) as before:
                yield one_by_one(service, name, images, before)
                yield at_once(service, name, images, before)
        with served(guarded) as service, limited(service) as before:
            yield bodies(service, before)
            most = memory_of(service.process.pid, "VmSize") + MEMORY
        yield scored(guarded, [*thin(), *huge(), *slow()], most)


def served(guarded: Guarded) -> AbstractContextManager[Service]:
    return guarded.served("--judge-seconds", JUDGE_SECONDS)


@contextmanager
def limited(service: Service) -> Iterator[int]:
    """The system refuses memory to the service beyond what it has now and `MEMORY`. Yields what is in use."""
    pid = service.process.pid
    limit(pid, memory_of(pid, "VmSize") + MEMORY)
    yield memory_of(pid)


def limit(pid: int, most: int) -> None:
    """The most memory of a process, 0 for this one, in bytes of its address space."""
    try:
        from resource import RLIMIT_AS, prlimit
    except ImportError:
        raise Skipped("this system limits the memory of no running process") from None
    prlimit(pid, RLIMIT_AS, (most, most))


# --- images ------------------------------------------------------------------------------------------


def thin() -> list[bytes]:
    """A few kilobytes each. Resized whole, each would have up to a thousand million times the pixels."""
    sizes = [(1_000_000, 1), (1, 1_000_000), (40_000_000, 1), (1, 40_000_000), (16_000_000, 3), (5, 500_000)]
    files = [file_of(Image.new("L", size, 90)) for size in sizes]
    for kind, longest in (
        ("JPEG", 65_500),
        ("WEBP", 16_383),
        ("GIF", 65_535),
        ("BMP", 500_000),
        ("TIFF", 500_000),
    ):
        files += [file_of(Image.new("RGB", size, COLOUR), kind) for size in ((longest, 1), (1, longest))]
    return files


def huge() -> list[bytes]:
    """As many pixels as an image may have, and more."""
    most, files = Image.new("RGB", (7000, 7000), COLOUR), []
    for kind, options in (
        ("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {"method": 0}), ("GIF", {}),
        ("WEBP", {"lossless": True, "method": 0}), ("TIFF", {"compression": "tiff_adobe_deflate"}),
    ):  # fmt: skip
        files.append(_saved(most, kind, **options))
    files.append(file_of(Image.new("I;16", (7000, 7000), 300)))
    files.append(_saved(most.quantize(4), "PNG", transparency=0))
    files.append(file_of(Image.new("1", (20_000, 20_000))))
    files.append(_saved(Image.new("L", (16_383, 16_383)), "WEBP", lossless=True, method=0))
    files.append(tiled(64, 60_000))
    return files


def slow() -> list[bytes]:
    """Small files that take long to decode, or whose headers take long to read."""
    scans = _saved(Image.new("RGB", (7000, 7000), COLOUR), "JPEG", progressive=True)
    small = _saved(Image.new("RGB", (500, 500), COLOUR), "JPEG", progressive=True)
    frames = file_of(Image.new("P", (2, 2)), "GIF")
    chunk = b"\0\0\0\0teXt" + struct.pack(">I", zlib.crc32(b"teXt"))
    return [
        *(
            image[:-2] + image[image.rfind(b"\xff\xda") : -2] * 20_000 + image[-2:]
            for image in (scans, small)
        ),
        b"P6 2300 2300 254\n" + bytes(2300 * 2300 * 3),
        b"P6 1500 1500 254\n" + bytes(1500 * 1500 * 3),
        b"P2 2800 2800 255\n" + b"1 " * 2800 * 2800,
        frames[:-1] + frames[frames.find(b",") : -1] * 500_000 + b";",
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I4s", 13, b"IHDR") + bytes(17) + chunk * 1_000_000,
        b"\xff\xd8" + b"\xff\xe1\0\2" * 3_000_000,
    ]


def tiled(side: int, tile: int) -> bytes:
    """A small TIFF in one tile that is far larger than the image."""
    data = zlib.compress(bytes(10_000_000))
    entries = [
        (256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile), (324, 8),
        (325, len(data)),
    ]  # fmt: skip
    table = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return (
        struct.pack("<2sHI", b"II", 42, 8 + len(data))
        + data
        + struct.pack("<H", len(entries))
        + table
        + bytes(4)
    )


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


# --- requests ----------------------------------------------------------------------------------------


def asked(service: Service, body: bytes, kind: str = "image/png", path: str = "/score") -> tuple[int, float]:
    """The status, 0 if there is no answer, and the seconds until it."""
    begin = time.monotonic()
    try:
        status, answer = service.ask("POST", path, body, **{"Content-Type": kind})
        understood = ("error" in json.loads(answer)) == (status != 200)
    except (OSError, ValueError):
        return 0, time.monotonic() - begin
    return status if understood else 0, time.monotonic() - begin


def told(service: Service, statuses: list[int], slowest: float, before: int) -> str:
    grown = (memory_of(service.process.pid, "VmHWM") - before) / 2**20
    counted = ", ".join(map(str, sorted(set(statuses))))
    return f"answers {counted}; slowest {slowest:.1f} s; memory grew by at most {grown:.0f} MiB"


def one_by_one(service: Service, name: str, images: list[bytes], before: int) -> Row:
    peaks = [asked(service, image) for image in images]
    statuses = [status for status, _ in peaks]
    survived = sum(status in ANSWERS for status in statuses) if service.alive else 0
    what = f"{name} images, with {MEMORY / 2**30:g} GiB of memory"
    return Row(
        what, len(images), survived, told(service, statuses, max(seconds for _, seconds in peaks), before)
    )


def at_once(service: Service, name: str, images: list[bytes], before: int, clients: int = 8) -> Row:
    """Eight clients at a time, and another one with ordinary images meanwhile."""
    rng = random.Random(0)
    order = [image for _ in range(ROUNDS) for image in rng.sample(images, len(images))]
    with ThreadPoolExecutor(clients) as pool:
        jobs = [pool.submit(asked, service, image) for image in order]
        others = []
        while not all(job.done() for job in jobs):
            others.append(asked(service, service.images[0]))
            time.sleep(0.05)
    statuses = [job.result()[0] for job in jobs]
    survived = sum(status in ANSWERS for status in statuses)
    served = sum(status == 200 for status, _ in others)
    patience = max(seconds for _, seconds in others)
    return Row(
        f"{name} images, {clients} at a time, and {len(others)} ordinary ones meanwhile",
        len(order) + len(others),
        survived + served if service.alive else 0,
        f"{told(service, statuses, max(job.result()[1] for job in jobs), before)}; an ordinary image took "
        f"at most {patience:.1f} s",
    )


def bodies(service: Service, before: int) -> Row:
    """Bodies of millions of small values, and many large images in one request."""
    large = base64.b64encode(file_of(Image.new("L", (7000, 7000)))).decode()
    values = b",".join(b'"%d":0' % number for number in range(1_000_000))
    given = [
        ("/score", "application/json", b'{"images": [' + b'"",' * 5_000_000 + b'""]}'),
        ("/score", "application/json", b'{"images": [' + b"[" * 15_000_000),
        ("/score", "application/json", b'{"images": ' + b"1" * 15_000_000 + b"}"),
        ("/score", "application/json", json.dumps({"images": [large] * 32}).encode()),
        ("/v2/models/guard/infer", "application/json", b'{"parameters": {' + values + b"}}"),
        ("/score", "multipart/form-data; boundary=x", b"--x\r\n" * 3_000_000),
        ("/score", "multipart/form-data; boundary=x", b"--x\r\nfilename\r\n\r\n" + bytes(15_000_000)),
    ]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(asked, service, body, kind, path) for path, kind, body in given * ROUNDS]
        answers = [job.result() for job in jobs]
    statuses = [status for status, _ in answers]
    survived = sum(status in ANSWERS - {200} for status in statuses) if service.alive else 0
    slowest = max(seconds for _, seconds in answers)
    return Row(
        "bodies of millions of values, four at a time",
        len(answers),
        survived,
        told(service, statuses, slowest, before),
    )


def scored(guarded: Guarded, images: list[bytes], most: int) -> Row:
    """`gramwatch score` over all of them, and a FIFO that nobody writes to. Each has its row."""
    folder, table = guarded.folder / "images", guarded.folder / "scores.csv"
    folder.mkdir()
    for number, image in enumerate(images):
        (folder / f"{number:03d}.png").write_bytes(image)
    os.mkfifo(folder / "fifo.png")
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "gramwatch", "score", "guard.safetensors", folder, "-o", table,
         "--model", f"{NETWORK}:build", "--device", "cpu", "--workers", "0"],
        cwd=guarded.folder, capture_output=True, text=True, preexec_fn=lambda: limit(0, most),
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return Row("images scored", len(images) + 1, 0, f"exit code {done.returncode}")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    errors = sum(bool(row["error"]) for row in rows)
    return Row(
        "`gramwatch score` over these images and a FIFO, with the same memory",
        len(images) + 1,
        sum(bool(row["error"]) != bool(row["score"]) for row in rows),
        f"{len(rows) - errors} verdicts and {errors} errors, in {time.monotonic() - begin:.0f} s",
    )
