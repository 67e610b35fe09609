"""gramwatch: know when a classifier is looking at something it was never trained on.

A public name is imported when it is first used. So `gramwatch --help` does not wait for PyTorch.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gramwatch._moved import install, module_of
from gramwatch.files import __version__

if TYPE_CHECKING:
    from gramwatch.detect.detector import Detector
    from gramwatch.detect.measurement import Detection
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
    from gramwatch.evaluation.evaluate import Evaluation, Judgement, evaluate, fit_together, judge
    from gramwatch.explain.explained import Explained
    from gramwatch.explain.explained_set import ExplainedSet, explain_set
    from gramwatch.guard.guard import Guard
    from gramwatch.guard.loading import load
    from gramwatch.methods.gram import GramDetector
    from gramwatch.numerics import statistics
    from gramwatch.stream.monitor import Monitor
    from gramwatch.stream.select import Selection, select
    from gramwatch.watch import Tap, Taps, find_taps, mark

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
    "detect.detector": "Detector",
    "detect.measurement": "Detection",
    "errors": "ArtifactError CalibrationError DataError ExportError GramwatchError GramwatchWarning "
    "InputError MissingDataError MissingExtraError NotFittedError RankError TapError TrainingError",
    "evaluation.evaluate": "Evaluation Judgement evaluate fit_together judge",
    "explain.explained": "Explained",
    "explain.explained_set": "ExplainedSet explain_set",
    "guard.guard": "Guard",
    "guard.loading": "load",
    "methods.gram": "GramDetector",
    "stream.monitor": "Monitor",
    "stream.select": "Selection select",
    "watch": "Tap Taps find_taps mark",
}
"""The public names of each module."""
_WHERE = {name: module for module, names in _MODULES.items() for name in names.split()}
_PACKAGES = """
    deploy detect errors evaluation explain files guard inputs integrate methods numerics observe report
    stream watch
""".split()
"""What `import gramwatch` also makes available: `gramwatch.methods`."""
install()


def __getattr__(name: str) -> Any:
    if name == "statistics":
        return importlib.import_module("gramwatch.numerics.statistics")
    if name in _WHERE:
        return getattr(importlib.import_module(f"gramwatch.{_WHERE[name]}"), name)
    if name in _PACKAGES:
        return importlib.import_module(f"gramwatch.{name}")
    module = module_of(name)
    if module is not None:
        return module
    raise AttributeError(f"module 'gramwatch' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


class _Package(ModuleType):
    """Python sets a submodule as an attribute of its package. `evaluate` and `select` stay functions."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("evaluate", "select") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
