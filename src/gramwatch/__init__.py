"""gramwatch: know when a classifier is looking at something it was never trained on."""

from gramwatch import statistics
from gramwatch.detector import Detector
from gramwatch.errors import (
    ArtifactError,
    CalibrationError,
    DataError,
    GramwatchError,
    GramwatchWarning,
    InputError,
    MissingDataError,
    MissingExtraError,
    NotFittedError,
    TapError,
    TrainingError,
)
from gramwatch.evaluate import Evaluation, evaluate, fit_together
from gramwatch.gram import GramDetector
from gramwatch.guard import Guard
from gramwatch.loading import load
from gramwatch.measurement import Detection
from gramwatch.monitor import Monitor
from gramwatch.select import Selection, select
from gramwatch.taps import Tap, Taps, find_taps, mark
from gramwatch.version import __version__

__all__ = [
    "ArtifactError",
    "CalibrationError",
    "DataError",
    "Detection",
    "Detector",
    "Evaluation",
    "GramDetector",
    "GramwatchError",
    "GramwatchWarning",
    "Guard",
    "InputError",
    "MissingDataError",
    "MissingExtraError",
    "Monitor",
    "NotFittedError",
    "Selection",
    "Tap",
    "TapError",
    "Taps",
    "TrainingError",
    "__version__",
    "evaluate",
    "find_taps",
    "fit_together",
    "load",
    "mark",
    "select",
    "statistics",
]
