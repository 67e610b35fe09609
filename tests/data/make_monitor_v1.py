"""Makes monitor_v1.safetensors and monitor_v1.json, which the tests keep for ever.

Not to be run again: later versions draw the parts of the calibration scores in another way, and a monitor
that was begun with the draw of version 0.1 must go on as it was begun. Scores come from integer arithmetic
alone.

    python tests/data/make_monitor_v1.py
"""

import json
import runpy
from pathlib import Path

import torch
from torch import Tensor

from gramwatch import Detection, Monitor
from gramwatch.detect.measurement import AsMeasured, Calibration
from gramwatch.detect.threshold import p_value

HERE = Path(__file__).parent
FILE, NUMBERS = HERE / "monitor_v1.safetensors", HERE / "monitor_v1.json"
numbers = runpy.run_path(str(HERE / "make_detector_v1.py"))["numbers"]
LEVEL = 0.95


class Watched:
    """A detector with 300 calibration scores."""

    level = LEVEL
    scores: Tensor = numbers(300, salt=11).double()

    def calibration(self) -> Calibration:
        return Calibration.restored(AsMeasured(), self.scores.unsqueeze(1), LEVEL, {"split": True})


def stream(count: int, salt: int) -> Detection:
    """A stream of scores, a little higher than those of the calibration."""
    scores = numbers(count, salt=salt).double() + 0.1
    p = p_value(scores, Watched.scores)
    logits = torch.nn.functional.one_hot(torch.arange(count) % 3, 3).float()
    return Detection(logits, logits.argmax(1), scores, p, p <= 1 - LEVEL, parts={"gram": p})


def main() -> None:
    """Watch a stream and save; then note what the monitor says of the rest."""
    monitor = Monitor(Watched(), mean_time_to_false_alarm=1_000, replica=(1, 2))
    monitor.update(stream(150, salt=21))
    monitor.save(FILE)
    strengths = []
    for one in stream(150, salt=22):
        monitor.update(one)
        strengths.append(monitor.strength)
    NUMBERS.write_text(
        json.dumps({"repr": repr(monitor), "strength": strengths}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
