"""A service in a thread, and clients for it."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from gramwatch.deploy.serve import Judge, create_app, server_of
from gramwatch.deploy.serve.server import Server
from gramwatch.detect.measurement import Detection
from gramwatch.inputs.preprocessing import Preprocessing

PREPARE = Preprocessing((8, 8), 8, "bilinear", (0.5,) * 3, (0.5,) * 3)


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Client:
    url: str
    server: Server

    def connection(self, timeout: float = 30) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answered:
        connection = self.connection()
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            return Answered(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answered:
        return self.ask("GET", path, headers=headers)

    def score(self, image: bytes) -> Answered:
        return self.ask("POST", "/score", image, {"Content-Type": "image/png"})

    def post(self, path: str, values: Any) -> Answered:
        return self.ask("POST", path, json.dumps(values), {"Content-Type": "application/json"})


@contextlib.contextmanager
def serving(judge: Judge, read_seconds: float = 10.0, **options: Any) -> Iterator[Client]:
    """A service on a free port of this machine."""
    urls: list[str] = []
    server = server_of(create_app(judge, **options), port=0, read_seconds=read_seconds, started=urls.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + 60
        while not urls:
            assert thread.is_alive()
            assert time.monotonic() < until
            time.sleep(0.01)
        yield Client(urls[0], server)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def png(value: int = 0, side: int = 8) -> bytes:
    file = BytesIO()
    Image.fromarray(np.full((side, side, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


@dataclass
class Slow:
    """Judges by the mean of an image. It waits, and notes the sizes of its batches."""

    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, inputs: Tensor) -> Detection:
        self.sizes.append(len(inputs))
        time.sleep(self.seconds)
        mean = inputs.mean((1, 2, 3))
        return Detection(
            torch.stack([mean, -mean], 1), (mean < 0).long(), mean, (1 - mean) / 2, mean > 0.5,
            parts={"mean": (1 - mean) / 2},
        )  # fmt: skip


def slow(seconds: float = 0.0) -> Judge:
    return Judge(Slow(seconds), PREPARE, ("bright", "dark"))
