"""Steps along the sign of a gradient, for methods that move their inputs. Adversarial examples by FGSM."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gramwatch.errors import InputError
from gramwatch.inputs.batches import Inputs, on_device
from gramwatch.methods.base import Method
from gramwatch.numerics import metrics
from gramwatch.observe.observation import Observation
from gramwatch.watch import Network, call, judging, unwrap

Scale = float | Sequence[float] | None
"""The divisor of a step: none, one number, or one for each channel of the inputs."""


class StepMethod(Method):
    """A method that moves its inputs one step along the sign of a gradient before it judges them.

    Args:
        model: any classifier that returns logits.
        eps: the size of the step. With zero no gradient is needed.
        scale: the divisor of the step, one number or one for each channel of the inputs.
        options: the arguments of every `Method`.

    """

    def __init__(self, model: nn.Module, *, eps: float, scale: Scale, **options: Any) -> None:
        super().__init__(model, **options)
        self.eps, self.scale = checked_eps(eps), checked_scale(scale)

    @property
    def gradients(self) -> bool:
        """Whether there is a step, which needs gradients."""
        return self.eps > 0

    def observed_leaf(self, inputs: Inputs) -> tuple[Tensor, Tensor, Observation]:
        """The inputs as images, a leaf to differentiate by, and the observation of the leaf."""
        images = single_images(inputs, self.model, self.name)
        leaf, given = leaf_of(images)
        return images, leaf, self.differentiable(given)

    def moved(self, images: Tensor, gradient: Tensor, eps: float) -> Observation:
        """The observation of the images after a step."""
        return self.observe(step(images, gradient, eps, self.scale))


def single_images(inputs: Inputs, model: nn.Module, name: str) -> Tensor:
    """The inputs as one floating tensor on the network's device, free of gradients."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        given = f"a {inputs.dtype} tensor" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        raise InputError(
            f"{name} moves its inputs along a gradient: they must be one floating-point tensor, not {given}"
        )
    if inputs.ndim == 0 or not len(inputs):
        raise InputError(
            "the batch is empty" if inputs.ndim else f"{name} needs a batch, got a single number"
        )
    with torch.inference_mode(False):
        moved: Tensor = on_device(inputs.detach(), model)
        return moved.clone() if moved.is_inference() else moved


def leaf_of(images: Tensor) -> tuple[Tensor, Tensor]:
    """Two copies: one to differentiate by, and one to call the network with. The network may overwrite it."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = images.detach().clone().requires_grad_()
        return leaf, leaf.clone()


def gradient(value: Tensor, leaf: Tensor, name: str, keep: bool = False) -> Tensor:
    """The gradient of the sum of `value` at the leaf. Parameters and buffers get none."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            return torch.autograd.grad(value.sum(), leaf, retain_graph=keep)[0]
    except RuntimeError as error:
        if "does not require grad" not in str(error) and "not have been used" not in str(error):
            raise
        raise InputError(
            f"{name} needs the gradient at the inputs, but what the network computes cannot be differentiated"
        ) from error


def step(images: Tensor, gradient: Tensor, eps: float, scale: Scale = None) -> Tensor:
    """`images + eps * sign(gradient) / scale`. Pixels whose gradient is NaN do not move."""
    direction = gradient.sign().nan_to_num(0.0)
    if scale is not None:
        direction = direction / _divisor(images, scale)
    return images + eps * direction


def _divisor(images: Tensor, scale: float | Sequence[float]) -> Tensor:
    values = torch.tensor(scale, dtype=images.dtype, device=images.device)
    if values.ndim == 0:
        return values
    if images.ndim < 2 or len(values) != images.shape[1]:
        raise InputError(
            f"scale has {len(values)} numbers, the inputs, of shape {tuple(images.shape)}, have "
            f"{images.shape[1] if images.ndim > 1 else 'no'} channels"
        )
    return values.view(1, -1, *[1] * (images.ndim - 2))


def checked_scale(scale: Scale) -> float | list[float] | None:
    """The scale as plain numbers, which must be positive."""
    if scale is None:
        return None
    if hasattr(scale, "tolist"):  # a tensor or an array
        scale = scale.tolist()
    numbers = [float(s) for s in scale] if isinstance(scale, Sequence) else [float(scale)]
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise ValueError(f"scale must be positive, got {scale}")
    return numbers if isinstance(scale, Sequence) else numbers[0]


def checked_eps(eps: float) -> float:
    """The size of the step, which must not be negative."""
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be zero or positive, got {eps}")
    return float(eps)


def inputs_of(network: Network, loader: Iterable[Any], doing: str, progress: bool) -> Iterable[Inputs]:
    """The inputs of every batch of a loader. An empty loader is an error."""
    empty = True
    for inputs, _ in network.batches(loader, doing, progress):
        empty = False
        yield inputs
    if empty:
        raise InputError(f"the loader yielded no example: {doing} needs at least one")


def separation(inside: Tensor, outside: Tensor) -> tuple[float, float]:
    """How well scores separate outliers: the pair of TNR at TPR 95 % and AUROC."""
    return metrics.tnr_at_tpr(inside.numpy(), outside.numpy()), metrics.auroc(inside.numpy(), outside.numpy())


def fgsm(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor | None = None,
    eps: float = 0.05,
    scale: Scale = None,
) -> Tensor:
    """Inputs moved by one step that makes the network less sure of their class (fast gradient sign).

    `x + eps * sign(grad_x cross_entropy(f(x), y)) / scale` (Goodfellow, Shlens & Szegedy, ICLR 2015). The
    network runs in evaluation mode and is left as it was. Nothing is clamped.

    Args:
        model: any classifier that returns logits.
        inputs: a batch, one floating-point tensor. It is not modified.
        labels: the true classes. Without them, the predicted classes are used.
        eps: the size of the step. Lee et al. (2018) take 0.05 for images scaled to 0 ... 1.
        scale: the divisor of the step, one number or one for each channel. With the standard deviations of
            the normalisation, `eps` is in units of the images before it.

    """
    images = single_images(inputs, model, "fgsm")
    leaf, given = leaf_of(images)
    network, module = Network.of(model), unwrap(model)
    with judging(module), torch.enable_grad():
        logits = network.logits_of(call(module, given)).float()
        classes = logits.argmax(1) if labels is None else labels.to(logits.device)
        if classes.shape != logits.shape[:1] or classes.is_floating_point():
            raise InputError(
                f"labels have shape {tuple(classes.shape)} and dtype {classes.dtype}: expected "
                f"{len(logits)} whole numbers"
            )
        loss = cross_entropy(logits, classes, reduction="sum")
        return step(images, gradient(loss, leaf, "fgsm"), checked_eps(eps), checked_scale(scale)).detach()
