"""The PyTorch functions whose results are watched, and how other functions treat the channel axis."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from gramwatch.watch.tap import mark

_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution"
_ACTIVATIONS = (
    "celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid mish prelu relu "
    "relu6 rrelu selu sigmoid silu softplus softshrink softsign tanh tanhshrink threshold"
)
RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu".split())
KINDS: dict[str, str] = {
    **dict.fromkeys(_CONVOLUTIONS.split(), "convolution"),
    **dict.fromkeys(["linear", "bilinear", "addmm"], "linear"),
    **dict.fromkeys(RECURRENT, "recurrent"),
    "multi_head_attention_forward": "attention",
    **dict.fromkeys(_ACTIVATIONS.split(), "activation"),
    "mark": "mark",
}
WATCHED_LATER = RECURRENT | {"addmm"}
"""The functions that version 0.1.0 did not watch."""
# Functions that only move values. If a tensor of channel numbers goes through them, it shows where the
# channels end up.
MOVES = frozenset(
    (
        "__get__ __getitem__ permute transpose swapaxes swapdims movedim moveaxis t adjoint "
        "reshape reshape_as view view_as flatten ravel unflatten squeeze unsqueeze expand expand_as "
        "repeat tile unbind select narrow chunk split tensor_split roll flip unfold "
        "pixel_shuffle pixel_unshuffle"
    ).split()
)
# Functions that mix the values of different channels. The values of their result are new.
PRODUCTS = frozenset("matmul __matmul__ mm bmm".split())
MIXES = PRODUCTS | set("__rmatmul__ addbmm baddbmm einsum tensordot inner mv addmv dot cdist".split())
# The channel axis of a function's result, used if the inputs do not determine it.
LAYOUTS = {
    **dict.fromkeys("batch_norm instance_norm group_norm".split(), 1),
    **dict.fromkeys(("layer_norm", "rms_norm", "embedding", *RECURRENT), -1),
}


def operation_of(func: Any) -> str:
    """A function's name without underscores and overload: "relu" for `relu_`, `_relu` and `relu.default`."""
    name: str = getattr(func, "__name__", "")
    return name.partition(".")[0].strip("_") if not name.startswith("__") else name


def _watched_functions() -> dict[Any, str]:
    """Every function of PyTorch that counts as an operation of `KINDS`, and that operation."""
    operations: dict[Any, str] = {mark: "mark"}
    places = (torch, torch.nn.functional, Tensor, torch._C._nn, torch.ops.aten)
    for operation in KINDS:
        for place, name in itertools.product(places, (operation, f"{operation}_", f"_{operation}")):
            function = getattr(place, name, None)
            if not callable(function):
                continue
            operations[function] = operation
            if place is torch.ops.aten:
                overloads = [getattr(function, overload) for overload in function.overloads()]
                operations |= dict.fromkeys(overloads, operation)
    return operations


OPERATIONS = _watched_functions()
"""The operation of every watched function. Functions are compared by identity: torch.compile can follow that
in a compiled network, but no work on names."""


def watched(func: Any, args: tuple[Any, ...]) -> str | None:
    """The operation of a call; None if the call is not watched.

    A recurrent layer is not watched on a packed sequence, which has no axis of examples. Its second argument
    has the number of examples of each step.
    """
    operation = OPERATIONS.get(func)
    if operation in RECURRENT:
        second = args[1] if len(args) > 1 else None
        if isinstance(second, Tensor) and not second.is_floating_point():
            return None
    return operation


@functools.lru_cache(4096)
def writes(func: Any) -> bool:
    """Whether a function's name says that it writes into an existing tensor."""
    name: str = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name in ("__set__", "__setitem__")
