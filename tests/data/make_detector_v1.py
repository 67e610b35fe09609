"""Makes detector_v1.safetensors and detector_v1.json, which the tests keep for ever.

Not to be run again once format 1 is out: a file of every format must stay readable as it was written.

Weights and inputs come from integer arithmetic alone, so they are the same bits on every machine: the
file's fingerprint of the network is exact, and sines or random numbers are not.

    python tests/data/make_detector_v1.py
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu

import gramwatch

FILE = Path(__file__).with_name("detector_v1.safetensors")
NUMBERS = Path(__file__).with_name("detector_v1.json")
METADATA = {
    "classes": ["dot", "bar", "ring"],
    "mean": [0.5],
    "note": "größer als π",
    "nested": {"a": [1, None]},
}


def numbers(*shape: int, salt: int) -> Tensor:
    """Multiples of 1/512 between -1 and 1 that look random."""
    count = torch.Size(shape).numel()
    bits = torch.arange(count, dtype=torch.int64) + 1_000_003 * salt
    for factor, shift in ((2_654_435_761, 16), (2_246_822_519, 13)):
        bits = (bits * factor) & 0xFFFFFFFF
        bits = bits ^ (bits >> shift)
    return (((bits >> 7) % 1024) - 512).float().div(512).reshape(shape)


def inputs(count: int, salt: int) -> Tensor:
    """Inputs like those the detector was fitted on: a bright blob in one of three corners, and noise."""
    images = numbers(count, 1, 6, 6, salt=salt) / 2
    for corner, (row, column) in enumerate([(0, 0), (0, 3), (3, 0)]):
        images[corner::3, :, row : row + 3, column : column + 3] += 1
    return images


def outliers(count: int, salt: int) -> Tensor:
    """Inputs that the detector was not fitted on: the same noise, stronger, and no blob."""
    return 4 * numbers(count, 1, 6, 6, salt=salt)


class TinyNet(nn.Module):
    """Two convolutions, a batch norm and two linear layers: every kind of tap, a few hundred weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 5, 3, stride=2)
        self.hidden = nn.Linear(20, 6)
        self.classify = nn.Linear(6, 3)
        # With these numbers each of the three classes is predicted for many inputs.
        for salt, tensor in enumerate(self.state_dict().values(), 280):
            if tensor.is_floating_point():
                tensor.copy_(numbers(*tensor.shape, salt=salt))
        self.norm.running_var.abs_().add_(0.5)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = leaky_relu(self.norm(self.conv1(x)))
        x = leaky_relu(self.conv2(x))
        return self.classify(leaky_relu(self.hidden(x.flatten(1))))


def main() -> None:
    """Fit, calibrate and save; then note what the detector says of a few inputs."""
    detector = gramwatch.GramDetector(TinyNet(), orders=[1, 2, 3])
    detector.fit(inputs(240, salt=101).split(60), progress=False)
    detector.calibrate([inputs(90, salt=202)], seed=5, progress=False)
    detector.metadata = METADATA
    detection = detector(torch.cat([inputs(9, salt=319), outliers(3, salt=404)]))
    # Convolutions differ a little between machines; the ranks must not.
    distance = (detection.score[:, None] - detector.calibration_scores_).abs().amin(1)
    assert ((distance > 1e-2 * detection.score) | (detection.score == 0)).all(), (
        "too near to a calibration score"
    )
    assert 0 < detection.is_ood.sum() < len(detection)
    detector.save(FILE)
    noted = {
        "library": gramwatch.__version__,
        "repr": repr(detector),
        "taps": detector.taps.names,
        "class_counts": detector.class_counts_.tolist(),
        "threshold": detector.threshold_,
        "predicted": detection.predicted.tolist(),
        "score": detection.score.tolist(),
        "p_value": detection.p_value.tolist(),
        "is_ood": detection.is_ood.tolist(),
        "class_support": detection.class_support.tolist(),
    }
    NUMBERS.write_text(json.dumps(noted, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
