"""From the bytes of an image to a verdict, and a monitor that watches all verdicts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gramwatch.detect.measurement import Detection
from gramwatch.errors import InputError
from gramwatch.explain.explained import Explained
from gramwatch.inputs import decoding
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.stream.monitor import Monitor

Verdict = dict[str, Any]
"""`predicted`, `class`, `score`, `p_value`, `is_ood` and `parts` of one image, as plain values. `reasons` are
there if they were asked for: None if the image is not flagged."""
MOST_TAPS = 5
"""The taps that reasons name."""
log = logging.getLogger("gramwatch.deploy.serve")


class Asked(NamedTuple):
    """One image that is to be judged."""

    image: Tensor
    """What the detector takes."""
    reasons: bool = False
    """Whether to say why, if the image is flagged."""


@dataclass
class Judge:
    """A guard with preprocessing, class names and monitor: it judges the bytes of an image.

    `read` and `prepared` may run in several threads. All else runs in one thread.
    """

    detector: Callable[[Tensor], Detection]
    """A calibrated guard, or anything else that makes a `Detection` of a batch."""
    preprocessing: Preprocessing
    classes: Sequence[str] = ()
    """The names of the classes; empty if they are not known."""
    monitor: Monitor | None = None
    state: Path | None = None
    """The file in which the state of the monitor is kept."""
    takes_pixels: bool = False
    """Whether the detector takes uint8 pixels and normalises them, as an exported guard may."""
    parts: tuple[str, ...] = ()
    """The names of the members of the guard. Known after `warm_up`."""

    @property
    def explains(self) -> bool:
        """Whether the detector can say why. An exported guard cannot."""
        return hasattr(self.detector, "explain")

    def name_of(self, number: int) -> str:
        """The name of a class, or its number if the name is not known."""
        return self.classes[number] if number < len(self.classes) else str(number)

    def read(self, data: bytes, most_pixels: int) -> Tensor:
        """The detector's input from the bytes of an image file. Raises a `DataError` if they are no image."""
        return self.prepared(decoding.begun(BytesIO(data), most_pixels))

    def prepared(self, image: Any) -> Tensor:
        """The detector's input from an image that `decoding.begun` opened."""
        whole = decoding.decoded(image, self.preprocessing.grey)
        return self.preprocessing.pixels(whole) if self.takes_pixels else self.preprocessing(whole)

    def __call__(self, batch: Sequence[Asked]) -> list[Verdict]:
        """The verdicts of a batch. The monitor takes them in."""
        images = torch.stack([request.image for request in batch])
        detection = self.detector(images)
        if self.monitor is not None:
            self.monitor.update(detection)
        verdicts = self._verdicts(detection)
        for verdict, request in zip(verdicts, batch, strict=True):
            if request.reasons:
                verdict["reasons"] = None
        flagged = [i for i, request in enumerate(batch) if request.reasons and verdicts[i]["is_ood"]]
        for i, explanation in zip(flagged, self._explained(images[flagged]), strict=True):
            # The verdict stays that of the first pass: roundings differ between batches.
            verdicts[i]["reasons"] = self._reasons(replace(explanation, detection=detection[i]))
        return verdicts

    def _explained(self, images: Tensor) -> list[Explained]:
        """The explanations of images, from one more pass. If it takes too much memory, from two of halves."""
        if not len(images):
            return []
        try:
            return list(self.detector.explain(images, places=False))  # type: ignore[attr-defined]
        except InputError:
            if len(images) == 1:
                raise
        half = len(images) // 2
        return [*self._explained(images[:half]), *self._explained(images[half:])]

    def _reasons(self, explanation: Explained) -> dict[str, Any]:
        """Why an image was flagged, as plain values."""
        taps = [
            {"member": member, "tap": tap, "contribution": amount}
            for member, names in explanation.tap_names.items()
            for tap, amount in zip(names[:-1], explanation.taps[member][0].tolist(), strict=False)
            if 0 < amount < float("inf")
        ]
        members = dict(zip(explanation.member_names, explanation.members[0].tolist(), strict=True))
        return {
            "sentences": explanation.sentences(),
            "members": members if bool(explanation.finite[0]) else {},
            "taps": sorted(taps, key=lambda tap: -tap["contribution"])[:MOST_TAPS],
        }

    def _verdicts(self, detection: Detection) -> list[Verdict]:
        plain = detection.to_dict()
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
        pixels = torch.zeros(2, height, width, channels, dtype=torch.uint8)
        detection = self.detector(pixels if self.takes_pixels else pixels.permute(0, 3, 1, 2).float())
        self.parts = tuple(detection.parts or ())

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
