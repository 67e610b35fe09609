"""The page of `gramwatch report`, and the picture of the demo."""

from typing import TYPE_CHECKING

from gramwatch._moved import old_names

if not TYPE_CHECKING:
    __getattr__ = old_names(__name__)
