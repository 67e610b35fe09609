"""The networks that are measured: the paper's three, and two at ImageNet's size from timm."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gramwatch.inputs.foreign import import_torchvision
from gramwatch_lab.networks import densenet_bc_100_12, resnet34, wide_resnet_40_2

ORDERS = range(1, 11)
CLASSES = 100
"""Of the networks from timm. Bounds grow with the classes: those of all taps of a ViT-B/16 are about 10 MB
for each, so that a thousand would not fit beside the rest on a small machine. What more classes do to the
time is what `lab.benchmarks.growth` measures."""


@dataclass(frozen=True)
class Spec:
    """A network and how much of it is measured on each kind of device."""

    make: str
    """A function of gramwatch.inputs.networks, or timm's name."""
    taps: str
    size: int
    """Pixels along a side of its images."""
    batch: dict[str, int]
    fit_images: dict[str, int]
    """How many images the end-to-end fit is given."""
    slow: bool
    """Whether the other implementations are run on it as well."""


_CIFAR = {"size": 32, "batch": {"cpu": 64, "cuda": 256}, "fit_images": {"cpu": 2_000, "cuda": 50_000}}
_IMAGENET = {"size": 224, "batch": {"cpu": 8, "cuda": 128}, "fit_images": {"cpu": 32, "cuda": 2_560}}

NETWORKS = {
    "ResNet-34 (CIFAR)": Spec("resnet34", "paper", slow=True, **_CIFAR),
    "DenseNet-BC-100-12": Spec("densenet_bc_100_12", "paper", slow=True, **_CIFAR),
    "WRN-40-2": Spec("wide_resnet_40_2", "paper", slow=True, **_CIFAR),
    "ResNet-50 at 224": Spec("resnet50", "all", slow=False, **_IMAGENET),
    "ViT-B/16 at 224": Spec("vit_base_patch16_224", "all", slow=False, **_IMAGENET),
}

_OWN = {make.__name__: make for make in (resnet34, densenet_bc_100_12, wide_resnet_40_2)}


def build(name: str, device: torch.device) -> nn.Module:
    """The network with random weights, in evaluation mode. ImportError where timm is needed and absent.

    Batch normalisation and the last layer's bias are set from one random batch, as training would, so that
    activations are neither huge nor tiny anywhere and more than one class is predicted.
    """
    spec = NETWORKS[name]
    torch.manual_seed(0)
    if spec.make in _OWN:
        model = _OWN[spec.make]()
    else:
        import_torchvision()
        import timm

        options = {"zero_init_last": False} if spec.make == "resnet50" else {}
        model = timm.create_model(spec.make, pretrained=False, num_classes=CLASSES, **options)
    model = model.to(device)
    settle(model, images(8 if spec.size > 100 else 32, spec.size).to(device))
    return model.eval()


@torch.no_grad()
def settle(model: nn.Module, x: Tensor) -> None:
    """Set running statistics and the last bias from one batch."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    before = [m.momentum for m in norms]
    for norm in norms:
        norm.momentum = 1.0
    model.train()
    model(x)
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    model.eval()
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    if last.bias is not None:
        last.bias -= model(x).mean(0)


def images(count: int, size: int, seed: int = 0) -> Tensor:
    """Random images on the CPU, float32."""
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))
