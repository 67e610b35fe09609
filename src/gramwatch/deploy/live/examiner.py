"""From the bytes of an image to verdict, map and sentences for the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from gramwatch.detect.detector import Detector
from gramwatch.explain.explained import Explained
from gramwatch.explain.reasons import compared
from gramwatch.explain.thumbnails import network_input, over, thumbnail
from gramwatch.inputs import decoding
from gramwatch.inputs.preprocessing import Preprocessing

MOST_PIXELS = 50_000_000
"""Pixels of an image, as in `gramwatch serve`."""
MOST_WORK = 4 * MOST_PIXELS
"""How long an image may take to decode, in pixels of a common image."""
SIDE = 320
"""The longer side of the pictures on the page, in pixels."""


@dataclass(frozen=True)
class Examiner:
    """A calibrated detector with preprocessing and class names. It judges and explains image files."""

    detector: Detector
    preprocessing: Preprocessing
    classes: Sequence[str] = ()
    """The names of the classes; empty if they are not known."""

    def __call__(self, data: bytes) -> dict[str, Any]:
        """Judge an image file and say why, as plain values. Raises a `DataError` if it is no image."""
        image, note = decoding.opened(BytesIO(data), self.preprocessing.grey, MOST_PIXELS, MOST_WORK)
        inputs = self.preprocessing(image)
        explanation = self.detector.explain(inputs[None])
        detection, predicted = explanation.detection, int(explanation.detection.predicted[0])
        seen = network_input(inputs, self.preprocessing)
        heat = None if explanation.map is None else explanation.map[0].cpu()
        placed = heat is not None and heat.ndim == 2 and bool(heat.isfinite().all())
        return {
            "is_ood": bool(detection.is_ood[0]),
            "p_value": float(detection.p_value[0]),
            "score": float(detection.score[0]) if bool(explanation.finite[0]) else None,
            "compared": compared(explanation),
            "threshold": None if self.detector.per_class else self.detector.threshold_,
            "predicted": predicted,
            "class": self.classes[predicted] if predicted < len(self.classes) else None,
            "sentences": explanation.sentences()[1:],  # the first one is the verdict
            "members": self._members(explanation),
            "input": thumbnail(seen, SIDE),
            "map": thumbnail(over(seen, heat), SIDE) if placed else None,
            "notes": [*([f"The image was changed to read it: {note}."] if note else []), *explanation.notes],
        }

    def _members(self, explanation: Explained) -> list[dict[str, Any]]:
        """The contributions of the members to the score, largest first."""
        if not bool(explanation.finite[0]):
            return []
        parts = explanation.detection.parts or {}
        members = [
            {
                "name": member.title,
                "sees": member.sees,
                "adds": float(member.total[0]),
                "p_value": float(parts[member.name][0]) if member.name in parts else None,
            }
            for member in explanation.parts
        ]
        return sorted(members, key=lambda member: -member["adds"])

    def warm_up(self) -> None:
        """Judge a black image, so that kernels are compiled before a person waits."""
        from PIL import Image

        height, width = self.preprocessing.size
        file = BytesIO()
        Image.new("RGB", (width, height)).save(file, "PNG")
        self(file.getvalue())
