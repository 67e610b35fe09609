"""Any folder of images. If it has subfolders, they are the classes."""

from pathlib import Path

import torch

from gramwatch.datasets.source import Raw, Source, missing

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff"}


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
    classes = [path.relative_to(folder).parts[0] if path.parent != folder else None for path in files]
    names = sorted({name for name in classes if name is not None})
    if len(names) < 2 or None in classes:
        return Raw(files)
    return Raw(files, torch.tensor([names.index(str(name)) for name in classes]))


def folder_source(folder: Path) -> Source:
    """A folder as a set of images."""
    about = f"the images in the folder {folder.name}"
    return Source(folder.name, about, str(folder), lambda root, split: read_folder(folder), ("test",))
