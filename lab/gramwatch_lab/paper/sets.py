"""The sets that judge a network, by what it was trained on.

Small images: the published sets, and others like them. Photographs of scenes: near, a class that was left out
of training; far, other photographs, textures, digits and noise; controls, test photographs that were reduced
and enlarged in the same way; faults of the camera and the pipeline.
"""

from dataclasses import dataclass, replace

from gramwatch_lab.datasets.faults import FAULTS, NORMALISATIONS
from gramwatch_lab.datasets.scenes import CLASSES

SCENES = "scenes"
NEAR, FAR, CONTROL, FAULT = "near", "far", "control", "fault"


@dataclass(frozen=True)
class OodSet:
    """An out-of-distribution set, and the published set that it is, or is like."""

    title: str
    name: str
    """As `gramwatch_lab.datasets.load` knows it."""
    reduce: str | None = None
    published: str | None = None
    """The published set whose figures stand beside ours."""
    exact: bool = False
    """Whether it is that set itself, and not only made in the same way."""
    near: bool = False
    """Whether it is so near to the training data that the paper leaves it out of its means."""
    source: str = ""
    """Where the images come from, for methods that trained on others of the same source."""
    split: str = "test"


def _published(title: str, name: str, near: bool = False, source: str = "") -> OodSet:
    return OodSet(title, name, published=title, exact=True, near=near, source=source)


_TINY = "tiny_imagenet"
ODIN_SETS = (
    _published("iSUN", "isun"),
    _published("LSUN (R)", "lsun_resize"),
    _published("LSUN (C)", "lsun_crop"),
    _published("TinyImgNet (R)", "imagenet_resize", source=_TINY),
    _published("TinyImgNet (C)", "imagenet_crop", source=_TINY),
)
PHOTOGRAPHS = (
    OodSet("Tiny ImageNet, nearest", _TINY, "nearest", "TinyImgNet (R)", source=_TINY),
    OodSet("Tiny ImageNet, anti-aliased", _TINY, "antialiased", source=_TINY),
    OodSet("Tiny ImageNet, crops", _TINY, "crop", "TinyImgNet (C)", source=_TINY),
    OodSet("MiniPlaces, nearest", "miniplaces", "nearest"),
    OodSet("MiniPlaces, anti-aliased", "miniplaces", "antialiased"),
)
DIGITS = (
    OodSet("MNIST", "mnist"),
    OodSet("Fashion-MNIST", "fashion_mnist", published="Fashion-MNIST", exact=True),
    OodSet("KMNIST", "kmnist", published="KMNIST", exact=True),
)
# Made up in the space that their authors have them in: normalised values for CIFAR, pixels for SVHN.
NORMALISED_NOISE = (
    OodSet("Gaussian noise (normalised)", "gaussian_normalised", published="Gaussian"),
    OodSet("Rademacher noise", "rademacher", published="Rademacher"),
    OodSet("blobs (normalised)", "blobs_normalised", published="Blob"),
)
PIXEL_NOISE = (
    OodSet("Gaussian noise", "gaussian", published="Gaussian"),
    OodSet("Bernoulli noise", "bernoulli", published="Bernoulli"),
    OodSet("blobs", "blobs", published="Blob"),
)
TEXTURES = (
    OodSet("DTD", "dtd", "antialiased", published="Texture", exact=True),
    OodSet("DTD, 10 classes", "dtd_10_classes", published="Texture"),
)
NATURAL = (
    _published("SVHN", "svhn"),
    OodSet("SVHN, first 1,083 training images", "svhn_subset", published="SVHN"),
    _published("CIFAR-10", "cifar10"),
    _published("CIFAR-100", "cifar100"),
    OodSet("CIFAR-100 subset", "cifar100_subset", published="CIFAR-100"),
)
TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cifar100_parts": "CIFAR-100 (indicative)",
    "svhn": "SVHN",
    "mnist": "MNIST",
}
"""In-distribution sets, as tables call them."""
PART_OF = {"cifar100_parts": "cifar100"}
"""In-distribution sets that are a part of a published one. Their validation images are a split."""
INDICATIVE = {
    "cifar100_parts": "Indicative: 6,000 images, mostly of the training split; of each class 40 to fit, 10 "
    "to validate and 10 to test."
}
"""What a page must say of an in-distribution set."""
_SAME = {"cifar100": ("cifar100", "cifar100_subset"), "svhn": ("svhn", "svhn_subset")}
"""The sets that hold images of an in-distribution set."""


# --- photographs of scenes ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SceneSet(OodSet):
    """A set that judges a network trained on scenes."""

    kind: str = FAR
    """`NEAR`, `FAR`, `CONTROL` or `FAULT`."""
    side: int | None = None
    """The size from which images are enlarged. None: images are not enlarged."""
    grey: bool = False
    """Whether a control is made grey."""
    fault: str = ""
    strength: float = 0


def scene_sets() -> list[SceneSet]:
    """All sets. Which classes are near depends on the network; the subject knows it."""
    near = [SceneSet(f"{name}, left out", name, near=True, kind=NEAR) for name in CLASSES]
    return [*near, *_FAR, *_CONTROLS, *_faults()]


_FAR = (
    SceneSet("MiniPlaces without scenes", "miniplaces_without_scenes"),
    SceneSet("Tiny ImageNet, enlarged from 64", "tiny_imagenet", side=64),
    SceneSet("DTD", "dtd"),
    SceneSet("DTD, 10 classes, enlarged from 32", "dtd_10_classes", side=32),
    SceneSet("MNIST, enlarged from 28", "mnist", side=28),
    SceneSet("Gaussian noise", "gaussian"),
    SceneSet("Bernoulli noise", "bernoulli"),
    SceneSet("blobs", "blobs"),
    # These five were first looked at when Guard's rule stood.
    SceneSet("iSUN, enlarged from 32", "isun", side=32),
    SceneSet("CIFAR-10, enlarged from 32", "cifar10", side=32),
    SceneSet("SVHN, first 1,083 training images, enlarged from 32", "svhn_subset", side=32),
    SceneSet("Fashion-MNIST, enlarged from 28", "fashion_mnist", side=28),
    SceneSet("KMNIST, enlarged from 28", "kmnist", side=28),
)
# 64, 32 and 28 pixels are the sizes of the sets above. 112, 96 and 64 are those of the fault "nearest".
_CONTROLS = (
    *(
        SceneSet(f"scenes through {side}", f"control_{side}", kind=CONTROL, side=side)
        for side in (112, 96, 64, 32)
    ),
    SceneSet("scenes through 28, grey", "control_28", kind=CONTROL, side=28, grey=True),
)


def _faults() -> list[SceneSet]:
    camera = [
        SceneSet(
            fault.title.format(strength),
            name if len(fault.strengths) == 1 else f"{name}_{strength:g}",
            kind=FAULT,
            fault=name,
            strength=strength,
        )
        for name, fault in FAULTS.items()
        for strength in fault.strengths
    ]
    pipeline = [SceneSet(title, name, kind=FAULT) for name, (title, _) in NORMALISATIONS.items()]
    return [*camera, *pipeline]


# --- all ----------------------------------------------------------------------------------------------


def ood_sets(in_distribution: str) -> list[OodSet]:
    """Every set that a network trained on this data is judged by: the published ones first."""
    if in_distribution == SCENES:
        return [*scene_sets()]
    inside = PART_OF.get(in_distribution, in_distribution)
    photographs = inside in ("cifar10", "cifar100")
    noise, other_noise = (NORMALISED_NOISE, PIXEL_NOISE)[:: 1 if photographs else -1]
    noises = [*noise, *(replace(ood_set, published=None) for ood_set in other_noise)]
    chosen = [*ODIN_SETS, *NATURAL, *PHOTOGRAPHS, *TEXTURES, *DIGITS, *noises]
    if inside == "mnist":
        isun = next(ood_set for ood_set in ODIN_SETS if ood_set.name == "isun")
        chosen = [*reversed(DIGITS), isun, *NATURAL, *PHOTOGRAPHS, *TEXTURES, *noises]
    return [
        replace(ood_set, near=photographs and ood_set.name.startswith("cifar"))
        for ood_set in chosen
        if ood_set.name not in _SAME.get(inside, (inside,))
    ]
