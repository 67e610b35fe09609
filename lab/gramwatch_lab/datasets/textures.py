"""DTD, the Describable Textures Dataset, and a small part of it reduced to 32 x 32.

Cimpoi et al., "Describing Textures in the Wild" (2014).
"""

from pathlib import Path

from gramwatch.inputs.sets import Raw, Source
from gramwatch_lab.datasets.download import Download
from gramwatch_lab.datasets.folder import first_present, image_files, read_folder


def _read(root: Path, split: str) -> Raw:
    return read_folder(first_present([root / "dtd" / "images", root / "dtd" / "dtd" / "images"]))


def _ten_classes(root: Path, split: str) -> Raw:
    return Raw(image_files(root / "dtd-32"))


DTD = Source(
    "DTD",
    "5,640 textures of various sizes in 47 classes, all of them (Cimpoi et al., 2014)",
    "dtd/images",
    _read,
    ("test",),
    (
        Download(
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
            None,
            "tensorflow/datasets, url_checksums",
            sha256="e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
            size=625_239_812,
        ),
    ),
)
DTD_10_CLASSES = Source(
    "DTD, 10 classes",
    "1,200 textures of 10 of DTD's classes, reduced to 32 x 32 pixels beforehand in a way not known; not "
    "published anywhere in this form",
    "dtd-32",
    _ten_classes,
    ("test",),
)
