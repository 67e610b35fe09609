"""The service under load, with hostile requests, slow clients and clients that go away. All on loopback."""

import base64
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from gramwatch import Guard
from gramwatch.inputs import networks
from gramwatch.inputs.decoding import FORMATS
from gramwatch.inputs.preprocessing import Preprocessing
from tests.stress_common import Row, Skipped, file_of, memory_of, noise

PREPARE = Preprocessing((32, 32), 32, "bilinear", (0.5,) * 3, (0.25,) * 3)
LOAD_SECONDS = 60
MUTATIONS = 2000
SLOWEST = 20.0
"""The longest that a hostile request may take, in seconds."""
MOST_SLOWER = 10
"""How much the 99th percentile of the latency may grow when there are more clients than places."""
NETWORK = "gramwatch_stress_resnet"
SOURCE = """
import torch
from gramwatch.inputs import networks

def build():
    torch.manual_seed(0)
    return networks.build("NAME").eval()
"""


def rows(load_seconds: int = LOAD_SECONDS) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        guarded = Guarded.made(Path(folder))
        with guarded.served() as service:
            yield schemathesis(service)
            yield mutated(service)
            yield slow(service)
            yield gone(service)
        yield shut_down(guarded)
        yield from load(guarded, load_seconds)
        yield exported(guarded)
    yield overhead()
    with tempfile.TemporaryDirectory() as folder:
        yield explained(Guarded.made(Path(folder), "resnet18"))


# --- a service ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Service:
    address: str
    process: "subprocess.Popen[str]"
    images: list[bytes]

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=SLOWEST)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def score(self, image: bytes) -> int:
        return self.ask("POST", "/score", image)[0]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None and self.score(self.images[0]) == 200

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the process so far. They do not depend on what else the machine does."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def memory(self) -> int:
        return memory_of(self.process.pid)

    def connected(self) -> socket.socket:
        host, port = self.address.split(":")
        return socket.create_connection((host, int(port)), timeout=SLOWEST)


@dataclass(frozen=True)
class Guarded:
    """A network with random weights, its guard in a file, and images."""

    folder: Path
    guard: Guard
    images: list[bytes]

    @staticmethod
    def made(folder: Path, name: str = "resnet20") -> "Guarded":
        rng = np.random.default_rng(0)
        (folder / f"{NETWORK}.py").write_text(SOURCE.replace("NAME", name))
        torch.manual_seed(0)
        network = networks.build(name).eval()
        files = [file_of(noise(rng)) for _ in range(64)]
        inputs = torch.randn(400, 3, 32, 32, generator=torch.Generator().manual_seed(1)).clamp(-2, 2)
        guard = Guard(network)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the network is not trained
            guard.fit(inputs[:200].split(50), progress=False).calibrate([inputs[200:]], progress=False)
        guard.metadata["preprocessing"] = PREPARE.to_json()
        guard.save(folder / "guard.safetensors")
        return Guarded(folder, guard, files)

    @contextlib.contextmanager
    def served(self, *words: object, exported: bool = False) -> Iterator[Service]:
        """`gramwatch serve` in a process of its own, with one thread for the network."""
        guard = ["guard.onnx"] if exported else ["guard.safetensors", "--model", f"{NETWORK}:build"]
        command = [
            sys.executable, "-m", "gramwatch", "serve", *guard, "--port", "0", "--device", "cpu",
            "--read-seconds", "3", *map(str, words),
        ]  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.folder, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if match := re.search(r"listening at http://(\S+)", line):
                break
        else:
            raise RuntimeError(f"the service did not start: {said}")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield Service(match.group(1), process, self.images)
        finally:
            process.kill()
            process.wait()


# --- hostile requests --------------------------------------------------------------------------------


def schemathesis(service: Service) -> Row:
    """Requests made from our OpenAPI, right and wrong ones. No answer is a server's error."""
    tool = shutil.which("schemathesis") or shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    if tool is None:
        raise Skipped("schemathesis is not installed: pip install 'gramwatch[stress]'")
    # An image file is bytes to OpenAPI: bytes that are no image fit it, and are refused all the same.
    done = subprocess.run(
        [tool, "run", f"http://{service.address}/openapi.json", "--seed", "1", "--max-examples", "60",
         "--exclude-checks", "positive_data_acceptance", "--suppress-health-check", "all"],
        capture_output=True, text=True,
    )  # fmt: skip
    cases = [int(number) for number in re.findall(r"(\d+) generated", done.stdout)]
    failures = [int(number) for number in re.findall(r"(\d+) (?:unique )?failure", done.stdout)]
    if done.returncode or not cases:
        print(done.stdout[-6000:], file=sys.stderr)
    tried = sum(cases) or 1
    lost = max(failures, default=0) if done.returncode else 0
    return Row("requests by schemathesis", tried, tried - max(lost, bool(done.returncode)), "no server error")


def mutated(service: Service, count: int = MUTATIONS) -> Row:
    """Images with changed, missing and added bytes. The answer is a verdict or one line, in time."""
    rng, pixels = random.Random(0), np.random.default_rng(0)
    whole = [file_of(noise(pixels), kind) for kind in FORMATS]
    before, survived, slowest, statuses = 0, 0, 0.0, set()
    for number in range(count):
        if number == count // 10:
            before = service.memory
        begin = time.monotonic()
        status, body = service.ask("POST", "/score", _mutated(rng, rng.choice(whole)))
        slowest = max(slowest, time.monotonic() - begin)
        statuses.add(status)
        survived += status in (200, 400) and ("error" in json.loads(body)) == (status == 400)
    growth = service.memory - before
    if not service.alive or slowest > SLOWEST or growth > 64 * 2**20:
        survived = 0
    return Row(
        "mutated images of seven formats",
        count,
        survived,
        f"answers {', '.join(map(str, sorted(statuses)))}; memory grew by {max(growth, 0) / 2**20:.0f} MiB",
    )


def _mutated(rng: random.Random, image: bytes) -> bytes:
    data = bytearray(image)
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                del data[place : place + rng.randint(1, 40)]
            case 2:
                data[place:place] = rng.randbytes(rng.randint(1, 40))
            case _:
                data[place : place + 4] = b"\xff\xff\xff\xff"
        if not data:
            return b""
    return bytes(data)


# --- clients that misbehave --------------------------------------------------------------------------


def slow(service: Service, count: int = 20) -> Row:
    """Half of the clients send their headers byte by byte, half their bodies. Others are served meanwhile."""

    def client(number: int) -> bool:
        with service.connected() as sender:
            if number % 2:
                sender.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
            begin = time.monotonic()
            while time.monotonic() - begin < SLOWEST:
                with contextlib.suppress(TimeoutError, BlockingIOError):
                    sender.settimeout(0.2)
                    answer = sender.recv(100)
                    return b"408" in answer if number % 2 else answer == b""
                with contextlib.suppress(OSError):
                    sender.sendall(b"P")
            return False

    with ThreadPoolExecutor(count) as pool:
        clients = [pool.submit(client, number) for number in range(count)]
        others = [service.score(service.images[0]) for _ in range(20)]
        ended = sum(client.result() for client in clients)
    right = sum(status == 200 for status in others)
    return Row(
        "slow clients, and 20 others meanwhile",
        count + 20,
        ended + right,
        "cut off after 3 s; all others served",
    )


def gone(service: Service, count: int = 100) -> Row:
    """Clients that go away in the middle of the body, or before the answer. All places are free again."""
    rng, image = random.Random(0), service.images[0]
    head = f"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(image)}\r\n\r\n".encode()
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(service.score, image) for _ in range(count)]
        for _ in range(count):
            with service.connected() as sender:
                sender.sendall(
                    (head + image)[: rng.choice([len(head) + len(image), rng.randrange(len(head + image))])]
                )
        right = sum(other.result() == 200 for other in others)
    until = time.monotonic() + SLOWEST
    while (left := _metric(service, "gramwatch_waiting_images")) and time.monotonic() < until:
        time.sleep(0.1)
    return Row(
        "clients that go away, and as many that stay",
        2 * count,
        right + (count if not left and service.alive else 0),
        "those that stay get their verdicts; no place stays taken",
    )


def _metric(service: Service, name: str) -> float:
    text = service.ask("GET", "/metrics")[1].decode()
    return float(next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()[1])


def shut_down(guarded: Guarded, count: int = 3) -> Row:
    """SIGTERM while requests are under way. What was accepted is answered, and the exit code is 0."""
    answered = accepted = 0
    for _ in range(count):
        with guarded.served() as service, ThreadPoolExecutor(8) as pool:
            jobs = [pool.submit(_answer, service, guarded.images[:8]) for _ in range(8)]
            while not _metric(service, "gramwatch_waiting_images"):
                time.sleep(0.005)
            service.process.send_signal(signal.SIGTERM)
            statuses = [job.result() for job in jobs]
            ended = service.process.wait(60) == 0
        taken = [status for status in statuses if status != 0]  # 0: the port was closed already
        accepted += len(taken)
        answered += sum(status == 200 for status in taken) if ended else 0
    return Row(f"requests under way at SIGTERM, {count} times", accepted, answered, "answered; exit code 0")


def _answer(service: Service, images: list[bytes]) -> int:
    body = json.dumps({"images": [base64.b64encode(image).decode() for image in images]})
    try:
        return service.ask("POST", "/score", body, **{"Content-Type": "application/json"})[0]
    except ConnectionRefusedError:
        return 0


# --- load --------------------------------------------------------------------------------------------


@dataclass
class Clients:
    """Clients that ask again as soon as they have an answer, on connections that stay open."""

    service: Service
    count: int
    seconds: float

    def run(self) -> "Clients":
        self.times: list[float] = []
        self.statuses: list[int] = []
        self.until = time.monotonic() + self.seconds
        begin = time.monotonic()
        with ThreadPoolExecutor(self.count) as pool:
            for job in [pool.submit(self._client, number) for number in range(self.count)]:
                job.result()
        self.rate = self.statuses.count(200) / (time.monotonic() - begin)
        return self

    def _client(self, number: int) -> None:
        connection = http.client.HTTPConnection(self.service.address, timeout=60)
        while time.monotonic() < self.until:
            begin = time.monotonic()
            connection.request("POST", "/score", self.service.images[number % len(self.service.images)])
            answer = connection.getresponse()
            answer.read()
            self.statuses.append(answer.status)
            self.times.append(time.monotonic() - begin)
            if answer.status == 429:
                time.sleep(0.05)
        connection.close()

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.times, n=100)[98]


def load(guarded: Guarded, seconds: float) -> Iterator[Row]:
    """Below capacity there is no error. Above it the answer is 429, and the others stay fast."""
    with guarded.served("--queue", 64) as service:
        Clients(service, 32, 3).run()  # warm
        below = Clients(service, 32, seconds / 2).run()
        yield Row(
            f"requests of 32 clients in {seconds / 2:.0f} s, below capacity",
            len(below.statuses),
            below.statuses.count(200),
            f"p99 is {below.p99 / statistics.median(below.times):.1f} times the median",
        )
        above = Clients(service, 160, seconds / 2).run()
        expected = sum(status in (200, 429) for status in above.statuses)
        refused = above.statuses.count(429)
        yield Row(
            f"requests of 160 clients in {seconds / 2:.0f} s, 64 places",
            len(above.statuses),
            expected if refused and above.p99 < MOST_SLOWER * below.p99 and service.alive else 0,
            f"{100 * refused / len(above.statuses):.0f} % were 429; p99 is "
            f"{above.p99 / below.p99:.1f} times that below capacity",
        )
        yield batching(service)


def batching(service: Service, rounds: int = 5) -> Row:
    """What an image costs the service with 32 clients beside one client, in turns, in CPU seconds."""

    def cost(clients: int) -> float:
        begin = service.cpu_seconds
        asked = Clients(service, clients, 3).run()
        return (service.cpu_seconds - begin) / asked.statuses.count(200)

    ratio = statistics.median(cost(1) / cost(32) for _ in range(rounds))
    return Row(
        "batching: at least 3 times the images one by one",
        1,
        int(ratio >= 3),
        f"{ratio:.1f} times the images of a CPU second, median of {rounds} turns",
    )


def overhead() -> Row:
    """What the service adds to a batch of 32. The larger the network, the less it matters."""
    rates = {}
    for name in ("resnet20", "resnet18"):
        with tempfile.TemporaryDirectory() as folder:
            rates[name] = throughput(Guarded.made(Path(folder), name))
    (small, fast), (large, slow) = rates.values()
    return Row(
        "overhead at 32 images of 32 x 32: at most 15 % over calling the guard",
        1,
        int(large <= 1.15),
        f"{100 * (large - 1):+.0f} % with ResNet-18; {100 * (small - 1):+.0f} % with ResNet-20, whose guard "
        f"is {slow / fast:.0f} times faster",
    )


def throughput(guarded: Guarded, rounds: int = 5, requests: int = 6) -> tuple[float, float]:
    """CPU seconds of the service for 32 images, as a multiple of a call of the guard here, in turns.

    The second number is the CPU seconds of that call.
    """
    torch.set_num_threads(1)
    inputs, images = torch.randn(32, 3, 32, 32), guarded.images[:32]
    ratios, calls = [], []
    with guarded.served() as service:
        for number in range(rounds + 1):
            begin = time.process_time()
            for _ in range(requests):
                guarded.guard(inputs)
            direct = (time.process_time() - begin) / requests
            begin = service.cpu_seconds
            assert {_answer(service, images) for _ in range(requests)} == {200}
            if number:  # the first turn is for warming up
                ratios.append((service.cpu_seconds - begin) / requests / direct)
                calls.append(direct)
    return statistics.median(ratios), statistics.median(calls)


# --- an exported guard, and reasons ------------------------------------------------------------------


def exported(guarded: Guarded) -> Row:
    """The exported guard answers as the guard does, without the network's code."""
    if find_spec("onnxscript") is None or find_spec("onnxruntime") is None:
        raise Skipped("no guard can be exported: pip install 'gramwatch[export]'")
    guarded.guard.export(guarded.folder / "guard.onnx", torch.zeros(2, 3, 32, 32), preprocessing=True)
    (guarded.folder / f"{NETWORK}.py").unlink()
    want = guarded.guard(torch.stack([PREPARE(Image.open(BytesIO(image))) for image in guarded.images]))
    with guarded.served(exported=True) as service:
        verdicts = [
            json.loads(service.ask("POST", "/score", image)[1])["results"][0] for image in guarded.images
        ]
    alike = [
        (result["predicted"], result["is_ood"]) == (int(one.predicted), bool(one.is_ood))
        for result, one in zip(verdicts, want, strict=True)
    ]
    furthest = max(
        abs(result["score"] - float(one.score)) for result, one in zip(verdicts, want, strict=True)
    )
    return Row(
        "classes and verdicts of the exported guard",
        len(verdicts),
        sum(alike),
        f"those of the guard; scores differ by at most {furthest:.0e}",
    )


def explained(guarded: Guarded, rounds: int = 5) -> Row:
    """Flagged images with reasons, and what they cost beside the same images without."""
    grey = [file_of(Image.new("RGB", (32, 32), (16 * n,) * 3)) for n in range(16)]
    body = json.dumps({"images": [base64.b64encode(image).decode() for image in grey]})

    def asked(service: Service, path: str) -> tuple[list[Any], float]:
        begin = service.cpu_seconds
        status, answer = service.ask("POST", path, body, **{"Content-Type": "application/json"})
        assert status == 200, answer
        return json.loads(answer)["results"], service.cpu_seconds - begin

    with guarded.served() as service:
        turns = [(asked(service, "/score"), asked(service, "/score?reasons=true")) for _ in range(rounds + 1)]
    results = [result for _, (results, _) in turns for result in results if result["is_ood"]]
    right = [result["reasons"] is not None and len(result["reasons"]["sentences"]) == 3 for result in results]
    cost = statistics.median(with_reasons[1] / plain[1] for plain, with_reasons in turns[1:])
    return Row(
        "reasons of flagged images, ResNet-18, 32 x 32",
        len(results),
        sum(right),
        f"a flagged image with reasons costs {cost:.1f} times one without, 16 images at a time",
    )
