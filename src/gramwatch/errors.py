"""The exceptions and the warning this library raises, each naming the offending thing and a remedy."""

import importlib
import pkgutil
import sys
import warnings
import weakref


class GramwatchError(Exception):
    """Base of every error raised on purpose by this library."""


class NotFittedError(GramwatchError, ValueError, AttributeError):
    """Something was asked of a detector that has not been fitted or calibrated yet."""


class TapError(GramwatchError, ValueError):
    """The watched tensors could not be found, or are not what they were when the detector was fitted."""


class NoTapError(TapError):
    """The network has no tensor that could be watched. A guard does without the members that need one."""


class InputError(GramwatchError, ValueError):
    """A batch, a loader or an output of the network is not of the expected form."""


class CalibrationError(GramwatchError, ValueError):
    """The calibration data cannot support the decision that was asked for."""


class ArtifactError(GramwatchError, ValueError):
    """A saved detector or network cannot be read, or belongs to another network."""


class DataError(GramwatchError, OSError):
    """A set of images is not where it should be, is damaged, or could not be downloaded."""


class TrainingError(GramwatchError, ValueError):
    """A network cannot be trained as was asked for, or its training failed."""


class MissingDataError(DataError, FileNotFoundError):
    """A set of images, or a part of it, is not there at all."""


class MissingExtraError(GramwatchError, ImportError):
    """A part of the library needs an optional package that is not installed."""


class GramwatchWarning(UserWarning):
    """Something was skipped or degraded; the message says what."""


def warn(message: str) -> None:
    """Warn at the user's own line, whatever was called in between."""
    warnings.warn(message, GramwatchWarning, stacklevel=_stacklevel())


_said: "weakref.WeakKeyDictionary[object, set[str]]" = weakref.WeakKeyDictionary()


def warn_once(about: object, message: str) -> None:
    """Warn as `warn` does, but once only about one network or detector."""
    said = _said.setdefault(about, set())
    if message not in said:
        said.add(message)
        warn(message)


def _stacklevel() -> int:
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith(("gramwatch.", "torch."))
    ):
        level, frame = level + 1, frame.f_back
    return level


def moved(old: str, new: str, **others: str) -> None:
    """Let modules below an old name be imported as before, and say once what the name is now.

    `others` are modules that went elsewhere: their name below `old`, and what they are called now.
    """
    warn(f"{old} is now {new}: import from there")
    package = importlib.import_module(new)
    names = {each.name: f"{new}.{each.name}" for each in pkgutil.iter_modules(package.__path__)}
    for name, place in (names | others).items():
        sys.modules[f"{old}.{name}"] = importlib.import_module(place)
        setattr(sys.modules[old], name, sys.modules[f"{old}.{name}"])
