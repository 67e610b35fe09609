"""The old name of `gramwatch.methods`."""

from gramwatch import methods
from gramwatch.errors import moved
from gramwatch.methods import *  # noqa: F403
from gramwatch.methods import METHODS as RIVALS
from gramwatch.methods.base import Method as Rival

__all__ = ["RIVALS", "Rival", *methods.__all__]
moved("gramwatch.rivals", "gramwatch.methods")
