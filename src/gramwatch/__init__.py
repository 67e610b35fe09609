"""gramwatch: know when a classifier is looking at something it was never trained on.

A public name is imported when it is first used. So `gramwatch --help` does not wait for PyTorch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gramwatch.version import __version__

if TYPE_CHECKING:
    from gramwatch import statistics
    from gramwatch.detector import Detector
    from gramwatch.errors import (
        ArtifactError,
        CalibrationError,
        DataError,
        ExportError,
        GramwatchError,
        GramwatchWarning,
        InputError,
        MissingDataError,
        MissingExtraError,
        NotFittedError,
        RankError,
        TapError,
        TrainingError,
    )
    from gramwatch.evaluate import Evaluation, Judgement, evaluate, fit_together, judge
    from gramwatch.explain import Explained
    from gramwatch.explained_set import ExplainedSet, explain_set
    from gramwatch.gram import GramDetector
    from gramwatch.guard import Guard
    from gramwatch.loading import load
    from gramwatch.measurement import Detection
    from gramwatch.monitor import Monitor
    from gramwatch.select import Selection, select
    from gramwatch.taps import Tap, Taps, find_taps, mark

__all__ = [
    "ArtifactError",
    "CalibrationError",
    "DataError",
    "Detection",
    "Detector",
    "Evaluation",
    "Explained",
    "ExplainedSet",
    "ExportError",
    "GramDetector",
    "GramwatchError",
    "GramwatchWarning",
    "Guard",
    "InputError",
    "Judgement",
    "MissingDataError",
    "MissingExtraError",
    "Monitor",
    "NotFittedError",
    "RankError",
    "Selection",
    "Tap",
    "TapError",
    "Taps",
    "TrainingError",
    "__version__",
    "evaluate",
    "explain_set",
    "find_taps",
    "fit_together",
    "judge",
    "load",
    "mark",
    "select",
    "statistics",
]

_MODULES = {
    "detector": "Detector",
    "errors": "ArtifactError CalibrationError DataError ExportError GramwatchError GramwatchWarning "
    "InputError MissingDataError MissingExtraError NotFittedError RankError TapError TrainingError",
    "evaluate": "Evaluation Judgement evaluate fit_together judge",
    "explain": "Explained",
    "explained_set": "ExplainedSet explain_set",
    "gram": "GramDetector",
    "guard": "Guard",
    "loading": "load",
    "measurement": "Detection",
    "monitor": "Monitor",
    "select": "Selection select",
    "taps": "Tap Taps find_taps mark",
}
"""The public names of each module."""
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}
_WITHOUT_NAMES = """
    artifact batches bounds deviation distributed export joint kernels methods metrics observation plan
    replay statistics threshold
""".split()
"""Modules that `import gramwatch` also makes available: `gramwatch.methods`."""


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"gramwatch.{_WHERE[name]}"), name)
    if name in _WITHOUT_NAMES or name in _MODULES:
        return importlib.import_module(f"gramwatch.{name}")
    raise AttributeError(f"module 'gramwatch' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, *_WITHOUT_NAMES})


class _Package(ModuleType):
    """Python sets a submodule as an attribute of its package. `evaluate` and `select` stay functions."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("evaluate", "select") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
