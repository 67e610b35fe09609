"""FGSM: adversarial examples to tune on, if no outliers are at hand."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gramwatch.errors import InputError
from gramwatch.methods.perturb import (
    Scale,
    checked_eps,
    checked_scale,
    gradient,
    leaf_of,
    single_images,
    step,
)
from gramwatch.watch import Network, call, judging, unwrap


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
