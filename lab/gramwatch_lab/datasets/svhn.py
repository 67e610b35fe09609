"""SVHN, the Street View House Numbers: MATLAB files of cropped digits, and the first images of one of them.

Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning" (2011).
"""

from pathlib import Path

import torch

from gramwatch.errors import DataError
from gramwatch.inputs.sets import Raw, Source
from gramwatch_lab.datasets.arrays import image_array
from gramwatch_lab.datasets.download import Download
from gramwatch_lab.datasets.folder import first_present

MOST_IMAGES = 1_000_000
"""The largest number of images in a file. The publisher's largest file has 531,131."""


def _read(root: Path, split: str) -> Raw:
    from scipy.io import loadmat, whosmat

    name = f"{split}_32x32.mat"
    path = first_present([root / "svhn" / name, root / name])
    try:
        # Images are H x W x 3 x N. The digit 0 has the label 10. Sizes are checked before memory is taken.
        sizes = {key: (shape, kind) for key, shape, kind in whosmat(path)}
        (*size, count), kind = sizes["X"]
        if size != [32, 32, 3] or kind != "uint8" or count > MOST_IMAGES:
            raise ValueError(f"its images are {kind} of shape {sizes['X'][0]}")
        if sizes["y"][0] != (count, 1):
            raise ValueError(f"there are {count} images, and labels of shape {sizes['y'][0]}")
        content = loadmat(path, variable_names=["X", "y"])
        images, labels = torch.from_numpy(content["X"]), torch.from_numpy(content["y"].astype("int64"))
        if ((labels < 1) | (labels > 10)).any():
            raise ValueError("a label is not from 1 to 10")
        return Raw(images.permute(3, 2, 0, 1).contiguous(), labels.flatten() % 10)
    except Exception as error:  # a damaged file can raise nearly anything
        raise DataError(f"{path} is not SVHN's file of cropped digits: {error!s:.200}") from None


def _subset(root: Path, split: str) -> Raw:
    return Raw(image_array(root / "svhn-subset" / "images.npy"))


def _download(split: str, sha256: str, size: int) -> Download:
    url = f"https://ufldl.stanford.edu/housenumbers/{split}_32x32.mat"
    return Download(url, None, "tensorflow/datasets, url_checksums", "svhn", sha256=sha256, size=size)


SVHN = Source(
    "SVHN",
    "photographed house numbers cut to 32 x 32 pixels, 73,257 to train, 26,032 to test (Netzer et al., 2011)",
    "svhn/*_32x32.mat",
    _read,
    downloads=(
        _download(
            "train",
            "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            182_040_794,
        ),
        _download(
            "test",
            "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            64_275_384,
        ),
    ),
)
SVHN_SUBSET = Source(
    "SVHN, first 1,083 training images",
    "the first 1,083 images of SVHN's training split, without labels: images.npy (1083 x 32 x 32 x 3, "
    "uint8); not published anywhere in this form",
    "svhn-subset/images.npy",
    _subset,
    ("test",),
)
