"""Compiled networks: a pass under watch, compiled by torch.compile as the network itself is.

A function that runs the network under watch is compiled in one graph, with the options that the user gave to
torch.compile. Reading a tap is an operator of its own in that graph. The operators return new tensors. If
they wrote into a shared tensor, the compiler might not use CUDA graphs.
"""

import contextlib
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gramwatch.errors import warn_once
from gramwatch.inputs.adapters import unwrap, wrappers
from gramwatch.numerics.kernels import Scratch, reading
from gramwatch.numerics.samples import Sample
from gramwatch.watch.operations import OPERATIONS
from gramwatch.watch.running import is_compiled
from gramwatch.watch.tap import mark

# The compiler may choose the strides of a tap. The kernels take all strides, and a copy would be costly.
_ANY_STRIDES = (torch.Tag.flexible_layout,)


@torch.library.custom_op("gramwatch::statistics", mutates_args=(), tags=_ANY_STRIDES)
def statistics(
    x: Tensor,
    channel_axis: int,
    pixels: int | None,
    channels: int | None,
    statistic: str,
    orders: Sequence[int],
    features: int,
    with_means: bool,
    mean_pixels: int | None,
    mean_channels: int | None,
) -> tuple[Tensor, Tensor]:
    """Gram statistics of a tap, `(N, orders, features)`, and its channel means if wanted, else `(N, 0)`.

    The first axis of `x` is the examples. `pixels` and `channels` say which part counts, as in a `Sample`,
    `mean_pixels` and `mean_channels` which part the means are of.
    """
    out = x.new_empty((len(x), len(orders), features), dtype=torch.float32)
    wanted = [(statistic, tuple(orders), out)]
    averaged = Sample(mean_pixels, mean_channels) if with_means else None
    means = reading(x, channel_axis, Sample(pixels, channels), wanted, averaged)(x, [out], Scratch())
    return out, x.new_empty((len(x), 0), dtype=torch.float32) if means is None else means


@statistics.register_fake
def _(
    x: Tensor,
    channel_axis: int,
    pixels: int | None,
    channels: int | None,
    statistic: str,
    orders: Sequence[int],
    features: int,
    with_means: bool,
    mean_pixels: int | None,
    mean_channels: int | None,
) -> tuple[Tensor, Tensor]:
    width = Sample(mean_pixels, mean_channels).count(x.shape[channel_axis]) if with_means else 0
    out = x.new_empty((x.shape[0], len(orders), features), dtype=torch.float32)
    return out, x.new_empty((x.shape[0], width), dtype=torch.float32)


@torch.library.custom_op("gramwatch::channel_means", mutates_args=(), tags=_ANY_STRIDES)
def channel_means(x: Tensor, channel_axis: int, pixels: int | None, channels: int | None) -> Tensor:
    """The mean of each channel of the part of a tap that counts, `(N, channels)`."""
    sample = Sample(pixels, channels)
    means = reading(x, channel_axis, sample, (), sample)(x, [], Scratch())
    assert means is not None
    return means


@channel_means.register_fake
def _(x: Tensor, channel_axis: int, pixels: int | None, channels: int | None) -> Tensor:
    width = Sample(pixels, channels).count(x.shape[channel_axis])
    return x.new_empty((x.shape[0], width), dtype=torch.float32)


def compiled_as(model: nn.Module, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of the inputs, compiled in one graph with the options that a network was compiled with."""
    # torch.compile counts recompilations by code object, and remembers by its name which sizes vary.
    name = f"{function.__name__}_{next(_numbers)}"
    code = function.__code__.replace(co_name=name)
    own = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    options = options_of(model)
    _show_watched_functions()
    compiled: Callable[[Any], Any] = torch.compile(own, fullgraph=True, **options)
    if not _records(options.get("backend")):
        return compiled
    return lambda inputs: tree_map_only(Tensor, Tensor.clone, compiled(inputs))


_numbers = itertools.count(1)


def _show_watched_functions() -> None:
    """Let torch.compile show every watched function to the watch. It would not show `mark` and hardswish."""
    torch.compiler.allow_in_graph(mark)
    with contextlib.suppress(ImportError, AttributeError):
        from torch._dynamo.variables.torch import get_overridable_functions

        get_overridable_functions().update(OPERATIONS)


def options_of(model: nn.Module) -> dict[str, Any]:
    """The arguments of torch.compile that a network was compiled with. The backend holds mode and options."""
    try:
        context = _context(next(filter(is_compiled, wrappers(model))))
        backend = context.callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        return {"backend": backend, "dynamic": context._dynamic}
    except (AttributeError, StopIteration):
        warn_once(
            unwrap(model),
            f"PyTorch {torch.__version__} does not show the options that {type(unwrap(model)).__name__} was "
            "compiled with: detectors compile it with the default options",
        )
        return {}


def _records(backend: Any) -> bool:
    """Whether a backend records CUDA graphs. The results of a call are then overwritten by the next call."""
    if not hasattr(backend, "config"):  # all but PyTorch's default backend
        return getattr(backend, "compiler_name", "") == "cudagraphs"
    from torch._inductor import config

    return bool(backend.config.get("triton.cudagraphs", config.triton.cudagraphs))


def _context(module: nn.Module) -> Any:
    """PyTorch's record of a call of torch.compile: of `torch.compile(module)`, or of `module.compile()`."""
    if hasattr(module, "dynamo_ctx"):
        return module.dynamo_ctx
    cells: Any = module._compiled_call_impl.__closure__  # type: ignore[union-attr]
    return next(cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "_dynamic"))
