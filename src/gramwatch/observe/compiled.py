"""A pass as one function that can be traced: by torch.compile, and for export.

A compiled network is watched by a function that is compiled in one graph, with the options that the user gave
to torch.compile. Reading a tap is an operator of its own in that graph. The operators return new tensors. If
they wrote into a shared tensor, the compiler might not use CUDA graphs.
"""

import contextlib
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from gramwatch.errors import warn_once
from gramwatch.inputs.adapters import unwrap, wrappers
from gramwatch.inputs.batches import Inputs, count_examples
from gramwatch.numerics.kernels import Scratch, reading
from gramwatch.numerics.samples import WHOLE, Sample
from gramwatch.observe.uses import GramTable, Mean, Uses
from gramwatch.watch import Network, mark
from gramwatch.watch.operations import OPERATIONS
from gramwatch.watch.padding import Real
from gramwatch.watch.running import Watch, is_compiled


def traceable(
    network: Network,
    uses: Uses,
    head_call: int | None,
    statistics: Callable[..., tuple[Tensor, Any]],
    channel_means: Callable[[Tensor, int, int | None, int | None], Tensor],
    table: Callable[[GramTable, Mapping[int, Tensor]], Tensor],
) -> Callable[[Inputs], tuple[Any, ...]]:
    """A pass under watch as a function of the inputs: the fields of a `Read`.

    Args:
        network: the network.
        uses: what is read of each tap.
        head_call: the watched call that makes the logits, if its input is needed.
        statistics: reads a tap for Gram. Its arguments are those of `compiled.statistics`.
        channel_means: reads a tap for other methods. Its arguments are those of `compiled.channel_means`.
        table: makes the table of a `GramTable` from what `statistics` returned, by the numbers of taps.

    """
    taps, layouts, averaged, places = uses.taps, uses.tables, uses.averaged, uses.places

    def read(inputs: Inputs) -> tuple[Any, ...]:
        examples, mask = count_examples(inputs), network.mask_of(inputs)
        real = None if mask is None else Real(mask)
        columns: list[dict[int, Tensor]] = [{} for _ in layouts]
        means: dict[Mean, Tensor] = {}

        def write(i: int, column: int, maps: Tensor) -> None:
            at = layouts[i].at[column]
            arguments = (at.statistic, at.orders, at.features, False, None, None)
            columns[i][column], _ = statistics(maps, 1, *WHOLE, *arguments)

        def receive(number: int, tensor: Tensor) -> None:
            x, axis = taps.listed[number].examples_apart(tensor, examples)
            if real is not None and real.fits(x.shape, axis):
                uses.read_real(number, x, axis, real, write, means)
                return
            left = list(averaged[number])
            for i, column in places[number]:
                at, sample = layouts[i].at[column], layouts[i].sample
                part = sample.of(x.shape, axis)
                of_means = next((s for s in left if s.of(x.shape, axis) == part), left[0] if left else None)
                with_means = (False, None, None) if of_means is None else (True, *of_means)
                columns[i][column], mean = statistics(
                    x, axis, *sample, at.statistic, at.orders, at.features, *with_means
                )
                if of_means is not None:
                    part = of_means.of(x.shape, axis)
                    same = [other for other in left if other.of(x.shape, axis) == part]
                    means.update({(number, other): mean for other in same})
                    left = [other for other in left if other not in same]
            for sample in left:
                means[number, sample] = channel_means(x, axis, *sample)

        watch = Watch(taps, receive, head=head_call)
        output = watch.run(network.module, inputs)
        tables = [table(*filled) for filled in zip(layouts, columns, strict=True)]
        return network.logits_of(output), tables, means, list(watch.at_head[:1])

    return read


def side_by_side(layout: GramTable, columns: Mapping[int, Tensor]) -> Tensor:
    """The statistics of all taps in the order of the table."""
    return torch.cat([columns[i].flatten(1) for i in range(len(columns))], 1)


# --- by torch.compile -----------------------------------------------------------------------------------

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


def records_itself(model: nn.Module) -> bool:
    """Whether a compiled network runs as a CUDA graph of the compiler."""
    return _records(options_of(model).get("backend"))


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
