"""Networks as people have them, with images that fit, calibrate and test, and sets of outliers.

Pretrained networks as they are, with a new linear head, or trained further in all layers; small networks from
scratch; networks for CIFAR-10. `NETWORKS` lists them. What is trained here is trained by a fixed recipe and
kept in a folder.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import trange

from gramwatch.inputs.foreign import imported
from gramwatch.inputs.networks import Loaded
from gramwatch.inputs.networks import load as load_network
from gramwatch_lab.datasets import load
from gramwatch_lab.datasets.images import resized, through
from gramwatch_lab.datasets.scenes import CLASSES

FIT, CALIBRATE, TEST, OUTLIERS = 1500, 800, 400, 200
HEAD = 3000
"""The training images of a pretrained network. The guard is fitted to the first `FIT` of them."""
BATCH = 50
SYNSETS = {
    "tench": "n01440764",
    "springer": "n02102040",
    "cassette player": "n02979186",
    "chain saw": "n03000684",
    "church": "n03028079",
    "French horn": "n03394916",
    "garbage truck": "n03417042",
    "gas pump": "n03425413",
    "golf ball": "n03445777",
    "parachute": "n03888257",
}
"""The classes of Imagenette, and their folders."""
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TENSORFLOW = (127 / 255,) * 3, (128 / 255,) * 3
CAFFE = (123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,) * 3
"""Means and standard deviations of pixels from 0 to 1."""


@dataclass(frozen=True)
class Subject:
    """A network, the normalisation of its input, and images, uint8."""

    network: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Tensor
    calibrate: Tensor
    test: Tensor
    others: Mapping[str, tuple[str, Tensor]]
    """The kind and the images of each outlier set, and of each control."""

    def inputs(self, images: Tensor, mean: Any = None, std: Any = None) -> Iterator[Tensor]:
        """Batches of the network's input."""
        for batch in images.split(BATCH):
            yield normalised(batch, mean or self.mean, std or self.std)


@dataclass(frozen=True)
class Places:
    """The folders that are given."""

    data: Path
    weights: Path
    pretrained: Path
    kept: Path
    """For networks that are trained here."""
    device: str = "cpu"


def normalised(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The network's input of uint8 images."""
    channels = (torch.tensor(c, device=images.device)[:, None, None] for c in (mean, std))
    return (images.float() / 255 - next(channels)) / next(channels)


def of_device(network: nn.Module, images: Tensor, normalisation: Sequence[Any]) -> Tensor:
    """The network's input of uint8 images, on its device."""
    return normalised(images.to(next(network.parameters()).device), *normalisation)


def images_of(name: str, data: Path, side: int, count: int, **how: Any) -> Tensor:
    """Images of a set in one size. Small ones are enlarged, not padded."""
    if name.startswith("imagenette"):
        return load(str(data / name), data, grey=False, count=count, size=side).images
    return resized(load(name, data, grey=False, count=count, **how).images, side)


# --- images ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Images of known classes, and the outliers of a class that was left out."""

    train: Tensor
    labels: Tensor
    calibrate: Tensor
    test: Tensor
    others: Mapping[str, tuple[str, Tensor]]


def scenes(places: Places, side: int, left_out: str = "", count: int = HEAD) -> Task:
    """Photographs of scenes."""
    classes = [name for name in CLASSES if name != left_out]
    train = load("scenes", places.data, split="train", classes=classes, count=count)
    assert train.labels is not None
    known = images_of("scenes", places.data, side, CALIBRATE + TEST, classes=classes)
    near = images_of("miniplaces_without_scenes", places.data, side, OUTLIERS)
    others = {"MiniPlaces without scenes": ("near", near)}
    if left_out:
        images = images_of("scenes", places.data, side, OUTLIERS, classes=[left_out])
        others[f"{left_out}, left out"] = ("near", images)
    others["Imagenette"] = ("far", images_of("imagenette/val", places.data, side, OUTLIERS))
    test = known[CALIBRATE:]
    small = small_sets(places, test)
    return Task(resized(train.images, side), train.labels, known[:CALIBRATE], test, others | small)


def imagenette(places: Places, side: int, left_out: str = "", count: int | None = None) -> Task:
    """Photographs of ten classes of ImageNet: all of them, in `imagenette_all`, with a `count`."""
    train = load(
        str(places.data / ("imagenette_all" if count else "imagenette/train")), grey=False, size=side
    )
    held = load(str(places.data / "imagenette/val"), grey=False, size=side)
    assert train.labels is not None
    assert held.labels is not None
    images, labels = _shuffled(train.images, train.labels)
    test, test_labels = _shuffled(held.images, held.labels)
    others = {
        "MiniPlaces": ("near", images_of("miniplaces", places.data, side, OUTLIERS)),
        "scenes": ("near", images_of("scenes", places.data, side, OUTLIERS)),
    }
    if left_out:
        number = sorted(SYNSETS.values()).index(SYNSETS[left_out])
        others[f"{left_out}, left out"] = ("near", images[labels == number][:OUTLIERS])
        images, test = images[labels != number], test[test_labels != number]
        labels = labels[labels != number]
        labels = labels - (labels > number).long()
    if side > 128:
        others["control: through 128 pixels"] = ("control", through(test[:OUTLIERS], 128))
    others |= small_sets(places, test)
    if count:
        calibrate, images, labels = (
            images[-CALIBRATE:],
            images[:-CALIBRATE][:count],
            labels[:-CALIBRATE][:count],
        )
        return Task(images, labels, calibrate, test, others)
    fitted = len(images) * FIT // (FIT + CALIBRATE)
    return Task(images[:fitted], labels[:fitted], images[fitted:], test, others)


def _shuffled(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def small_sets(places: Places, test: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Sets of small images, enlarged, and known images that were reduced to their size: the controls."""
    side = test.shape[-1]
    sets = {"Tiny ImageNet": "tiny_imagenet", "textures": "dtd_10_classes", "SVHN": "svhn_subset"}
    sets["digits"] = "mnist"
    others = {title: ("far", images_of(n, places.data, side, OUTLIERS)) for title, n in sets.items()}
    for reduced in (64, 32):
        if reduced < side:
            others[f"control: through {reduced} pixels"] = ("control", through(test[:OUTLIERS], reduced))
    return others


CIFAR_SETS = {
    "CIFAR-100": ("near", "cifar100_subset"),
    "Tiny ImageNet": ("near", "tiny_imagenet"),
    "SVHN": ("far", "svhn_subset"),
    "iSUN": ("far", "isun"),
    "MiniPlaces": ("far", "miniplaces"),
    "textures": ("far", "dtd_10_classes"),
    "digits": ("far", "mnist"),
}
"""The outlier sets of networks for CIFAR-10."""


def of_cifar10(
    places: Places, loaded: Loaded, fit: int = FIT, test: int = TEST, outliers: int = OUTLIERS
) -> Subject:
    """A network for CIFAR-10, with its images."""
    known = images_of("cifar10", places.data, 32, CALIBRATE + test)
    others = {t: (kind, images_of(n, places.data, 32, outliers)) for t, (kind, n) in CIFAR_SETS.items()}
    return Subject(
        loaded.network.to(places.device),
        loaded.mean,
        loaded.std,
        images_of("cifar10", places.data, 32, fit, split="train"),
        known[:CALIBRATE],
        known[CALIBRATE:],
        others,
    )


def cifar10(places: Places, name: str, file: str) -> Subject:
    """A network for CIFAR-10 that others have trained."""
    return of_cifar10(places, load_network(name, places.weights / file))


def openood(places: Places, seed: int) -> Subject:
    """The ResNet-18 of OpenOOD's benchmark for CIFAR-10, which `gramwatch train resnet18` trains."""
    loaded = load_network("resnet18", places.kept / f"resnet18_{seed}.safetensors")
    return of_cifar10(places, loaded, fit=10_000, test=2_000, each=2_000)


# --- networks ----------------------------------------------------------------------------------------


def lite(version: int, places: Places) -> nn.Module:
    """EfficientNet-Lite with 1,000 classes of ImageNet."""
    from safetensors.torch import load_file

    network = load_network(f"timm:tf_efficientnet_lite{version}").record.build(1000)
    network.load_state_dict(load_file(places.pretrained / f"efficientnet_lite{version}.safetensors"))
    return network.eval()


class BlueFirst(nn.Module):
    """A network that takes blue, green and red, for images of red, green and blue."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images.flip(1))
        return logits


def resnet50(places: Places) -> Any:
    """ResNet-50 with 1,000 classes of ImageNet, as Keras trained it."""
    from safetensors.torch import load_file

    network: Any = load_network("torchvision:resnet50").record.build(1000)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1.001e-5
    for block in (network.layer2[0], network.layer3[0], network.layer4[0]):
        block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)
    network.load_state_dict(load_file(places.pretrained / "resnet50.safetensors"))
    return BlueFirst(network.eval())


def head_of(network: Any) -> tuple[Any, str]:
    """The module that holds the last linear layer, and its name there."""
    if isinstance(network, BlueFirst):
        return network.network, "fc"
    return network, "classifier"


def with_head(network: Any, task: Task, normalisation: Sequence[Any]) -> None:
    """Give the network a linear head that knows the classes of a task. The body stays as it is."""
    torch.manual_seed(0)
    holder, place = head_of(network)
    width = getattr(holder, place).in_features
    setattr(holder, place, nn.Identity())
    with torch.no_grad():
        features = torch.cat([network(of_device(network, b, normalisation)) for b in task.train.split(BATCH)])
    features = features.cpu()
    head = nn.Linear(width, int(task.labels.max()) + 1)
    optimiser = torch.optim.AdamW(head.parameters(), 2e-3, weight_decay=1e-2)
    for _ in range(30):
        for chosen in torch.randperm(len(features)).split(128):
            optimiser.zero_grad()
            F.cross_entropy(head(features[chosen]), task.labels[chosen]).backward()
            optimiser.step()
    setattr(holder, place, head.to(next(network.parameters()).device))


def trained(network: nn.Module, task: Task, normalisation: Sequence[Any], epochs: int, rate: float) -> None:
    """Train all layers: flipped and shifted images, AdamW, a learning rate that falls to zero."""
    torch.manual_seed(0)
    network.train()
    optimiser = torch.optim.AdamW(network.parameters(), rate, weight_decay=0.05)
    side, steps = task.train.shape[-1], epochs * -(-len(task.train) // 64)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.15)
    for _ in trange(epochs, desc="training", unit="epoch"):
        for chosen in torch.randperm(len(task.train)).split(64):
            images = of_device(network, task.train[chosen], normalisation)
            images = images.flip(3) if torch.rand(()) < 0.5 else images
            shift = side // 10
            down, across = torch.randint(0, 2 * shift + 1, (2,)).tolist()
            padded = F.pad(images, [shift] * 4, mode="reflect")
            images = padded[:, :, down : down + side, across : across + side]
            optimiser.zero_grad()
            F.cross_entropy(network(images), task.labels[chosen].to(images.device)).backward()
            optimiser.step()
            schedule.step()
    network.eval()


def once(network: nn.Module, path: Path, train: Callable[[], None]) -> None:
    """Train the network, or read what an earlier run trained."""
    if path.is_file():
        network.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        network.eval()
        return
    train()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), path)


def of_task(network: nn.Module, normalisation: Sequence[Any], task: Task) -> Subject:
    """A network with its images."""
    mean, std = normalisation
    with torch.inference_mode():
        right = [
            (network(of_device(network, images, normalisation)).argmax(1).cpu() == labels).sum()
            for images, labels in zip(
                task.train[:FIT].split(BATCH), task.labels[:FIT].split(BATCH), strict=True
            )
        ]
    print(f"right: {int(sum(right)) / min(FIT, len(task.train)):.1%} of the training images", flush=True)
    return Subject(network, mean, std, task.train[:FIT], task.calibrate, task.test, task.others)


def head_only(places: Places, build: Any, normalisation: Any, images: Any) -> Subject:
    """A pretrained network with a new head."""
    network, task = build(places).to(places.device), images(places)
    with_head(network, task, normalisation)
    return of_task(network, normalisation, task)


def all_layers(places: Places, build: Any, normalisation: Any, images: Any, name: str) -> Subject:
    """A pretrained network with a new head, trained further in all layers."""
    network, task = build(places).to(places.device), images(places)
    holder, place = head_of(network)
    torch.manual_seed(0)
    head = nn.Linear(getattr(holder, place).in_features, int(task.labels.max()) + 1)
    setattr(holder, place, head.to(places.device))
    path = places.kept / f"{name}.pt"
    once(network, path, lambda: trained(network, task, normalisation, epochs=4, rate=1e-3))
    return of_task(network, normalisation, task)


def as_it_is(places: Places, build: Any, normalisation: Any, side: int) -> Subject:
    """A pretrained network with all its classes, and photographs of ten of them."""
    task = imagenette(places, side, count=HEAD)
    of_ten = torch.tensor([0, 217, 482, 491, 497, 566, 569, 571, 574, 701])
    known = Task(task.train, of_ten[task.labels], task.calibrate, task.test, task.others)
    return of_task(build(places).to(places.device), normalisation, known)


def from_scratch(
    places: Places, name: str, images: Any, epochs: int, rate: float = 2e-3, **options: Any
) -> Subject:
    """A small network that has seen nothing but the images of its task."""
    task = images(places)
    torch.manual_seed(0)
    network = imported("timm").create_model(name, num_classes=int(task.labels.max()) + 1, **options)
    network.to(places.device)
    path = places.kept / f"{name}_{len(task.train)}.pt"
    once(network, path, lambda: trained(network, task, IMAGENET, epochs, rate))
    return of_task(network, IMAGENET, task)


VIT = {"img_size": 64, "patch_size": 8, "embed_dim": 128, "depth": 6, "num_heads": 4}
OPENOOD = {f"OpenOOD's ResNet-18, CIFAR-10, seed {seed}": partial(openood, seed=seed) for seed in range(3)}
"""Networks by the recipe of a public benchmark. They are tabled by themselves."""
NETWORKS: Mapping[str, Callable[[Places], Subject]] = {
    "ResNet-20, CIFAR-10": partial(cifar10, name="resnet20", file="resnet20_cifar10.pth"),
    "DenseNet, CIFAR-10": partial(cifar10, name="densenet", file="densenet_bc_100_12_cifar10.pth"),
    "Lite0, scenes": partial(
        head_only, build=partial(lite, 0), normalisation=TENSORFLOW, images=partial(scenes, side=128)
    ),
    "Lite0, scenes without forest": partial(
        head_only,
        build=partial(lite, 0),
        normalisation=TENSORFLOW,
        images=partial(scenes, side=128, left_out="forest"),
    ),
    "Lite0, scenes, all layers": partial(
        all_layers,
        build=partial(lite, 0),
        normalisation=TENSORFLOW,
        images=partial(scenes, side=128),
        name="lite0_scenes",
    ),
    "Lite0, Imagenette": partial(as_it_is, build=partial(lite, 0), normalisation=TENSORFLOW, side=160),
    "Lite0, Imagenette without church, all layers": partial(
        all_layers,
        build=partial(lite, 0),
        normalisation=TENSORFLOW,
        images=partial(imagenette, side=128, left_out="church", count=HEAD),
        name="lite0_imagenette",
    ),
    "Lite2, Imagenette": partial(as_it_is, build=partial(lite, 2), normalisation=TENSORFLOW, side=192),
    "ResNet-50, Imagenette": partial(as_it_is, build=resnet50, normalisation=CAFFE, side=160),
    "ResNet-50, scenes without street": partial(
        head_only,
        build=resnet50,
        normalisation=CAFFE,
        images=partial(scenes, side=112, left_out="street"),
    ),
    "ResNet-18, scenes without glacier": partial(
        from_scratch,
        name="resnet18",
        images=partial(scenes, side=64, left_out="glacier", count=6000),
        epochs=8,
    ),
    "ViT, scenes": partial(
        from_scratch,
        name="vit_tiny_patch16_224",
        images=partial(scenes, side=64, count=7000),
        epochs=12,
        rate=1e-3,
        **VIT,
    ),
    "ConvNeXt, Imagenette without golf ball": partial(
        from_scratch,
        name="convnext_atto",
        images=partial(imagenette, side=64, left_out="golf ball", count=8000),
        epochs=10,
    ),
    "MobileNetV3, Imagenette without tench": partial(
        from_scratch,
        name="mobilenetv3_small_100",
        images=partial(imagenette, side=96, left_out="tench", count=8100),
        epochs=12,
    ),
}
"""The networks by name."""
FAMILIES = {
    "CIFAR": ("ResNet-20", "DenseNet"),
    "Lite": ("Lite0", "Lite2"),
    "ResNet-50": ("ResNet-50",),
    "ResNet-18": ("ResNet-18",),
    "ViT": ("ViT",),
    "ConvNeXt": ("ConvNeXt",),
    "MobileNetV3": ("MobileNetV3",),
}
"""The families of networks, by the beginning of the names. All weigh the same."""
