"""Makes reference/: files of every kind of detector, and what each says of a few inputs.

Later versions must load these files and say the same, and must come to the same by fitting anew. What a
version that was once in use said is what is compared with: only detectors that are not there yet are added.

    python tests/data/make_reference.py
"""

import json
import runpy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gramwatch

FOLDER = Path(__file__).with_name("reference")
MADE = runpy.run_path(str(Path(__file__).with_name("make_detector_v1.py")))
inputs, outliers, TinyNet = MADE["inputs"], MADE["outliers"], MADE["TinyNet"]

GRAMS: dict[str, dict[str, Any]] = {
    "gram": {},
    "gram-row_sums": {"statistic": "row_sums", "orders": [2, 1, 5], "confidence": "none"},
    "gram-row_sums_of_roots": {"statistic": "row_sums_of_roots", "orders": [1, 3], "normalise": False},
    "gram-diagonal": {"statistic": "diagonal", "confidence": "divide_total"},
    "gram-off_diagonal": {"statistic": "off_diagonal", "taps": ["conv*", "leaky_relu"], "level": 0.9},
    "gram-triangle": {"statistic": "triangle", "orders": [1, 2], "confidence": "subtract"},
    "gram-mean_variance": {"bounds": "mean_variance", "orders": [1, 2, 3]},
    "gram-float16": {"storage": "float16"},
}
FOUR = ["gram", "profile", "class_ratio", "energy"]
"""The default members when these files were made. Guards did not rehearse."""
GUARDS: dict[str, dict[str, Any]] = {
    "guard": {"effort": "full", "members": ["gram", "early_mahalanobis", "class_ratio", "energy"]},
    "guard-lean": {"members": FOUR},
    "guard-few-pixels": {"members": FOUR, "pixels": 9},
    "guard-two": {"members": ["gram", "energy"], "orders": [1, 2], "level": 0.9},
    "guard-profile": {"effort": "full", "members": FOUR},
    "guard-features": {
        "effort": "full",
        "members": ["gram", "fdbd", "knn", "mahalanobis"],
        "storage": "float16",
    },
}
METHODS: dict[str, dict[str, Any]] = {
    "react": {"percentile": 90.0},
    "ash": {"percentile": 90.0},
    "scale": {"percentile": 85.0},
    "dice": {"sparsity": 0.9},
    "knn": {"k": 50},
}
"""Settings of methods whose defaults were these when their file was made."""


def methods() -> dict[str, Any]:
    """The classes of methods that need no training of the network, by name."""
    try:
        from gramwatch.methods import METHODS as KINDS
    except ImportError:
        from gramwatch.rivals import RIVALS as KINDS
    return {name: kind for name, kind in KINDS.items() if name != "image"}  # the inputs are too small for it


def detectors() -> dict[str, Any]:
    """Every detector, not fitted."""
    by_name: dict[str, Any] = {name: gramwatch.GramDetector(TinyNet(), **how) for name, how in GRAMS.items()}
    by_name |= {name: method(TinyNet(), **METHODS.get(name, {})) for name, method in methods().items()}
    by_name |= {name: gramwatch.Guard(TinyNet(), rehearse=False, **how) for name, how in GUARDS.items()}
    by_name["guard-features"].members["knn"].k = METHODS["knn"]["k"]
    return by_name


def ready(detector: Any) -> Any:
    """The detector fitted and calibrated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gramwatch.GramwatchWarning)
        detector.fit(inputs(240, salt=101).split(60), progress=False)
        return detector.calibrate(inputs(150, salt=202).split(50), progress=False)


def judged() -> Tensor:
    """The inputs that are judged: nine like those of the fit, and six outliers."""
    return torch.cat([inputs(9, salt=319), outliers(6, salt=404)])


def numbers(values: Any) -> dict[str, Any]:
    """What a detector says, as plain values."""
    kept: dict[str, Any] = {
        name: getattr(values, name).tolist() for name in ("score", "p_value", "is_ood", "predicted")
    }
    if values.parts is not None:
        kept["parts"] = {name: part.tolist() for name, part in values.parts.items()}
    if values.deviations is not None:
        kept["deviations"] = values.deviations.tolist()
    return kept


def main() -> None:
    """Fit, calibrate and save each that is not there yet; then note what it says."""
    noted = json.loads((FOLDER / "numbers.json").read_text(encoding="utf-8"))["detectors"]
    for name, detector in detectors().items():
        if name in noted:
            continue
        ready(detector)
        detector.save(FOLDER / f"{name}.safetensors")
        noted[name] = numbers(detector(judged()))
    text = json.dumps({"library": gramwatch.__version__, "detectors": noted})
    (FOLDER / "numbers.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
