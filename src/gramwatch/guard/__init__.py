"""`Guard`, a detector made of detectors: its rehearsal, and reading it from files and folders."""

from typing import TYPE_CHECKING

from gramwatch._moved import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
