"""Tiny ImageNet: 200 classes of ImageNet as JPEGs of 64 x 64 pixels (Stanford's course CS231n)."""

from pathlib import Path

import torch

from gramwatch.errors import DataError
from gramwatch.inputs.sets import Raw, Source
from gramwatch_lab.datasets.download import Download
from gramwatch_lab.datasets.folder import image_files, read_folder


def _read(root: Path, split: str) -> Raw:
    folder = root / "tiny-imagenet-200"
    if split == "train":
        return read_folder(folder / "train")
    files = image_files(folder / split / "images")
    return Raw(files, _labels(folder, files) if split == "val" else None)


def _labels(folder: Path, files: list[Path]) -> torch.Tensor | None:
    """Labels of the validation images. None if the publisher's lists are missing or incomplete."""
    listed, classes = folder / "val" / "val_annotations.txt", folder / "wnids.txt"
    if not (listed.is_file() and classes.is_file()):
        return None
    try:
        # Classes are numbered by the order of the training folders' names, so labels of both splits agree.
        names = {name: i for i, name in enumerate(sorted(classes.read_text(encoding="utf-8").split()))}
        of_file = dict(line.split("\t")[:2] for line in listed.read_text(encoding="utf-8").splitlines())
        if any(path.name not in of_file for path in files):
            return None
        return torch.tensor([names[of_file[path.name]] for path in files])
    except KeyError as error:
        raise DataError(f"{listed} names a class {error} that {classes} does not") from None
    except ValueError as error:
        raise DataError(f"{listed} or {classes} is damaged: {error}") from None


TINY_IMAGENET = Source(
    "Tiny ImageNet",
    "photographs of 64 x 64 pixels, 100,000 to train, 10,000 each to validate and to test (CS231n, Stanford)",
    "tiny-imagenet-200",
    _read,
    ("train", "val", "test"),
    (
        Download(
            "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
            "90528d7ca1a48142e341f4ef8d21d0de",
            "pytorch-ood 0.4.0, dataset/img/tinyimagenet.py",
            size=248_100_043,
        ),
    ),
)
