"""Sets of images, in and out of distribution, by their names. One source per file, in its publisher's layout.

`load` returns a set by its name, as uint8 tensors. `gramwatch data get NAME` downloads a set.
docs/datasets.md describes the sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from gramwatch.errors import DataError
from gramwatch.inputs import synthetic
from gramwatch.inputs.sets import CATALOGUE, Raw, Source, default_root, read
from gramwatch_lab.datasets import cifar, idx, miniplaces, odin, scenes, svhn, textures, tiny_imagenet
from gramwatch_lab.datasets.download import Download
from gramwatch_lab.datasets.folder import folder_source
from gramwatch_lab.datasets.images import REDUCE, made_grey, pixels

__all__ = ["CATALOGUE", "SOURCES", "Download", "ImageSet", "Source", "default_root", "load", "source_of"]

SOURCES: Mapping[str, Source] = {
    "cifar10": cifar.CIFAR10,
    "cifar100": cifar.CIFAR100,
    "cifar100_subset": cifar.CIFAR100_SUBSET,
    "cifar100_parts": cifar.CIFAR100_PARTS,
    "svhn": svhn.SVHN,
    "svhn_subset": svhn.SVHN_SUBSET,
    "mnist": idx.MNIST,
    "fashion_mnist": idx.FASHION_MNIST,
    "kmnist": idx.KMNIST,
    "dtd": textures.DTD,
    "dtd_10_classes": textures.DTD_10_CLASSES,
    "tiny_imagenet": tiny_imagenet.TINY_IMAGENET,
    "miniplaces": miniplaces.MINIPLACES,
    "miniplaces_without_scenes": miniplaces.MINIPLACES_WITHOUT_SCENES,
    "scenes": scenes.SCENES,
    "lsun_resize": odin.LSUN_RESIZE,
    "lsun_crop": odin.LSUN_CROP,
    "imagenet_resize": odin.IMAGENET_RESIZE,
    "imagenet_crop": odin.IMAGENET_CROP,
    "isun": odin.ISUN,
}
"""All published sets by name."""


@dataclass(frozen=True)
class ImageSet:
    """A set of images of one size."""

    name: str
    """The name in tables. It includes the way of reducing."""
    images: Tensor
    """uint8, N x C x H x W."""
    labels: Tensor | None
    description: str = ""
    """Origin and processing. For made-up images: their parameters and their space."""
    classes: tuple[str, ...] = ()
    """The names of the classes in the order of the labels. Empty if they are not known."""

    def __len__(self) -> int:
        return len(self.images)


def load(
    name: str,
    root: str | PathLike[str] | None = None,
    *,
    split: str = "test",
    size: int | None = None,
    reduce: str | None = None,
    grey: bool | None = None,
    count: int | None = None,
    seed: int = 0,
    classes: Sequence[str] | None = None,
) -> ImageSet:
    """A set of images by name, or the images of a folder.

    Args:
        name: one of `CATALOGUE`, or the path of a folder of images.
        root: the folder of the sets, by default `default_root()`.
        split: `"test"`; `"train"` and `"val"` if the set has them.
        size: the result is `size` x `size`. Larger images are reduced, smaller images are padded with black.
            By default images keep their size; made-up images, and all images with `reduce`, are 32 x 32.
        reduce: how larger images are reduced: `"nearest"`, `"antialiased"` or `"crop"`, a random square. By
            default antialiased, or as the set's publishers did it.
        grey: True turns three channels into one, False turns one channel into three equal channels.
        count: the number of images, drawn at random without repetition. By default all images, or 10,000
            made-up images.
        seed: the seed of the draw, of crops and of made-up images.
        classes: the classes to load, by name. A label is the position in `classes`. Only for sets that name
            their classes.

    """
    if reduce is not None and reduce not in REDUCE:
        raise DataError(f"there is no reduce='{reduce}': choose from {', '.join(REDUCE)}")
    if count is not None and count < 1:
        raise DataError(f"count={count} images were asked for")
    if size is None and reduce is not None:
        size = 32
    if name in synthetic.MAKERS:
        if classes is not None:
            raise DataError(f"'{name}' is made up: it has no classes")
        side, channels = size or 32, 1 if grey else 3
        about = f"{CATALOGUE[name].about}; {channels} x {side} x {side}, seed {seed}"
        images = synthetic.outliers(name, count or 10_000, side, channels, seed)
        return ImageSet(CATALOGUE[name].title, images, None, about)
    folder = Path(root) if root is not None else default_root()
    kept = None if classes is None else tuple(classes)
    return _load(name, folder.absolute(), split, size, reduce, grey, count, seed, kept)


def source_of(name: str, split: str = "test") -> Source:
    """The source of a set, by its name. It must have the split; made-up sets have every split.

    Nothing is read from disk.
    """
    source = CATALOGUE.get(name)
    if source is None:
        if not Path(name).is_dir():
            raise DataError(
                f"there is no set and no folder '{name}'. The sets are {', '.join(CATALOGUE)}; or give "
                "the path of a folder of images"
            )
        source = folder_source(Path(name))
    if source.place and split not in source.splits:
        raise DataError(f"'{name}' has no split '{split}': choose from {', '.join(source.splits)}")
    return source


# The cache is in memory only. Without it, decoding thousands of JPEGs would take most of a table's time.
@lru_cache(maxsize=16)
def _load(
    name: str,
    root: Path,
    split: str,
    size: int | None,
    reduce: str | None,
    grey: bool | None,
    count: int | None,
    seed: int,
    classes: tuple[str, ...] | None,
) -> ImageSet:
    source = source_of(name, split)
    labels_of_classes = None if classes is None else _labels_of(classes, name, source)
    raw = read(name, source, root, split) if name in CATALOGUE else source.read(root, split)
    if labels_of_classes is not None:
        raw = of_classes(raw, labels_of_classes)
    order = torch.randperm(len(raw), generator=torch.Generator().manual_seed(seed)) if count else None
    chosen = range(len(raw)) if order is None else order[:count].tolist()
    labels = raw.labels if raw.labels is None or order is None else raw.labels[order[:count]]
    how = reduce or source.reduce
    images, done = pixels(raw.images, chosen, size, how, seed)
    title, told = source.title, [f"{source.about}; split '{split}'"]
    if classes is not None:
        told.append(f"only {', '.join(classes)}")
    if len(chosen) < len(raw):
        told.append(f"{len(chosen):,} of {len(raw):,}, drawn with seed {seed}")
    if "reduced" in done:
        title += f", {REDUCE[how]}" + ("" if size == 32 else f" {size} x {size}")
        told.append(f"reduced to {size} x {size} ({REDUCE[how]})")
    if "padded" in done:
        told.append(f"put on black of {size} x {size}")
    if grey is True and images.shape[1] == 3:
        images, title = made_grey(images), f"{title}, grey"
        told.append("made grey (ITU-R 601)")
    elif grey is False and images.shape[1] == 1:
        images = images.expand(-1, 3, -1, -1).contiguous()
        told.append("repeated to three channels")
    return ImageSet(title, images, labels, "; ".join(told), source.classes if classes is None else classes)


def _labels_of(classes: tuple[str, ...], name: str, source: Source) -> list[int]:
    """The labels of classes. The source must name the classes."""
    unknown = [title for title in classes if title not in source.classes]
    if unknown or not classes or len(set(classes)) < len(classes):
        raise DataError(
            f"'{name}' has not the classes {', '.join(classes) or 'none'}: choose, each once, from "
            f"{', '.join(source.classes) or 'none, since this set has no names of classes'}"
        )
    return [source.classes.index(title) for title in classes]


def of_classes(raw: Raw, labels: Sequence[int]) -> Raw:
    """The images of these classes. The new label of a class is its position in `labels`."""
    assert raw.labels is not None
    of_class = [(raw.labels == label).nonzero().flatten() for label in labels]
    chosen = torch.cat(of_class)
    renumbered = torch.cat([torch.full_like(indices, new) for new, indices in enumerate(of_class)])
    if isinstance(raw.images, Tensor):
        return Raw(raw.images[chosen], renumbered)
    return Raw([raw.images[i] for i in chosen.tolist()], renumbered)
