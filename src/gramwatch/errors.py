"""The exceptions and the warning that this library raises. A message names what is wrong and a remedy."""

import sys
import warnings
import weakref


class GramwatchError(Exception):
    """Base of every error raised on purpose by this library."""


class NotFittedError(GramwatchError, ValueError, AttributeError):
    """The detector must be fitted or calibrated first."""


class TapError(GramwatchError, ValueError):
    """The taps could not be found, or they differ from those that the detector was fitted on."""


class NoTapError(TapError):
    """The network has no tensor that can be watched. A guard leaves out the members that need a tap."""


class InputError(GramwatchError, ValueError):
    """A batch, a loader or the network's output does not have the expected form."""


class CalibrationError(GramwatchError, ValueError):
    """The calibration data are too few, or of the wrong kind."""


class ArtifactError(GramwatchError, ValueError):
    """A saved detector or network cannot be read, or belongs to another network."""


class DataError(GramwatchError, OSError):
    """A set of images is not where it should be, is damaged, or could not be downloaded."""


class TrainingError(GramwatchError, ValueError):
    """A network cannot be trained with the given arguments, or its training failed."""


class ExportError(GramwatchError, RuntimeError):
    """The guard or its network cannot be exported as one graph."""


class RankError(GramwatchError, RuntimeError):
    """Another process of the same run failed or ended."""


class MissingDataError(DataError, FileNotFoundError):
    """A set of images, or a part of it, is missing."""


class MissingExtraError(GramwatchError, ImportError):
    """A part of the library needs an optional package that is not installed."""


class GramwatchWarning(UserWarning):
    """Something was skipped or degraded; the message says what."""


def warn(message: str) -> None:
    """Warn. The warning shows the line of the user's code that called this library."""
    warnings.warn(message, GramwatchWarning, stacklevel=_stacklevel())


_said: "weakref.WeakKeyDictionary[object, set[str]]" = weakref.WeakKeyDictionary()


def warn_once(about: object, message: str) -> None:
    """Warn as `warn` does. The same message about the same network or detector is given once."""
    messages = _said.setdefault(about, set())
    if message not in messages:
        messages.add(message)
        warn(message)


def in_short(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _stacklevel() -> int:
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals.get("__name__", "").startswith(
            ("gramwatch.", "gramwatch_lab.", "torch.", "functools")
        )
    ):
        level, frame = level + 1, frame.f_back
    return level


def listed(names: list[str], most: int = 8) -> str:
    """The first `most` names with commas between them, and the number of further names."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
