"""MNIST, Fashion-MNIST and KMNIST: IDX files, gzipped or not.

LeCun et al., "The MNIST database of handwritten digits" (1998); Xiao et al., "Fashion-MNIST" (2017);
Clanuwat et al., "Deep Learning for Classical Japanese Literature" (2018).
"""

import gzip
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gramwatch.datasets.source import Download, Raw, Source, first_present
from gramwatch.errors import DataError


def read_idx(path: Path) -> Tensor:
    """The uint8 array of an IDX file: 0, 0, the type 8, the number of axes, their lengths, the data."""
    try:
        content = path.read_bytes()
        raw = gzip.decompress(content) if path.suffix == ".gz" else content
        axes = raw[3]
        shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
        if raw[:3] != b"\0\0\x08" or len(raw) != 4 + 4 * axes + int(np.prod(shape)):
            raise ValueError("its header does not match its length")
    except (OSError, EOFError, zlib.error, IndexError, ValueError) as error:
        raise DataError(f"{path} is not a whole IDX file of bytes: {error}") from None
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape).copy())


def _read(folder: str, root: Path, split: str) -> Raw:
    stem = "train" if split == "train" else "t10k"
    images, labels = (
        read_idx(first_present([root / folder / "raw" / f"{stem}-{kind}{end}" for end in (".gz", "")]))
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    return Raw(images[:, None], labels.long())


FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _source(title: str, about: str, folder: str, home: str, md5s: tuple[str, ...]) -> Source:
    downloads = (
        Download(home + file, md5, "torchvision, datasets/mnist.py", f"{folder}/raw")
        for file, md5 in zip(FILES, md5s, strict=True)
    )
    return Source(title, about, f"{folder}/raw", partial(_read, folder), downloads=tuple(downloads))


MNIST = _source(
    "MNIST",
    "70,000 grey handwritten digits of 28 x 28 pixels (LeCun et al., 1998)",
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
FASHION_MNIST = _source(
    "Fashion-MNIST",
    "70,000 grey pictures of clothes of 28 x 28 pixels (Xiao et al., 2017)",
    "FashionMNIST",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)
KMNIST = _source(
    "KMNIST",
    "70,000 grey cursive Japanese characters of 28 x 28 pixels (Clanuwat et al., 2018)",
    "KMNIST",
    "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
    (
        "bdb82020997e1d708af4cf47b453dcf7",
        "e144d726b3acfaa3e44228e80efcd344",
        "5c965bf0a639b31b8f53240b1b52f4d7",
        "7320c461ea6c1c855c0b718fb2a4b134",
    ),
)
