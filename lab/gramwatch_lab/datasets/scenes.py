"""Photographs of six kinds of scenes, 128 x 128 pixels. Each class is a folder of WebP images."""

from pathlib import Path

from gramwatch.errors import DataError
from gramwatch.inputs.sets import Raw, Source
from gramwatch_lab.datasets.folder import read_folder

CLASSES = ("buildings", "forest", "glacier", "mountain", "sea", "street")
"""The names of the classes, in the order of their labels."""


def _read(root: Path, split: str) -> Raw:
    folder = root / "scenes" / split
    raw = read_folder(folder)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if names != list(CLASSES):
        raise DataError(f"{folder} has the folders {', '.join(names) or 'none'}, not {', '.join(CLASSES)}")
    return raw


SCENES = Source(
    "scenes",
    "photographs of buildings, forests, glaciers, mountains, the sea and streets, 128 x 128 pixels, 7,200 to "
    "train and 2,400 to test: scenes/{train,test}/CLASS/*.webp; not published anywhere in this form",
    "scenes",
    _read,
    classes=CLASSES,
)
