"""Cells: the finished parts of an experiment, each in a file of its own, so that none is computed twice.

A cell is a function of its settings alone. Its file is named after what it holds and a hash of the settings,
and is put in place only when it is whole: an experiment that was interrupted goes on where it was.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from gramwatch.errors import ArtifactError, warn
from gramwatch.files import __version__, artifact


class Cells:
    """A folder of finished cells."""

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)

    def path(self, name: str, settings: Mapping[str, Any]) -> Path:
        """Where a cell is kept: its name in plain letters, and a hash of its settings."""
        whole = json.dumps({"version": __version__, **settings}, sort_keys=True)
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]
        return self.folder / f"{plain}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}.safetensors"

    def has(self, name: str, settings: Mapping[str, Any]) -> bool:
        """Whether the cell is finished."""
        return self.path(name, settings).exists()

    def read(self, name: str, settings: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """A finished cell, or None. One that is damaged is computed anew."""
        path = self.path(name, settings)
        if not path.exists():
            return None
        try:
            saved = artifact.read(path)
            with artifact.reading(path):
                shapes = artifact.shapes_of(saved.header)
            return saved.tensors(shapes)
        except ArtifactError as error:
            warn(f"a finished cell is computed anew: {error}")
            path.unlink()
            return None

    def keep(self, name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Keep a cell that is finished."""
        self.folder.mkdir(parents=True, exist_ok=True)
        header = {
            "detector": "cell",
            "network": settings.get("weights"),
            "settings": dict(settings),
            "shapes": {key: list(tensor.shape) for key, tensor in tensors.items()},
        }
        artifact.write(self.path(name, settings), header, tensors)
