"""Why inputs got their scores: contributions and places, sets of inputs, words and pictures."""

from typing import TYPE_CHECKING

from gramwatch._moved import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
