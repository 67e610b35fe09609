"""MNIST, Fashion-MNIST and KMNIST: IDX files, gzipped or not.

LeCun et al., "The MNIST database of handwritten digits" (1998); Xiao et al., "Fashion-MNIST" (2017);
Clanuwat et al., "Deep Learning for Classical Japanese Literature" (2018).
"""

import gzip
import math
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gramwatch.errors import DataError
from gramwatch.inputs.sets import Raw, Source
from gramwatch_lab.datasets.download import Download
from gramwatch_lab.datasets.folder import first_present

LARGEST = 2**28
"""The largest array that is read, in bytes. The largest one here has 47 million bytes."""


def read_idx(path: Path) -> Tensor:
    """The uint8 array of an IDX file.

    The file has two zero bytes, the type 8, the number of axes, the length of each axis, and the data.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            start = file.read(4)
            if start[:3] != b"\0\0\x08" or len(start) < 4:
                raise ValueError("it does not begin as such a file")
            lengths = file.read(4 * start[3])
            shape = [int.from_bytes(lengths[i : i + 4], "big") for i in range(0, 4 * start[3], 4)]
            size = math.prod(shape)
            if size > LARGEST:
                raise ValueError(f"its header asks for {size:,} bytes")
            content = file.read(size + 1)  # one byte more, to notice a file that is too long
            if len(lengths) != 4 * start[3] or len(content) != size:
                raise ValueError("its header does not match its length")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path} is not a whole IDX file of bytes: {error}") from None
    return torch.from_numpy(np.frombuffer(content, np.uint8).reshape(shape).copy())


def _read(folder: str, root: Path, split: str) -> Raw:
    stem = "train" if split == "train" else "t10k"
    paths = [
        first_present([root / folder / "raw" / f"{stem}-{kind}{end}" for end in (".gz", "")])
        for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    images, labels = (read_idx(path) for path in paths)
    if images.shape[1:] != (28, 28):
        raise DataError(f"{paths[0]} holds bytes of shape {tuple(images.shape)}, not images of 28 x 28")
    if labels.shape != images.shape[:1] or (labels >= 10).any():
        raise DataError(f"{paths[1]} does not hold {len(images)} labels below 10")
    return Raw(images[:, None], labels.long())


FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def _source(title: str, about: str, folder: str, home: str, files: tuple[tuple[str, int], ...]) -> Source:
    """A source, from the SHA-256 and the size of each file."""
    cited = "tensorflow/datasets, url_checksums"
    downloads = (
        Download(home + file, None, cited, f"{folder}/raw", sha256=sha256, size=size)
        for file, (sha256, size) in zip(FILES, files, strict=True)
    )
    return Source(title, about, f"{folder}/raw", partial(_read, folder), downloads=tuple(downloads))


MNIST = _source(
    "MNIST",
    "70,000 grey handwritten digits of 28 x 28 pixels (LeCun et al., 1998)",
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", 9_912_422),
        ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", 28_881),
        ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", 1_648_877),
        ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", 4_542),
    ),
)
FASHION_MNIST = _source(
    "Fashion-MNIST",
    "70,000 grey pictures of clothes of 28 x 28 pixels (Xiao et al., 2017)",
    "FashionMNIST",
    "https://fashion-mnist.s3.eu-central-1.amazonaws.com/",
    (
        ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", 26_421_880),
        ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", 29_515),
        ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", 4_422_102),
        ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", 5_148),
    ),
)
KMNIST = _source(
    "KMNIST",
    "70,000 grey cursive Japanese characters of 28 x 28 pixels (Clanuwat et al., 2018)",
    "KMNIST",
    "https://codh.rois.ac.jp/kmnist/dataset/kmnist/",
    (
        ("51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4", 18_165_135),
        ("e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17", 29_497),
        ("edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5", 3_041_136),
        ("20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c", 5_120),
    ),
)
