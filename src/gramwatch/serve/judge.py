"""From the bytes of an image to a verdict, and a monitor that watches all verdicts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gramwatch.datasets import decoding
from gramwatch.measurement import Detection
from gramwatch.monitor import Monitor
from gramwatch.preprocessing import Preprocessing

Verdict = dict[str, Any]
"""`predicted`, `class`, `score`, `p_value`, `is_ood` and `parts` of one image, as plain values."""
log = logging.getLogger("gramwatch.serve")


@dataclass
class Judge:
    """A guard, and what it needs to judge the bytes of an image.

    `read` may run in several threads. All else runs in one thread.
    """

    detector: Callable[[Tensor], Detection]
    """A calibrated guard, or anything else that makes a `Detection` of a batch."""
    preprocessing: Preprocessing
    classes: Sequence[str] = ()
    """The names of the classes; empty if they are not known."""
    monitor: Monitor | None = None
    state: Path | None = None
    """The file in which the state of the monitor is kept."""
    parts: tuple[str, ...] = ()
    """The names of the members of the guard. Known after `warm_up`."""

    def read(self, data: bytes, most_pixels: int) -> Tensor:
        """The input of the network from the bytes of an image file. Raises a `DataError` if it is none."""
        image, _ = decoding.opened(BytesIO(data), self.preprocessing.grey, most_pixels)
        return self.preprocessing(image)

    def __call__(self, inputs: Sequence[Tensor]) -> list[Verdict]:
        """The verdicts of a batch. The monitor takes them in."""
        found = self.detector(torch.stack(list(inputs)))
        if self.monitor is not None:
            self.monitor.update(found)
        return self._verdicts(found)

    def _verdicts(self, found: Detection) -> list[Verdict]:
        plain = found.to_dict()
        parts = plain.get("parts") or {}
        return [
            {
                "predicted": predicted,
                "class": self.classes[predicted] if predicted < len(self.classes) else None,
                "score": _finite(plain["score"][i]),
                "p_value": plain["p_value"][i],
                "is_ood": plain["is_ood"][i],
                "parts": {name: values[i] for name, values in parts.items()},
            }
            for i, predicted in enumerate(plain["predicted"])
        ]

    def warm_up(self) -> None:
        """Judge two black images, so that kernels are compiled. The monitor does not see them."""
        channels, (height, width) = len(self.preprocessing.mean), self.preprocessing.size
        found = self.detector(torch.zeros(2, channels, height, width))
        self.parts = tuple(found.parts or ())

    def save(self) -> bool:
        """Keep the state of the monitor. Return whether that worked. A full disk stops nothing."""
        if self.monitor is None or self.state is None:
            return True
        try:
            self.monitor.save(self.state)
        except OSError as error:
            log.warning("the state of the monitor cannot be saved: %s", error.strerror or error)
            return False
        return True


def _finite(value: float) -> float | None:
    """The score. None if it is infinite, because the network's values were: JSON has no infinity."""
    return value if abs(value) < float("inf") else None
