"""Export: a network and its guard as one graph, for ONNX and for torch.export.

The graph takes images. It returns the fields of a `Detection`: logits, predicted class, score, p-value and
verdict, and the p-value of every member. Bounds, class means and ranks are inside.

Members and the rule that joins them are traced as they are. Three things are written here in plain
operations, because kernels cannot be traced and ONNX lacks some functions: Gram statistics (Eq. 1-2),
deviations (Eq. 3-4) and ranks (Eq. 6).
"""

import base64
import functools
import importlib
import json
import logging
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from gramwatch.detect import probe
from gramwatch.detect.detector import Detector
from gramwatch.detect.measurement import Calibration, Measurement
from gramwatch.detect.passes import measure
from gramwatch.detect.storing import probed
from gramwatch.errors import ExportError, GramwatchError, InputError, MissingExtraError
from gramwatch.files import __version__
from gramwatch.files.writing import check_writable, replacing
from gramwatch.inputs.batches import kind_of, on_device, repeated
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.methods.gram import GramDetector
from gramwatch.numerics.bounds import MinMax
from gramwatch.numerics.deviation import outside_range
from gramwatch.numerics.samples import TOGETHER, Sample, as_maps
from gramwatch.observe.needs import StatisticsAtTap
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.observe.uses import GramTable, Read
from gramwatch.watch import judging

SUFFIXES = (".onnx", ".pt2")
OUTPUTS = ("logits", "predicted", "score", "p_value", "is_ood")
"""The names of the outputs before those of the members."""
MOST_IN_FILE = 2**31 - 2**24
"""An ONNX file holds up to 2 GiB. If the tensors are larger, they go to a second file beside it."""
PIXELS = "uint8 pixels"
"""The input of a graph that normalises by itself."""
INPUTS = "inputs of the network"
"""The input of other graphs."""
KEY = "gramwatch"
"""The name of the JSON text about the guard in a file."""


def export(guard: Detector, path: str | PathLike[str], images: Any, preprocessing: bool = False) -> None:
    """Write a guard to a file. `Guard.export` describes the arguments."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} must end in .onnx or .pt2: the suffix chooses the format")
    if path.suffix == ".onnx":
        _import_onnx()
    check_writable(path)
    for name, member in guard.members.items():
        if isinstance(member, GramDetector):
            _check_gram(name, member)
    graph, example = _prepared(guard, images, preprocessing)
    facts = json.dumps(_facts(guard, preprocessing) | _probe(guard, graph, example))
    with judging(guard.network.module):
        (_write_onnx if path.suffix == ".onnx" else _write_pt2)(graph, example, path, facts)


def _import_onnx() -> None:
    try:
        importlib.import_module("onnx")
        importlib.import_module("onnxscript")
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"a guard is exported to ONNX with the package {error.name}: "
            "install it with pip install 'gramwatch[export]'"
        ) from None


def _prepared(guard: Detector, images: Any, preprocessing: bool) -> "tuple[Graph, Tensor]":
    """The graph as a module, and an example of its input."""
    inputs = guard.network.read(images)
    if not isinstance(inputs, Tensor):
        raise InputError(f"a graph is exported for networks that take one tensor, not {kind_of(inputs)}")
    inputs = on_device(inputs, guard.model)
    # It refuses a guard that is not calibrated. It fills what members and rules keep: a trace must not.
    guard(images)
    pixels = _Pixels(_recorded(guard), inputs) if preprocessing else None
    graph = Graph(guard, guard.planned(inputs), guard.calibration(inputs.device), pixels)
    # A batch of one would be taken for the only size.
    example = repeated(inputs, 2)
    return graph, example if pixels is None else pixels.example(example)


def _recorded(guard: Detector) -> Preprocessing:
    """The preprocessing in the guard's metadata."""
    recorded = guard.metadata.get("preprocessing")
    if not isinstance(recorded, Mapping):
        raise ExportError(
            "guard.metadata['preprocessing'] does not say how images become inputs, as `gramwatch fit` "
            "writes it: export without preprocessing"
        )
    return Preprocessing.from_json(recorded)


def _facts(guard: Detector, preprocessing: bool) -> dict[str, Any]:
    """The facts about the guard for readers of the file."""
    known = {k: value for k, value in guard.metadata.items() if k in ("classes", "preprocessing")}
    return {
        "version": __version__,
        "level": guard.level,
        "members": list(guard.members),
        "takes": PIXELS if preprocessing else INPUTS,
        "calibration": _calibration_as_json(guard.calibration()),
        **known,
    }


def _probe(guard: Detector, graph: "Graph", example: Tensor) -> dict[str, Any]:
    """The probe of a graph, with the answer of its guard. A runtime must compute what PyTorch does."""
    recipe = probe.recipe_of(example)
    if recipe is None:
        return {}
    if graph.pixels is not None:
        recipe["tensor"] |= {"low": 0, "high": 255}
    answered = probed(guard, recipe, lambda pixels: pixels if graph.pixels is None else graph.pixels(pixels))
    return {} if answered is None else {"probe": answered}


def _calibration_as_json(calibration: Calibration) -> dict[str, Any]:
    """The state for a monitor of the graph: the scores that rank, and their classes if there are groups."""
    facts = {
        "split": calibration.how["split"],
        "scores": packed(calibration.scores[:, 0].double()),
        "tolerance": calibration.tolerance[:1].tolist(),
    }
    if len(calibration.ranks.sizes) > 1 and calibration.predicted is not None:
        facts["predicted"] = packed(calibration.predicted.int())
        facts["groups"] = calibration.ranks.group_of.tolist()
    return facts


def packed(values: Tensor) -> str:
    """Numbers as base64 of their bytes, little-endian."""
    array = values.cpu().contiguous().numpy()
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


@contextmanager
def _explained(graph: "Graph", example: Tensor, doing: str) -> Iterator[None]:
    """Turn an error of PyTorch into one that names the network, or the members, that it refuses."""
    try:
        yield
    except GramwatchError:
        raise
    except Exception as error:
        first = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        network = type(graph.network).__name__
        try:
            _program(graph.plain(), example)
        except Exception:
            raise ExportError(
                f"{doing} refuses {network}, without a guard, too. Its forward must be traceable for batches "
                f"of every size ({first})"
            ) from error
        member = f"the member '{graph.reached.member}'" if graph.reached.member else "a member"
        raise ExportError(
            f"{doing} refuses {member} of the guard of {network}: leave it out ({first})"
        ) from error


# --- the two formats ---------------------------------------------------------------------------------


def _program(module: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """A module traced for batches of every size. Not strictly: a strict trace would compile Python code."""
    batch = {0: torch.export.Dim("batch")}
    return torch.export.export(module, (example,), dynamic_shapes=(batch,), strict=False)


def _traced(graph: "Graph", example: Tensor) -> torch.export.ExportedProgram:
    with _explained(graph, example, "torch.export"):
        return _program(graph, example)


def _write_pt2(graph: "Graph", example: Tensor, path: Path, facts: str) -> None:
    program = _traced(graph, example)
    with warnings.catch_warnings():
        # Fitted tensors of several taps are parts of one tensor. Each part is written as it should be.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        with replacing(path) as beside:
            torch.export.save(program, beside, extra_files={f"{KEY}.json": facts})


def _write_onnx(graph: "Graph", example: Tensor, path: Path, facts: str) -> None:
    program = _traced(graph, example)
    _drop_whole_slices(program.graph_module)
    with _explained(graph, example, "torch.onnx"), _quietly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # PyTorch warns of its own code
        converted = torch.onnx.export(
            program, input_names=["images"], output_names=graph.outputs,
            dynamo=True, verbose=False, optimize=False,
        )  # fmt: skip
        assert converted is not None
        _simplify(converted.model)
    converted.model.metadata_props[KEY] = facts
    constants = (value.const_value for value in converted.model.graph.initializers.values())
    size = sum(constant.nbytes for constant in constants if constant is not None)
    with replacing(path) as beside:
        converted.save(beside, external_data=size > MOST_IN_FILE)


def _drop_whole_slices(module: torch.fx.GraphModule) -> None:
    """Remove slices that take all. `x[:, a:b]` has one, and an ONNX graph has 15 nodes for a slice."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor):
        given: tuple[Any, ...] = tuple(node.args)
        start, stop, step = given[2:] + (0, sys.maxsize, 1)[len(given[2:]) :]
        if (start or 0, stop, step) == (0, sys.maxsize, 1):
            node.replace_all_uses_with(given[0])
            module.graph.erase_node(node)
    module.recompile()


def _simplify(model: Any) -> None:
    """Fold constants and remove what is not needed.

    The exporter's own optimiser also looks for many patterns, which takes ten times as long. ONNX Runtime
    looks for patterns when it loads the graph.
    """
    optimizer = importlib.import_module("onnxscript.optimizer")
    passes = importlib.import_module("onnx_ir.passes.common")
    optimizer.inline(model)
    optimizer.fold_constants(model)
    optimizer.remove_unused_nodes(model)
    for simplify in (
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
        passes.ClearMetadataAndDocStringPass(),
    ):
        simplify(model)


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide the exporter's own messages.

    Some versions of ONNX Script print what they optimise, and standard output belongs to the caller. PyTorch
    notes four operators that it skips if torchvision is not installed.
    """
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(before)


# --- the graph ---------------------------------------------------------------------------------------


class _Reached:
    """The progress of a trace."""

    member: str = ""
    """The member that is measured. Empty before and after the members."""


class Graph(nn.Module):
    """A network and its guard as one function of the images.

    Args:
        guard: the guard, whose members are measured.
        plan: what to watch in the network.
        calibration: of the guard, on the device of the network.
        pixels: makes the network's input from pixels. None: the graph takes the network's input.

    """

    def __init__(
        self,
        guard: Detector,
        plan: Plan,
        calibration: Calibration,
        pixels: "_Pixels | None" = None,
    ) -> None:
        super().__init__()
        self.network, self.pixels = plan.network.module, pixels
        members = guard.members.items()
        self.instead = nn.ModuleDict(
            {name: GramGraph(member, plan) for name, member in members if isinstance(member, GramDetector)}
        )
        """What measures in place of a member: kernels cannot be traced."""
        self.guard, self.outputs = guard, [*OUTPUTS, *(f"parts.{name}" for name in guard.members)]
        self._plan, self._rule, self.reached = plan, calibration.rule, _Reached()
        self.ranks = RanksGraph(calibration)

    def plain(self) -> nn.Module:
        """The network without the guard."""
        return self.network if self.pixels is None else nn.Sequential(self.pixels, self.network)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs, by name."""
        inputs = images if self.pixels is None else self.pixels(images)
        read = Read(*self._plan.traceable(maps_of, channel_means, table)(inputs))
        looked_at = [inputs, read.logits, *read.tables, *read.features]
        if read.means:
            looked_at.append(torch.cat(list(read.means.values()), 1))
        finite = functools.reduce(operator.and_, map(is_finite, looked_at))
        seen = self._plan.observed(read, inputs, None, None)
        given = self._given([replace(observation, finite=finite) for observation in seen])
        (measurement,) = measure([self.guard], self.guard.leaves, [given])
        self.reached.member = ""
        scores, predicted = self._rule(measurement), measurement.predicted
        p_values, is_ood = self.ranks(scores, predicted)
        values = (measurement.logits, predicted, scores[:, 0], p_values[:, 0], is_ood)
        return dict(zip(self.outputs, (*values, *p_values[:, 1:].unbind(1)), strict=True))

    def _given(self, observations: Sequence[Observation]) -> Iterator[Observation | Measurement]:
        """The observations of the members, with the numbers that plain operations have measured."""
        for name, observation in zip(self.guard.members, observations, strict=True):
            self.reached.member = name
            yield self.instead[name](observation) if name in self.instead else observation


class _Pixels(nn.Module):
    """From pixels to the network's input: scaled to 1 and normalised. Resizing is left to the reader."""

    def __init__(self, preprocessing: Preprocessing, inputs: Tensor) -> None:
        super().__init__()
        height, width = preprocessing.size
        expected = (len(preprocessing.mean), height, width)
        if tuple(inputs.shape[1:]) != expected:
            raise InputError(
                f"images of shape {tuple(inputs.shape[1:])} were given, the guard's preprocessing makes "
                f"{expected}"
            )
        mean, std = (torch.tensor(t, device=inputs.device) for t in (preprocessing.mean, preprocessing.std))
        self.mean, self.std = nn.Buffer(mean[:, None, None]), nn.Buffer(std[:, None, None])

    def example(self, inputs: Tensor) -> Tensor:
        """Pixels in place of inputs."""
        return torch.zeros_like(inputs, dtype=torch.uint8).movedim(1, 3).contiguous()

    def forward(self, pixels: Tensor) -> Tensor:
        """The input made from pixels, `(N, height, width, channels)` in uint8."""
        return (pixels.movedim(3, 1).float().div(255) - self.mean).div(self.std)


def is_finite(t: Tensor) -> Tensor:
    """Whether all numbers of an example are finite, `(N,)`.

    Zero times a number that is not finite is NaN, and so is its sum. The largest magnitude would not do:
    runtimes differ in what a maximum makes of NaN.
    """
    sound: Tensor = (t.flatten(1) * 0).sum(1) == 0
    return sound


# --- Gram statistics: Eq. 1-2 ------------------------------------------------------------------------


def part_of(x: Tensor, channel_axis: int, sample: Sample) -> Tensor:
    """The part of a tap that counts, as `Part.maps` takes it, with its axes in their places."""
    chosen = sample.of(x.shape, channel_axis)
    if chosen.grid is not None:
        x = x[tuple([slice(first, None, step) for first, step in chosen.grid])]
    if chosen.step > 1:
        groups = x.shape[channel_axis] // TOGETHER
        x = x.narrow(channel_axis, 0, groups * TOGETHER).unflatten(channel_axis, (groups, TOGETHER))
        x = x[(slice(None),) * channel_axis + (slice(None, None, chosen.step),)].flatten(
            channel_axis, channel_axis + 1
        )
    return x


def maps_of(
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
) -> tuple[Tensor, Tensor | None]:
    """What counts of a tap, `(N, channels, pixels)`, for `table`, and its channel means if needed."""
    sample, averaged = Sample(pixels, channels), Sample(mean_pixels, mean_channels)
    part = part_of(x, channel_axis, sample)
    same = averaged.of(x.shape, channel_axis) == sample.of(x.shape, channel_axis)
    of_means = part if same or not with_means else part_of(x, channel_axis, averaged)
    return as_maps(part, channel_axis).float(), _means(of_means, channel_axis) if with_means else None


def channel_means(x: Tensor, channel_axis: int, pixels: int | None, channels: int | None) -> Tensor:
    """The mean of each channel that counts of a tap, `(N, channels)` in float64."""
    return _means(part_of(x, channel_axis, Sample(pixels, channels)), channel_axis)


def _means(x: Tensor, channel_axis: int) -> Tensor:
    """The channel means.

    Rows are averaged in float32, then their means in float64: a distance by an ill-conditioned covariance
    magnifies the rounding of means. A pool keeps the layout that ONNX Runtime gives to convolutions.
    """
    if x.ndim != 4 or channel_axis != 1:
        return as_maps(x, channel_axis).double().mean(2)
    return avg_pool2d(x.float(), (1, x.shape[3])).flatten(2).double().mean(2)


class Alike(NamedTuple):
    """Taps of one shape. Their statistics are computed together: a graph of few operations runs faster."""

    numbers: list[int]
    """The numbers of the taps in the table."""
    at: StatisticsAtTap


def alike(layout: GramTable) -> list[Alike]:
    """The taps of a table: those with the same statistics adjoin, among them those of one shape."""
    groups: dict[StatisticsAtTap, dict[Any, list[int]]] = {}
    for number, (tap, at) in enumerate(zip(layout.taps, layout.at, strict=True)):
        shape = tap.shape, tap.batch_axis, tap.channel_axis
        groups.setdefault(at, {}).setdefault(shape, []).append(number)
    return [Alike(numbers, at) for at, by_shape in groups.items() for numbers in by_shape.values()]


def table(layout: GramTable, maps_of: Mapping[int, Tensor]) -> Tensor:
    """The statistics of all taps, `(N, statistics)`, in the order of `alike`."""
    parts = []
    for numbers, at in alike(layout):
        maps = torch.stack([maps_of[number] for number in numbers], 1)
        make = pairs if at.statistic == "triangle" else row_sums
        parts.append(make(maps, at.orders).flatten(1))
    return torch.cat(parts, 1)


def row_sums(maps: Tensor, orders: Sequence[int]) -> Tensor:
    """`statistics.row_sums` of maps `(N, taps, channels, pixels)`: `(N, taps, orders, channels)`.

    It divides by the same magnitudes before the powers, so that no sum of an even order can underflow. The
    largest magnitude of an example is divided out of the pixels' magnitudes: ONNX has no `frexp`.
    """
    pixel_peak = _peak(maps, 2)
    largest = pixel_peak.amax(3, keepdim=True)
    products = maps * (pixel_peak / largest)
    product_peak = _peak(products, 3)
    rows = {}
    for order, (share, product) in powers(orders, (maps / pixel_peak, products / product_peak)):
        rows[order] = signed_root(product @ share.sum(2).unsqueeze(3), order)
    return (torch.cat([rows[order] for order in orders], 3) * (product_peak * largest)).mT


def pairs(maps: Tensor, orders: Sequence[int]) -> Tensor:
    """`statistics.triangle` of vectors `(N, taps, channels, 1)`: `(N, taps, orders, pairs)`."""
    vectors = maps.squeeze(3)
    i, j = torch.triu_indices(vectors.shape[2], vectors.shape[2], device=vectors.device)
    products = vectors[:, :, i] * vectors[:, :, j]
    return torch.stack([products if order % 2 else products.abs() for order in orders], 2)


def powers(orders: Sequence[int], bases: tuple[Tensor, ...]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """The orders, ascending, with the bases to that power, by as few products as these orders allow."""
    known = {1: bases}
    for order in sorted(orders):
        while max(known) < order:
            reached = max(known)
            step = max(n for n in known if reached + n <= order)
            pair = zip(known[reached], known[step], strict=True)
            known[reached + step] = tuple(a * b for a, b in pair)
        yield order, known[order]


def signed_root(t: Tensor, order: int) -> Tensor:
    """`sign(t) |t|^(1/order)`. Sums of an even order are not negative. Square roots are fast, powers slow."""
    if order == 1:
        return t
    if order % 2 == 0:
        return signed_root(t.sqrt(), order // 2) if order % 4 == 0 or order == 2 else t.pow(1 / order)
    return t.sign() * t.abs().pow(1 / order)


def _peak(x: Tensor, axis: int) -> Tensor:
    """The largest magnitude along an axis. If all values are zero, the smallest positive number."""
    return x.abs().amax(axis, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


# --- deviations and ranks: Eq. 3-4 and 6 -------------------------------------------------------------


def _check_gram(name: str, gram: GramDetector) -> None:
    """Refuse a member whose settings have no plain operations here."""
    if not isinstance(gram.fitted_bounds, MinMax):
        raise ExportError(f"'{name}' has bounds={gram.bounds!r}: only bounds='min_max' are exported")
    for tap in gram.taps:
        statistic = gram.statistics.at(tap).statistic
        if statistic != "row_sums" and not (statistic == "triangle" and tap.is_vector):
            raise ExportError(
                f"'{name}' has statistic={gram.statistic!r} at '{tap.name}': only statistic='auto' and "
                "'row_sums' are exported"
            )


class GramGraph(nn.Module):
    """Gram in plain operations, from statistics in the order of `alike`."""

    scale: Tensor | None
    """The scales of each tap and order, for bounds in float16."""

    def __init__(self, gram: GramDetector, plan: Plan) -> None:
        super().__init__()
        bounds, layout = gram.fitted_bounds, plan.tables[gram.statistics]
        assert isinstance(bounds, MinMax)
        numbers = [number for same in alike(layout) for number in same.numbers]
        self._at = Counter(layout.at[number] for number in numbers)
        edges, tables = layout.starts, bounds.tables()
        device = tables["row"].device
        features = torch.cat([torch.arange(edges[n], edges[n + 1]) for n in numbers]).to(device)
        self.place = nn.Buffer(torch.tensor(numbers, device=device).argsort())
        self.row = nn.Buffer(tables["row"].clone())
        self.minimum = nn.Buffer(tables["minimum"].index_select(1, features))
        self.maximum = nn.Buffer(tables["maximum"].index_select(1, features))
        self.register_buffer("scale", tables["scale"].clone() if "scale" in tables else None)
        sizes = torch.tensor([at.features for at in layout.at for _ in at.orders])
        self.scale_of = nn.Buffer(torch.arange(len(sizes)).repeat_interleave(sizes).to(device)[features])

    def forward(self, observation: Observation) -> Measurement:
        """The measurement: delta_l of Eq. 4, `(N, taps)` in the order of the detector."""
        assert observation.statistics is not None
        assert observation.finite is not None
        row: Tensor = self.row[observation.predicted]
        low, high = self.minimum[row], self.maximum[row]
        if self.scale is not None:
            factor = self.scale[row][:, self.scale_of]
            low, high = low.float() * factor, high.float() * factor
        outside = outside_range(observation.statistics, low, high)
        parts = outside.split([at.size * count for at, count in self._at.items()], 1)
        sums = [_summed(part, *of) for part, of in zip(parts, self._at.items(), strict=True)]
        deviations = torch.cat(sums, 1)[:, self.place]
        return Measurement(deviations, observation.logits, observation.finite & is_finite(deviations))


def _summed(outside: Tensor, at: StatisticsAtTap, taps: int) -> Tensor:
    """The deviations of taps with the same statistics, `(N, taps)`."""
    sums: Tensor = outside.unflatten(1, (taps, len(at.orders), at.features)).sum(3)
    if set(at.weights) != {1}:
        sums = sums * torch.tensor(at.weights, dtype=sums.dtype, device=sums.device)
    return sums.sum(2)


class RanksGraph(nn.Module):
    """`Ranks.judged` by counting the calibration scores that are lower: ONNX has no search."""

    groups: Tensor | None
    """The groups of the calibration examples, if there are several groups."""

    def __init__(self, calibration: Calibration) -> None:
        super().__init__()
        ranks = calibration.ranks
        device = ranks.group_of.device
        self.limits = nn.Buffer(calibration.limits.T.clone().to(device))
        self.group_of, self.sizes = nn.Buffer(ranks.group_of), nn.Buffer(ranks.sizes)
        self.needed = nn.Buffer(ranks.needed)
        groups = None
        if len(ranks.sizes) > 1:
            assert calibration.predicted is not None
            groups = ranks.group_of[calibration.predicted.to(device)]
        self.register_buffer("groups", groups)

    def forward(self, scores: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
        """The p-values of scores `(N, kinds)`, and whether the first one is at most `1 - level`, `(N,)`."""
        lower, group = self.limits < scores.unsqueeze(2), self.group_of[predicted]
        if self.groups is not None:
            lower = lower & (self.groups == group.unsqueeze(1)).unsqueeze(1)
        below, size = lower.sum(2, dtype=torch.int32), self.sizes[group].unsqueeze(1)
        return (1 + size - below).double() / (size + 1), below[:, 0] >= self.needed[group]
