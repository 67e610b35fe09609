"""SVHN, the Street View House Numbers: MATLAB files of cropped digits.

Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning" (2011).
"""

from pathlib import Path

import torch

from gramwatch.datasets.source import Download, Raw, Source, first_present
from gramwatch.errors import DataError


def _read(root: Path, split: str) -> Raw:
    from scipy.io import loadmat

    name = f"{split}_32x32.mat"
    path = first_present([root / "svhn" / name, root / name])
    try:
        content = loadmat(path)
        # H x W x 3 x N, and the digit 0 is labelled 10.
        images, labels = torch.from_numpy(content["X"]), torch.from_numpy(content["y"].astype("int64"))
        return Raw(images.permute(3, 2, 0, 1).contiguous(), labels.flatten() % 10)
    except Exception as error:  # a damaged file can raise nearly anything
        raise DataError(f"{path} is not SVHN's file of cropped digits: {error}") from None


def _download(split: str, md5: str) -> Download:
    url = f"http://ufldl.stanford.edu/housenumbers/{split}_32x32.mat"
    return Download(url, md5, "torchvision, datasets/svhn.py", "svhn")


SVHN = Source(
    "SVHN",
    "photographed house numbers cut to 32 x 32 pixels, 73,257 to train, 26,032 to test (Netzer et al., 2011)",
    "svhn/*_32x32.mat",
    _read,
    downloads=(
        _download("train", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        _download("test", "eb5a983be6a315427106f1b164d9cef3"),
    ),
)
