"""Any folder of images. If it has subfolders, they are the classes."""

from collections.abc import Sequence
from pathlib import Path

import torch

from gramwatch.inputs.files import SUFFIXES, class_folders
from gramwatch.inputs.sets import Raw, Source, missing


def image_files(folder: Path) -> list[Path]:
    """The images below a folder, in the order of their paths. Hidden files are left out."""
    if not folder.is_dir():
        raise missing(folder, "folder")
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
    if not files:
        raise missing(folder / "*", "image")
    return files


def read_folder(folder: Path) -> Raw:
    """The images below a folder, with the first level of subfolders as labels."""
    files = image_files(folder)
    classes = class_folders(files, folder)
    if classes is None:
        return Raw(files)
    number = {name: i for i, name in enumerate(sorted(set(classes)))}
    return Raw(files, torch.tensor([number[name] for name in classes]))


def folder_source(folder: Path) -> Source:
    """A folder as a set of images."""
    about = f"the images in the folder {folder.name}"
    return Source(folder.name, about, str(folder), lambda root, split: read_folder(folder), ("test",))


def first_present(candidates: Sequence[Path]) -> Path:
    """The first path that exists. If none exists, the error names the first candidate."""
    for path in candidates:
        if path.exists():
            return path
    raise missing(candidates[0], "file or folder")
