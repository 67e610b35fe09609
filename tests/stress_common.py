"""What the parts of `make stress` share: rows of the table, a small guard, and images."""

import os
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import gramwatch
from gramwatch import Guard
from gramwatch.inputs.demo import digits, train


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    tried: int
    survived: int
    found: str
    """What was seen, in words and figures."""

    @property
    def lost(self) -> int:
        return self.tried - self.survived

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "lost": self.lost}


class Skipped(Exception):  # noqa: N818
    """A check that cannot be done on this machine, and why."""


def tiny_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))


def tiny_guard(members: tuple[str, ...] = ("gram", "energy")) -> Guard:
    """A guard that judges a batch in a millisecond or two."""
    data, network = digits(), tiny_network()
    train(network, data.train, data.train_labels, epochs=20)
    guard = Guard(network, members=members, orders=[1])
    return guard.fit(data.train.split(64), progress=False).calibrate([data.validation], progress=False)


def same(a: "gramwatch.Detection", b: "gramwatch.Detection") -> bool:
    """Whether two detections are equal to the bit."""
    return all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("score", "p_value", "is_ood", "logits")
    )


def resident() -> int:
    """The memory of this process that is in use, in bytes."""
    return memory_of(os.getpid())


def memory_of(pid: int, name: str = "VmRSS") -> int:
    """The memory of a process by its name in `/proc/PID/status`, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise Skipped("this system does not tell the memory of a process")


def noise(rng: np.random.Generator, side: int = 32) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


def batches_of(images: Tensor, rng: np.random.Generator, count: int) -> list[Tensor]:
    """Batches of one to eight images."""
    return [images[torch.from_numpy(rng.integers(0, len(images), rng.integers(1, 9)))] for _ in range(count)]
