"""Published sets of images: one source per file, read in the publisher's own layout.

`gramwatch data get NAME` downloads a set. docs/datasets.md describes the sets.
"""

from collections.abc import Mapping

from gramwatch.inputs.source import Source
from gramwatch_lab.datasets import cifar, idx, miniplaces, odin, scenes, svhn, textures, tiny_imagenet

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
