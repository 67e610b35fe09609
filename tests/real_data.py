"""Real images and networks from the folders beside the checkout, in the form networks take them."""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def mosaic(path: Path, count: int, tile: int = 32) -> np.ndarray:
    """The first images of a lossless mosaic of square tiles, row by row: N x H x W x 3."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    with Image.open(path) as image:
        rows = -(-count // (image.width // tile))
        sheet = np.asarray(image.convert("RGB").crop((0, 0, image.width, rows * tile)))
    columns = sheet.shape[1] // tile
    tiles = sheet.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
    return tiles[:count]


def normalised(images: np.ndarray, mean=CIFAR_MEAN, std=CIFAR_STD) -> Tensor:
    """uint8 N x H x W x 3 to normalised float32 N x 3 x H x W."""
    x = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def cifar10(folder: Path, part: str, count: int) -> tuple[Tensor, Tensor]:
    """Images of one packed part (`train_0` ... `test_0`), normalised, and their labels."""
    kind, number = part.split("_")
    labels = np.load(folder / "cifar10" / f"{kind}_labels.npy")[10000 * int(number) :][:count]
    images = mosaic(folder / "cifar10" / f"{part}.webp", count)
    return normalised(images), torch.from_numpy(labels.astype(np.int64))


def reduced(archive: Path, count: int, size: int, method: str) -> np.ndarray:
    """The first images of a tar archive of JPEGs reduced to `size`: `nearest` or `antialiased`."""
    import io
    import tarfile

    from PIL import Image

    filters = {"nearest": Image.Resampling.NEAREST, "antialiased": Image.Resampling.BICUBIC}
    images = []
    with tarfile.open(archive) as tar:
        for member in tar:
            if not member.name.lower().endswith((".jpeg", ".jpg")):
                continue
            file = tar.extractfile(member)
            assert file is not None
            image = Image.open(io.BytesIO(file.read())).convert("RGB")
            images.append(np.asarray(image.resize((size, size), filters[method])))
            if len(images) == count:
                break
    return np.stack(images)


def tiny_imagenet(folder: Path, count: int, size: int, method: str) -> np.ndarray:
    """Tiny ImageNet test images reduced to `size`: `nearest` or `antialiased`."""
    return reduced(folder / "tiny_imagenet_test" / "images.tar.xz", count, size, method)


def padded_grey(path: Path, count: int) -> np.ndarray:
    """Grey images of a gzipped IDX file, padded with black to 32 x 32, in three equal channels."""
    grey = (idx_images(path, count)[:, 0] * 255).round().byte().numpy()
    grey = np.pad(grey, ((0, 0), (2, 2), (2, 2)))
    return np.repeat(grey[..., None], 3, 3)


def idx_images(path: Path, count: int) -> Tensor:
    """Images of a gzipped IDX file as N x 1 x H x W, pixels in [0, 1]."""
    raw = gzip.decompress(path.read_bytes())
    height, width = (int.from_bytes(raw[i : i + 4], "big") for i in (8, 12))
    pixels = np.frombuffer(raw, np.uint8, offset=16)[: count * height * width]
    return torch.from_numpy(pixels.reshape(-1, 1, height, width).copy()).float() / 255


def idx_labels(path: Path, count: int) -> Tensor:
    raw = gzip.decompress(path.read_bytes())
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=8)[:count].astype(np.int64))


def checkpoint(path: Path) -> dict[str, Tensor]:
    loaded = torch.load(path, weights_only=True, map_location="cpu")
    return loaded.get("state_dict", loaded)
