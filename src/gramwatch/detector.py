"""GramDetector: the object a user holds. Fit, calibrate, call, save, load."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from gramwatch import artifact, kernels
from gramwatch.artifact import Field, Rule
from gramwatch.batches import (
    Inputs,
    all_finite,
    count_examples,
    described,
    on_device,
    on_device_ahead,
    same_form,
    same_size,
    signature,
    widened,
)
from gramwatch.bounds import BOUNDS, EXPONENTS, STORAGES, Bounds, MinMax, make_bounds
from gramwatch.deviation import (
    CONFIDENCES,
    Confidence,
    Layout,
    TotalDeviation,
    outside_range,
    part_deviation,
    tap_deviations,
)
from gramwatch.errors import (
    ArtifactError,
    CalibrationError,
    InputError,
    NotFittedError,
    warn,
)
from gramwatch.statistics import STATISTICS, check_orders, distinct_orders, triangle_pieces
from gramwatch.taps import Network, Tap, Taps, find_taps, observe, unwrap
from gramwatch.taps.running import InputsAdapter, LogitsAdapter
from gramwatch.threshold import examples_needed, is_above_threshold, p_value, threshold

FEW_EXAMPLES = 20
"""A class with fewer training examples than this is named in a warning: its bounds are too narrow."""
WIDEST_TRIANGLE = 1024
"""`statistic="auto"` takes the pairs of a vector up to this many channels, row sums above."""
MOST_STATISTICS = 2**30
"""Statistics of a batch that would take more bytes are never held together: the batch is run twice."""
NO_WIDTH = 2**-8
"""Bounds narrower than this share of their value hold one value: float16 rounds by a quarter of it."""
CHECKPOINT_SECONDS = 60.0
"""How often a fit with a checkpoint writes it."""
MOST_GROUPS = 10**6
"""A file with more taps times orders is refused; large networks have ten thousand."""
BOUNDS_RULES: dict[str, dict[str, Rule]] = {
    "min_max": {
        "minimum": artifact.NO_NAN,
        "maximum": artifact.NO_NAN,
        "exponent": artifact.within(*EXPONENTS),
    },
    "mean_variance": {
        "count": artifact.NOT_NEGATIVE,
        "mean": artifact.FINITE,
        "squares": artifact.NOT_NEGATIVE,
    },
}
"""What the numbers of saved bounds must be."""
_B = TypeVar("_B")


@dataclass(frozen=True)
class Detection:
    """What a detector found for a batch of N inputs."""

    logits: Tensor
    """The network's output, `(N, classes)`."""
    predicted: Tensor
    """The predicted class, `(N,)`."""
    score: Tensor
    """Gram's total deviation, or the score of another method or a guard, `(N,)`: higher is more unusual."""
    p_value: Tensor
    """How often an in-distribution input scores at least as high, `(N,)`."""
    is_ood: Tensor
    """Whether `p_value <= 1 - level`, `(N,)`."""
    deviations: Tensor | None = None
    """delta_l of Eq. 4, `(N, taps)`, in the order of `detector.taps`; None from other methods."""
    class_support: Tensor | None = None
    """How many training examples stand behind each verdict, `(N,)`. Where it is small, the bounds are
    narrow; where it is zero, bounds pooled over all classes were used, and an outlier may look normal."""
    parts: Mapping[str, Tensor] | None = None
    """The p-value of each member of a `Guard` by itself, `(N,)`: which of them raised the alarm."""
    taps: tuple[str, ...] | None = None
    """The names of the taps, one for each column of `deviations`."""

    def __len__(self) -> int:
        return len(self.score)

    def __getitem__(self, index: Any) -> "Detection":
        """The detection of one example, `found[0]`, or of several: a slice, numbers or a mask."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"there is no example {index}: the batch has {len(self)}")
            index = slice(index, index + 1 or None)

        def some(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: each[index] for name, each in value.items()}
            return value[index] if isinstance(value, Tensor) else value

        return Detection(**{name: some(value) for name, value in vars(self).items()})

    def __iter__(self) -> "Iterator[Detection]":
        """The examples one by one."""
        return (self[i] for i in range(len(self)))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, one entry for each example, for JSON or a table; what there is none of is left out.

        `parts` has a list for each member, `deviations` one for each tap.
        """
        plain: dict[str, Any] = {
            name: value.tolist()
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name not in ("logits", "deviations")
        }
        if self.parts is not None:
            plain["parts"] = {name: part.tolist() for name, part in self.parts.items()}
        if self.deviations is not None and self.taps is not None:
            plain["deviations"] = dict(zip(self.taps, self.deviations.T.tolist(), strict=True))
        return plain

    def __repr__(self) -> str:
        rows = [
            f"  {i}: class {int(self.predicted[i])}, score {float(self.score[i]):.4g}, "
            f"p {float(self.p_value[i]):.2g}{self._shown_parts(i)}"
            f"{', out-of-distribution' if self.is_ood[i] else ''}"
            for i in range(min(len(self), 10))
        ]
        if len(self) > 10:
            rows.append(f"  ... {len(self) - 10} more")
        return "\n".join([f"Detection: {int(self.is_ood.sum())} of {len(self)} out-of-distribution", *rows])

    def _shown_parts(self, i: int) -> str:
        if self.parts is None:
            return ""
        return f" ({', '.join(f'{name} {float(p[i]):.2g}' for name, p in self.parts.items())})"


@dataclass(frozen=True)
class Measurement:
    """What one forward pass says of a batch before any calibration."""

    logits: Tensor
    deviations: Tensor
    finite: Tensor

    @staticmethod
    def joined(parts: "Sequence[Measurement]") -> "Measurement":
        """Several batches together, on the CPU."""
        return Measurement(
            *(
                torch.cat([getattr(part, name).cpu() for part in parts])
                for name in ("logits", "deviations", "finite")
            )
        )

    def __getitem__(self, index: Any) -> "Measurement":
        """The measurement of some examples."""
        return self.changed(lambda t: t[index])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Measurement":
        """The same with every tensor changed."""
        return Measurement(change(self.logits), change(self.deviations), change(self.finite))

    @property
    def predicted(self) -> Tensor:
        """The predicted class, D_c."""
        return self.logits.argmax(1)

    @property
    def probability(self) -> Tensor:
        """The maximum softmax probability."""
        return self.logits.double().softmax(1).amax(1)


@dataclass(frozen=True)
class _Measure:
    """What is measured at one tap: which statistic, of which orders, each standing for how many."""

    statistic: str
    orders: tuple[int, ...]
    weights: tuple[int, ...]
    features: int
    """Statistics of each order."""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.orders), self.features

    @property
    def size(self) -> int:
        return len(self.orders) * self.features

    def pieces(self, maps: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Some examples, some of the tap's features, and their values: together all, once each."""
        if self.statistic == "triangle":
            yield from triangle_pieces(maps, self.orders)
        else:
            values = torch.empty((len(maps), *self.shape), dtype=torch.float32, device=maps.device)
            kernels.compute(self.statistic, maps, self.orders, values)
            yield slice(0, len(maps)), slice(0, self.size), values.flatten(1)


class Collector:
    """Gathers the statistics of one batch, tap by tap, side by side."""

    def __init__(self, taps: Taps, measures: list[_Measure], starts: list[int]) -> None:
        self.taps = taps
        self.statistics = torch.empty(0)
        """`(N, features)`, when the network has run."""
        self._measures, self._starts = measures, starts

    def same(self, other: "Collector") -> bool:
        """Whether both gather the same."""
        return self.taps == other.taps and self._measures == other._measures

    def receive(self, number: int, maps: Tensor) -> None:
        """Take the statistics of one tap."""
        if not self.statistics.numel():
            shape = (len(maps), self._starts[-1])
            self.statistics = torch.empty(shape, dtype=torch.float32, device=maps.device)
        measure = self._measures[number]
        kernels.compute(measure.statistic, maps, measure.orders, self._place(number))

    def repeat(self, number: int, earlier: int) -> None:
        """Copy the statistics of an earlier tap."""
        self._place(number).copy_(self._place(earlier))

    def _place(self, number: int) -> Tensor:
        orders, features = self._measures[number].shape
        shape = (len(self.statistics), orders, features)
        return self.statistics.as_strided(shape, (self._starts[-1], features, 1), self._starts[number])


class GramDetector:
    """Tells whether a classifier is looking at something it was never trained on (Sastry & Oore).

    Example:
        >>> detector = gramwatch.GramDetector(model)
        >>> detector.fit(train_loader)
        >>> detector.calibrate(validation_loader)
        >>> found = detector(images)
        >>> found.is_ood

    Args:
        model: any classifier that returns logits. It is not changed.
        taps: which tensors to watch: `"all"` convolutions, linear layers and activations; `"ends"`, the last
            of each size; `"paper"` for the networks in `gramwatch.networks`; or names and globs.
        orders: the orders of the Gram matrices, P; none above 100.
        statistic: `"row_sums"`, `"row_sums_of_roots"`, `"diagonal"`, `"off_diagonal"`, `"triangle"`, or
            `"auto"`: `triangle` for plain vectors up to 1,024 channels, `row_sums` for all else. Where the
            statistics of a batch exceed 1 GiB, as `triangle` of feature maps does, the batch is run twice.
        bounds: `"min_max"`, or `"mean_variance"` (App. C).
        normalise: divide each tap's deviation by its expectation on validation data (Eq. 5).
        confidence: how the maximum softmax probability enters the score, see `TotalDeviation`.
        level: the share of in-distribution inputs to keep; `1 - level` is the false-alarm rate.
        inputs: how a batch becomes the network's input, where it is not a tensor, a tuple whose first item is
            the input, or a mapping of keyword arguments: a function of the batch, or a key.
        logits: where the logits are in the network's output, where it returns more than these: a name, a
            position, or a function of the output.
        storage: `"float32"`, or `"float16"`: half the memory and file for `min_max` bounds, which get wider
            by up to a thousandth of their value, so that no training example ever falls outside.

    Attributes:
        metadata: a free dictionary that is saved with the detector (preprocessing, class names, ...).
        class_counts_: training examples per predicted class.
        threshold_: the score above which an input is out-of-distribution.
        calibration_scores_: the scores that rank, ascending.

    """

    def __init__(
        self,
        model: nn.Module | Network,
        *,
        taps: str | Iterable[str] = "all",
        orders: Iterable[int] = range(1, 11),
        statistic: str = "auto",
        bounds: str = "min_max",
        normalise: bool = True,
        confidence: Confidence = "divide",
        level: float = 0.95,
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
        storage: str = "float32",
    ) -> None:
        _check_choice("statistic", statistic, ["auto", *STATISTICS])
        _check_choice("bounds", bounds, list(BOUNDS))
        _check_choice("confidence", confidence, CONFIDENCES)
        _check_choice("storage", storage, STORAGES)
        check_level(level)
        if storage == "float16" and bounds != "min_max":
            raise ValueError(
                f"storage='float16' is for bounds='min_max': with bounds={bounds!r} use storage='float32'"
            )
        self.network = Network.of(model, inputs, logits)
        self.orders = check_orders(orders)
        self.statistic = statistic
        self.bounds = bounds
        self.normalise = normalise
        self.confidence: Confidence = confidence
        self.level = float(level)
        self.storage = storage
        self.metadata: dict[str, Any] = {}
        self.selection = taps if isinstance(taps, str) else list(taps)
        self._begin()

    def _begin(self) -> None:
        """Nothing was seen yet."""
        self._taps: Taps | None = None
        self._measures: list[_Measure] = []
        self._layouts: dict[torch.device, Layout] = {}
        self._bounds: Bounds | None = None
        self._signature: list[list[Any]] = []
        self._told_of_size = False
        self._class_counts: Tensor | None = None
        self._largest: Tensor | None = None
        self._taken = False
        self._fits = Fits()
        self.forget_calibration()

    def reset(self) -> "GramDetector":
        """Forget all training and calibration data; settings stay."""
        self._begin()
        return self

    # --- what is known so far ------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The network that is watched."""
        return self.network.model

    def to(self, device: torch.device | str) -> "GramDetector":
        """Move the network to a device, and what was learnt of it with it."""
        self.model.to(device)
        if self._class_counts is not None:
            self._follow(torch.device(device))
        return self

    def _follow(self, device: torch.device) -> None:
        """Move what was learnt to the device that the network is on now."""
        assert self._class_counts is not None
        assert self._bounds is not None
        if self._class_counts.device != device:
            bounds = self._empty_bounds(len(self._class_counts), device)
            bounds.load_state(self._bounds.state())
            self._class_counts, self._bounds = self._class_counts.to(device), bounds

    @property
    def taps(self) -> Taps:
        """The watched tensors, once fitted."""
        if self._taps is None:
            raise NotFittedError(
                "the taps are found when fitting: call detector.fit(train_loader) first, "
                "or gramwatch.find_taps(model, images) to see them now"
            )
        return self._taps

    @property
    def class_counts_(self) -> Tensor:
        """Training examples per predicted class."""
        return self._fitted()[0].clone()

    @property
    def calibration_scores_(self) -> Tensor:
        """The in-distribution scores that rank, ascending."""
        return self._calibrated()[1].clone()

    @property
    def threshold_(self) -> float:
        """The score above which an input is out-of-distribution (Eq. 6)."""
        return threshold(self._calibrated()[1], self.level)

    def class_support(self, predicted: Tensor) -> Tensor:
        """How many training examples were predicted to be of each of these classes."""
        return self._fitted()[0][predicted]

    def tables(self) -> list[Tensor]:
        """The tensors of the fit, which judging reads."""
        counts, bounds = self._fitted()
        return [counts, *bounds.state().values()]

    def _fitted(self) -> tuple[Tensor, Bounds]:
        if self._class_counts is None or self._bounds is None or not self.has_examples():
            raise NotFittedError("this detector is not fitted: call detector.fit(train_loader) first")
        return self._class_counts, self._bounds

    def has_examples(self) -> bool:
        """Whether it has taken in anything."""
        if not self._taken:  # once yes, always yes: a GPU is not asked, and waited for, again
            self._taken = self._class_counts is not None and int(self._class_counts.sum()) > 0
        return self._taken

    def saw_no_difference(self) -> bool:
        """Whether the training examples of each class look the same at every tap: then no input deviates."""
        counts, bounds = self._fitted()
        if not isinstance(bounds, MinMax) or counts.max() < 2:
            return False
        for known in (counts > 1).nonzero():  # most often the first says no
            low, high = bounds.rows(known)
            if outside_range(low, high, high).amax() > NO_WIDTH:
                return False
        return True

    def forget_calibration(self) -> None:
        """What was calibrated no longer holds: there is more training data."""
        self._total: TotalDeviation | None = None
        self._scores: Tensor | None = None
        self._calibration: dict[str, Any] | None = None

    def _calibrated(self, device: torch.device | None = None) -> tuple[TotalDeviation, Tensor]:
        """How to total, and the scores that rank, from now on kept on a device if one is named."""
        self._fitted()
        if self._total is None or self._scores is None:
            raise NotFittedError(
                "this detector is not calibrated: call detector.calibrate(validation_loader) after fitting"
            )
        total, scores = self._total, self._scores
        if device is not None and scores.device != device:
            assert total.expectation_ is not None
            self._scores = scores = scores.to(device)
            total.expectation_ = total.expectation_.to(device)
        return total, scores

    def __repr__(self) -> str:
        state = "not fitted"
        if self._class_counts is not None and self._taps is not None:
            state = f"{len(self._taps)} taps, fitted on {int(self._class_counts.sum())} examples"
            state += ", not calibrated" if self._scores is None else f", threshold {self.threshold_:.4g}"
        return f"GramDetector({type(unwrap(self.model)).__name__}: {state})"

    # --- fit -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def fit(
        self,
        loader: Iterable[Any],
        *,
        checkpoint: str | PathLike[str] | None = None,
        progress: bool = True,
    ) -> "GramDetector":
        """Take in what training data looks like (Algorithm 1). Labels, if any, are ignored.

        Fitting again adds to what was seen before and asks for a new calibration. An interruption keeps
        all finished batches.

        Args:
            loader: yields a tensor, a tuple or list whose first item is the input, or a mapping.
            checkpoint: a file to which progress is written every minute, on interruption and at the end. If
                it exists, its batches are skipped: the loader must yield the same batches in the same order.
                `save` deletes it.
            progress: show a progress bar (on a terminal only).

        """
        done = self._resume(checkpoint)
        self._fits.begin(checkpoint)
        self.forget_calibration()
        left_out: Tensor | int = 0

        def take(inputs: Inputs) -> None:
            nonlocal left_out
            left_out = left_out + self.take_alone(inputs)

        def write(done: int) -> None:
            if checkpoint is not None and self.has_examples():
                self._write(checkpoint, batches=done)

        inputs = (inputs for inputs, _ in self.network.batches(loader, "fitting", progress))
        self._fits.run(on_device_ahead(inputs, self.model), take, done, write)
        self.finish(int(left_out))
        return self

    def take_alone(self, inputs: Inputs) -> Tensor | int:
        """Take in one batch; the number of examples left out because they are not finite.

        Nothing here waits for the device, unless the batch is large or bounds are float16.
        """
        if count_examples(inputs) == 0:
            return 0
        self._prepare(inputs)
        if not self.is_large(inputs):
            return self.take(inputs, *self._observe(inputs))
        logits, finite = self._observe_magnitudes(inputs)
        predicted, bounds = self._to_be_taken(inputs, logits, finite)
        with bounds.in_parts() as update:
            self._observe_pieces(
                inputs, lambda _, samples, features, values: update(values, predicted[samples], features)
            )
        return self._counted(predicted)

    @torch.inference_mode()
    def take(self, inputs: Inputs, logits: Tensor, statistics: Tensor) -> Tensor:
        """Take in a batch whose statistics were collected; how many were left out as they are not finite."""
        self._note_largest(statistics)
        predicted, bounds = self._to_be_taken(inputs, logits, all_finite(statistics))
        bounds.update(statistics, predicted)
        return self._counted(predicted)

    def _note_largest(self, statistics: Tensor) -> None:
        """Keep the largest magnitude of each statistic, NaN included: it tells which tap was not finite."""
        largest = torch.linalg.vector_norm(statistics, torch.inf, 0)
        before = self._largest
        self._largest = largest if before is None else torch.maximum(before.to(largest.device), largest)

    def _to_be_taken(self, inputs: Inputs, logits: Tensor, finite: Tensor) -> tuple[Tensor, Bounds]:
        """The predicted classes, -1 where an example is not finite, and the bounds that take them in."""
        self._signature = widened(self._signature, signature(inputs))
        if self._class_counts is None or self._bounds is None:
            classes = logits.shape[1]
            self._class_counts = torch.zeros(classes, dtype=torch.int64, device=logits.device)
            self._bounds = self._empty_bounds(classes, logits.device)
        finite = finite & all_finite([inputs, logits])
        return torch.where(finite, logits.argmax(1), -1), self._bounds

    def _counted(self, predicted: Tensor) -> Tensor:
        """Count what was taken in; the number of examples that were not."""
        assert self._class_counts is not None
        taken = predicted >= 0
        self._class_counts.scatter_add_(0, predicted.clamp_min(0), taken.long())
        return (~taken).sum()

    def _empty_bounds(self, classes: int, device: torch.device | str) -> Bounds:
        groups = [measure.features for measure in self._measures for _ in measure.orders]
        return make_bounds(self.bounds, self.storage, classes, groups, device)

    def _prepare(self, inputs: Inputs) -> None:
        """Find the taps at the first batch; later, make sure that the inputs are of the same form."""
        if self._taps is None:
            taps = find_taps(self.network, inputs, self.selection)
            self._measures = [self._measure(tap) for tap in taps]
            wide = [tap.name for tap in taps if tap.is_vector and tap.channels > WIDEST_TRIANGLE]
            if self.statistic == "auto" and wide:
                warn(
                    f"{len(wide)} vector(s) over {WIDEST_TRIANGLE} channels are judged by row sums, "
                    f"not by pairs: {_listed(wide)}; statistic='triangle' takes the pairs all the same"
                )
            self._taps, self._signature = taps, signature(inputs)
        elif not same_form(signature(inputs), self._signature):
            raise InputError(
                f"inputs of {described(signature(inputs))} were given, "
                f"the detector was fitted on {described(self._signature)}"
            )

    def _warn_of_size(self, inputs: Inputs) -> None:
        """Say once that inputs are judged whose size the fit has never seen."""
        if not self._told_of_size and not same_size(signature(inputs), self._signature):
            self._told_of_size = True
            warn(
                f"inputs of {described(signature(inputs))} are judged, another size than the detector was "
                f"fitted on, {described(self._signature)}. Gram's sums over pixels grow with the number of "
                "pixels: an input may look unusual by its size alone"
            )

    @contextmanager
    def naming_sizes(self, inputs: Inputs) -> Iterator[None]:
        """Where the network fails on inputs of another size than it was fitted on, name both."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if same_size(signature(inputs), self._signature):
                raise
            raise InputError(
                f"the network fails on inputs of {described(signature(inputs))}, "
                f"the detector was fitted on {described(self._signature)}: {error}"
            ) from error

    def _measure(self, tap: Tap) -> _Measure:
        statistic = self.statistic
        if statistic == "auto":
            pairs = tap.is_vector and tap.channels <= WIDEST_TRIANGLE
            statistic = "triangle" if pairs else "row_sums"
        channels = tap.channels
        features = channels * (channels + 1) // 2 if statistic == "triangle" else channels
        if statistic == "triangle" and tap.is_vector:
            orders = distinct_orders(self.orders)
            return _Measure(statistic, tuple(orders), tuple(orders.values()), features)
        return _Measure(statistic, self.orders, (1,) * len(self.orders), features)

    def collector(self, inputs: Inputs) -> "Collector":
        """What gathers the statistics of a batch while a network that others watch too runs over it."""
        self._prepare(inputs)
        return Collector(self.taps, self._measures, self._layout("cpu").starts.tolist())

    def _observe(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """One forward pass: the logits, and the statistics of all taps side by side, `(N, features)`."""
        collector = self.collector(inputs)
        logits = self._run(inputs, collector.receive, collector.repeat)
        return logits, collector.statistics

    def is_large(self, inputs: Inputs) -> bool:
        """Whether the statistics of a batch are too many to be held together."""
        return 4 * count_examples(inputs) * sum(m.size for m in self._measures) > MOST_STATISTICS

    def _observe_magnitudes(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The logits, and which examples have activations small enough for all statistics to be finite.

        No statistic exceeds channels * pixels * magnitude^2. What would be finite by cancellation, or by less
        than this, is left out with the rest: magnitudes are beyond 1e15 by then.
        """
        small = all_finite(inputs)

        def receive(number: int, maps: Tensor) -> None:
            nonlocal small
            magnitude = torch.linalg.vector_norm(maps, torch.inf, (1, 2)).double()
            most = maps.shape[1] * maps.shape[2] * magnitude.square()
            small = small & (most < torch.finfo(torch.float32).max)

        return self._run(inputs, receive), small

    def _observe_pieces(self, inputs: Inputs, take: Callable[[int, slice, slice, Tensor], None]) -> None:
        """One forward pass: `take(tap, examples, features, values)` gets all statistics, piece by piece."""
        starts = self._layout("cpu").starts.tolist()

        @torch.inference_mode()  # which is off in the network's forward pass, and bounds may need
        def receive(number: int, maps: Tensor) -> None:
            start = starts[number]
            for samples, features, values in self._measures[number].pieces(maps):
                take(number, samples, slice(start + features.start, start + features.stop), values)

        self._run(inputs, receive)

    def _run(
        self,
        inputs: Inputs,
        receive: Callable[[int, Tensor], None],
        repeat: Callable[[int, int], bool | None] | None = None,
    ) -> Tensor:
        """One forward pass: the logits."""
        with self.naming_sizes(inputs):
            logits = observe(self.network, self.taps, inputs, receive, repeat)
        if self._class_counts is not None and logits.shape[1] != len(self._class_counts):
            raise InputError(
                f"the network now has {logits.shape[1]} classes, "
                f"the detector was fitted with {len(self._class_counts)}"
            )
        return logits

    def finish(self, left_out: int) -> None:
        """Say what a user should know of the fit, or that there was nothing to fit."""
        where = self._where_not_finite() if left_out else ""
        self._largest = None
        if left_out:
            warn(f"{left_out} training example(s) with NaN or infinity were left out{where}")
        if self._class_counts is None or not self.has_examples():
            what = "every training example held NaN or infinity" if left_out else "every batch was empty"
            raise InputError(f"{what}{where}: there is nothing to fit")
        counts = self._class_counts
        few = (counts < FEW_EXAMPLES).nonzero().flatten().tolist()
        if few:
            never = int((counts == 0).sum())
            warn(
                f"{len(few)} of {len(counts)} classes were predicted for fewer than {FEW_EXAMPLES} training "
                f"examples, {never} of them for none: class {_listed([str(c) for c in few])}. Their bounds "
                "say little (found.class_support tells for each verdict)"
            )

    def _where_not_finite(self) -> str:
        """The first tap whose statistics were not finite, in words."""
        if self._largest is None or bool((finite := self._largest.isfinite()).all()):
            return ""
        first = int((~finite).nonzero()[0])
        tap = int(torch.searchsorted(self._layout("cpu").starts, first, right=True)) - 1
        return f"; the first tap to show it is '{self.taps[tap].name}'"

    @torch.inference_mode()
    def merge(self, other: "GramDetector") -> "GramDetector":
        """Join what another detector of the same network, fitted on other data, has seen.

        Both keep their settings; the calibration must be done anew.
        """
        self.check_merge(other)
        (counts, bounds), (their_counts, their_bounds) = self._fitted(), other._fitted()
        bounds.merge(their_bounds)
        self._signature = widened(self._signature, other._signature)
        self._class_counts = counts + their_counts.to(counts.device)
        self.forget_calibration()
        return self

    def check_merge(self, other: "GramDetector") -> None:
        """Make sure that another detector can be merged into this one."""
        check_not_itself(self, other)
        for name, mine, theirs in self.differing_settings(other):
            raise ValueError(f"the two differ in {name}: {mine!r} and {theirs!r}")
        (counts, _), (their_counts, _) = self._fitted(), other._fitted()
        if not (self.taps.alike(other.taps) and same_form(other._signature, self._signature)):
            raise ValueError("the two watch different tensors: they must be fitted on the same network")
        if counts.shape != their_counts.shape:
            raise ValueError(f"the two have {len(counts)} and {len(their_counts)} classes")
        check_same_weights(self.model, other.model)

    # --- calibrate -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def calibrate(
        self, loader: Iterable[Any], *, split: bool = True, seed: int = 0, progress: bool = True
    ) -> "GramDetector":
        """Set the threshold from in-distribution data that was not used for training.

        Args:
            loader: as for `fit`.
            split: half of the data, drawn by `seed`, sets E[delta_l]; the other half ranks. Then fresh
                in-distribution inputs are flagged at a rate of at most `1 - level`. With `False`, the
                paper's way, the same data do both: the rate is only approximate, and too high
                for small calibration sets (55 % instead of 5 % at 20 examples).
            seed: of the split; stored.
            progress: show a progress bar (on a terminal only).

        """
        self._fitted()
        measured = self.measure_all(loader, "calibrating", progress)
        left_out = int((~measured.finite).sum())
        if left_out:
            warn(f"{left_out} calibration example(s) with NaN or infinity were left out")
        deviations = measured.deviations[measured.finite]
        probability = measured.probability[measured.finite]
        check_enough(len(deviations), self.level, split)
        check_deviating(deviations)
        normalising, ranking = halves(len(deviations), seed) if split else (slice(None), slice(None))
        total = TotalDeviation(self.normalise, self.confidence)
        try:
            total.fit(deviations[normalising], probability[normalising])
        except ValueError as error:
            raise CalibrationError(str(error)) from None
        self.warn_of_silent_taps(total)
        self._scores = total(deviations[ranking], probability[ranking]).sort().values
        self._total = total
        self._calibration = {"split": split, "seed": seed, "examples": len(deviations)}
        return self

    def warn_of_silent_taps(self, total: TotalDeviation) -> None:
        """Name the taps that a score leaves out."""
        assert total.expectation_ is not None
        silent = (total.expectation_ == 0).nonzero().flatten().tolist()
        if silent and total.normalise:
            warn(
                f"{len(silent)} of {len(self.taps)} taps never deviate on the calibration data and are left "
                f"out of the score: {_listed([self.taps[i].name for i in silent])}"
            )

    # --- judge ---------------------------------------------------------------------------------------

    def __call__(self, inputs: Any) -> Detection:
        """Judge a batch in one forward pass.

        An input that is not finite, or makes the network's activations so, gets an infinite score.
        """
        self._calibrated()
        measured = self.measure(self.network.read(inputs))
        total, calibration = self._calibrated(measured.logits.device)
        # Out of inference mode, so that the results are ordinary tensors; measured ones are copied for that.
        with torch.inference_mode(False), torch.no_grad():
            score = total(measured.deviations, measured.probability)
            score = torch.where(measured.finite, score, torch.inf)
            found = Detection(
                logits=measured.logits.clone(),
                predicted=measured.predicted,
                score=score,
                p_value=p_value(score, calibration),
                is_ood=is_above_threshold(score, calibration, self.level),
                deviations=measured.deviations.clone(),
                class_support=self.class_support(measured.predicted),
                taps=tuple(self.taps.names),
            )
            # The device is waited for here and nowhere before.
            broken = int((~measured.finite).sum())
        if broken:
            warn(f"{broken} input(s) with NaN or infinity: their score is infinite")
        return found

    @torch.inference_mode()
    def measure(self, inputs: Inputs) -> Measurement:
        """Logits and deviations of a batch, without the calibration: what scores are made of."""
        _, bounds = self._fitted()
        inputs = on_device(inputs, self.model)
        self._prepare(inputs)
        if not self.is_large(inputs):
            return self.measured(inputs, *self._observe(inputs))
        self._warn_of_size(inputs)
        logits, deviations = self._measure_pieces(inputs, bounds)
        finite = all_finite([inputs, logits, deviations])
        return Measurement(logits, deviations, finite)

    @torch.inference_mode()
    def measured(self, inputs: Inputs, logits: Tensor, statistics: Tensor) -> Measurement:
        """The deviations of a batch whose statistics were collected already."""
        self._fitted()
        self._follow(statistics.device)
        _, bounds = self._fitted()
        self._warn_of_size(inputs)
        layout = self._layout(statistics.device)
        deviations = tap_deviations(statistics, logits.argmax(1), bounds, layout)
        finite = all_finite([inputs, logits, deviations])
        return Measurement(logits, deviations, finite)

    def _measure_pieces(self, inputs: Inputs, bounds: Bounds) -> tuple[Tensor, Tensor]:
        """Logits and deviations in two forward passes: which bounds to judge by is known after the first."""
        logits = self._run(inputs, lambda number, maps: None)
        predicted, layout = logits.argmax(1), self._layout(logits.device)
        deviations = torch.zeros(len(logits), len(self.taps), dtype=torch.float32, device=logits.device)

        def take(tap: int, samples: slice, features: slice, values: Tensor) -> None:
            deviations[samples, tap] += part_deviation(values, predicted[samples], bounds, layout, features)

        self._observe_pieces(inputs, take)
        return logits, deviations

    def _layout(self, device: torch.device | str) -> Layout:
        """How the taps' statistics lie side by side, made once for each device."""
        device = torch.device(device)
        if device not in self._layouts:
            measures = self._measures
            weights = torch.tensor([w for m in measures for w in m.weights], dtype=torch.float32)
            features = torch.tensor([m.features for m in measures for _ in m.weights])
            layout = Layout.of([m.size for m in measures], weights.repeat_interleave(features))
            self._layouts[device] = layout.to(device)
        return self._layouts[device]

    def measure_all(
        self, loader: Iterable[Any], doing: str = "measuring", progress: bool = True
    ) -> Measurement:
        """`measure` over a whole loader, on the CPU."""
        batches = (inputs for inputs, _ in self.network.batches(loader, doing, progress))
        parts = [self.measure(inputs) for inputs in on_device_ahead(batches, self.model)]
        if not parts:
            raise InputError(f"the loader yielded no example: {doing} needs some")
        return Measurement.joined(parts)

    # --- save and load -------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {
            "taps": self.selection,
            "orders": list(self.orders),
            "statistic": self.statistic,
            "bounds": self.bounds,
            "normalise": self.normalise,
            "confidence": self.confidence,
            "level": self.level,
            "storage": self.storage,
        }

    def differing_settings(self, other: "GramDetector") -> Iterator[tuple[str, Any, Any]]:
        """Each setting in which two detectors differ: its name, this one's value, the other's."""
        theirs = other._settings()
        for name, mine in self._settings().items():
            if mine != theirs[name]:
                yield name, mine, theirs[name]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the detector to one safetensors file, to be kept beside the network's checkpoint.

        The network itself is not saved, only a fingerprint of it.
        """
        self._fitted()
        self._write(path)
        self._fits.saved(path)

    def _write(self, path: str | PathLike[str], batches: int | None = None) -> None:
        artifact.check_writable(path)
        header, tensors = self.contents()
        network = artifact.fingerprint(self.model)
        more = {"network": network, "batches": batches, "metadata": self.metadata}
        if self.network.adapters:
            more["adapters"] = self.network.adapters
        artifact.write(path, header | more, tensors)

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is to be saved, but for the network's fingerprint: plain values, and tensors."""
        counts, bounds = self._fitted()
        tensors = {"class_counts": counts}
        tensors |= {f"bounds.{name}": tensor for name, tensor in bounds.state().items()}
        calibration = None
        if self._scores is not None and self._total is not None and self._calibration is not None:
            assert self._total.expectation_ is not None
            calibration = {**self._calibration, "maximum": self._total.maximum_}
            tensors |= {
                "calibration.scores": self._scores,
                "calibration.expectation": self._total.expectation_,
            }
        header = {
            "detector": type(self).__name__,
            # Left out where it says nothing new, so that version 0.1.0 can read the file too.
            "settings": {k: v for k, v in self._settings().items() if (k, v) != ("storage", "float32")},
            "inputs": self._signature,
            "taps": artifact.taps_to_json(self.taps),
            "classes": len(counts),
            "calibration": calibration,
        }
        return header, tensors

    @classmethod
    def from_artifact(
        cls, saved: artifact.Saved, model: nn.Module | Network, accept_other_weights: bool = False
    ) -> "GramDetector":
        """The detector in an opened file; `gramwatch.load` is the short way."""
        return saved.restored(cls, model, accept_other_weights)

    @classmethod
    def described(
        cls, header: Mapping[str, Any], model: nn.Module | Network
    ) -> "tuple[GramDetector, artifact.Shapes]":
        """The detector without its tensors, and what these must be."""
        settings, classes, calibration = header["settings"], header["classes"], header["calibration"]
        artifact.check_settings(cls, settings)
        artifact.check_types(header, classes=int, inputs=list[list[Any]])
        detector = cls(model, **settings)
        for shape, dtype in header["inputs"]:
            if not (artifact.fits(shape, list[int | None]) and artifact.fits(dtype, str)):
                raise ValueError(f"its inputs are {header['inputs']!r:.60}")
        detector._signature = header["inputs"]
        detector._taps = artifact.taps_from_json(header["taps"])
        if len(detector._taps) * len(detector.orders) > MOST_GROUPS:
            raise ValueError(f"{len(detector._taps):,} taps are too many")
        detector._measures = [detector._measure(tap) for tap in detector._taps]
        shapes = {"class_counts": Field((classes,), torch.int64, artifact.within(0, 2**53))}
        rules = BOUNDS_RULES[detector.bounds]
        for name, empty in detector._empty_bounds(classes, "meta").state().items():
            shapes[f"bounds.{name}"] = Field(tuple(empty.shape), empty.dtype, rules[name])
        if calibration is not None:
            artifact.check_types(calibration, maximum=float)
            if detector.confidence == "subtract" and not calibration["maximum"] > 0:
                raise ValueError("the largest deviation must be positive")
            taps, ranking = len(detector._taps), how_many_rank(calibration)
            shapes["calibration.scores"] = Field((ranking,), torch.float64, artifact.ASCENDING)
            shapes["calibration.expectation"] = Field((taps,), torch.float64, artifact.NOT_NEGATIVE)
        return detector, shapes

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a file."""
        place = next(unwrap(self.model).parameters(), torch.empty(0)).device
        self._class_counts = tensors["class_counts"].to(place)
        if not self.has_examples():
            raise ValueError("it has seen no example")
        if self.bounds == "min_max":
            _check_ranges(tensors["bounds.minimum"], tensors["bounds.maximum"])
        self._bounds = self._empty_bounds(int(header["classes"]), place)
        self._bounds.load_state({name: tensors[f"bounds.{name}"] for name in self._bounds.state()})
        calibration = header["calibration"]
        if calibration is not None:
            self._scores = tensors["calibration.scores"]
            self._total = TotalDeviation(
                self.normalise,
                self.confidence,
                tensors["calibration.expectation"],
                float(calibration["maximum"]),
            )
            self._calibration = {k: calibration[k] for k in ("split", "seed", "examples")}

    def take_over(self, before: "GramDetector") -> None:
        """Go on from what another detector has seen."""
        for name in ("_taps", "_measures", "_bounds", "_signature", "_class_counts"):
            setattr(self, name, getattr(before, name))

    def _resume(self, checkpoint: str | PathLike[str] | None) -> int:
        """Take over the state of an interrupted fit; the number of batches it holds."""
        if checkpoint is None or not Path(checkpoint).exists():
            return 0
        saved = artifact.read(checkpoint)
        batches = saved.batches()
        before = GramDetector.from_artifact(saved, self.network)
        for name, mine, theirs in self.differing_settings(before):
            raise ArtifactError(
                f"{checkpoint} was begun with {name} = {theirs!r}, not {mine!r}: delete it to start anew"
            )
        self.take_over(before)
        return batches


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _check_ranges(minimum: Tensor, maximum: Tensor) -> None:
    """Every range is finite and not reversed, or empty; where not, a plain error."""
    for low, high in zip(minimum, maximum, strict=True):
        whole = (low <= high) & low.isfinite() & high.isfinite()
        empty = low.isposinf() & high.isneginf()
        if not bool((whole | empty).all()):
            raise ValueError("the least of its bounds exceeds the largest, or one of them is infinite")


def check_level(level: float) -> None:
    """A share, or a plain error."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")


def check_same_weights(model: nn.Module, other: nn.Module) -> None:
    """Two networks with the same weights, or a plain error."""
    if model is not other and artifact.fingerprint(model) != artifact.fingerprint(other):
        raise ValueError("the two were fitted on networks with different weights")


def check_not_itself(detector: object, other: object) -> None:
    """Two detectors, not one given twice: that would count its examples twice."""
    if detector is other:
        raise ValueError("a detector cannot be merged with itself: its examples would count twice")


def check_enough(examples: int, level: float, split: bool) -> None:
    """Enough calibration examples for the level, or a plain error."""
    needed = examples_needed(level) * (2 if split else 1)
    if examples < needed:
        raise CalibrationError(
            f"{examples} calibration examples cannot support level {level}: "
            f"at least {needed} are needed" + (" (half of them rank)" if split else "")
        )


def check_deviating(deviations: Tensor) -> None:
    """Calibration examples that are not training examples, or a plain error."""
    # A training example run again in another batch deviates by rounding alone.
    deviating = (deviations > 1e-3).any(1).double().mean().item()
    if deviating < 0.01:
        raise CalibrationError(
            f"only {deviating:.1%} of the calibration examples deviate from the training data at all: "
            "they look like training examples. Calibrate on data that the detector was not fitted on"
        )


class Fits:
    """The fits of one detector: whether one was interrupted, and the checkpoint that `save` makes useless."""

    def __init__(self) -> None:
        self._interrupted = 0
        self._checkpoint: Path | None = None

    def begin(self, checkpoint: str | PathLike[str] | None) -> None:
        """Say what a fit after an interrupted one does; refuse a checkpoint that cannot be written."""
        if checkpoint is not None:
            artifact.check_writable(checkpoint)
        if self._interrupted and checkpoint is None:
            warn(
                f"an earlier fit was interrupted after {self._interrupted} batch(es), which are kept. If "
                "this loader yields them again, they count twice: detector.reset() forgets them"
            )
        self._interrupted = 0
        self._checkpoint = None if checkpoint is None else Path(checkpoint)

    def run(
        self, batches: Iterable[_B], take: Callable[[_B], None], done: int, write: Callable[[int], None]
    ) -> None:
        """Take in every batch after the first `done`.

        `write(done)` is called every minute, on interruption, and at the end.
        """
        seen, before, saved_at = 0, done, time.monotonic()
        try:
            for number, batch in enumerate(batches):
                seen += 1
                if number < done:
                    continue
                take(batch)
                done = number + 1
                if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                    write(done)
                    saved_at = time.monotonic()
        except BaseException:
            self._interrupted = done
            write(done)
            raise
        if seen == 0:
            raise InputError("the loader yielded no example: there is nothing to fit")
        if seen < done:
            raise InputError(f"the checkpoint holds {done} batches, but the loader yielded only {seen}")
        if before == done and self._checkpoint is not None:
            warn(
                f"{self._checkpoint} holds all {done} batches already, so that nothing was fitted anew: "
                "delete it to fit again"
            )
        write(done)

    def saved(self, path: str | PathLike[str]) -> None:
        """The detector was saved to `path`: its checkpoint is of no more use."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None and checkpoint.resolve() != Path(path).resolve():
            checkpoint.unlink(missing_ok=True)


def how_many_rank(calibration: Mapping[str, Any]) -> int:
    """How many of the calibration examples rank, by what a header says of them."""
    artifact.check_types(calibration, split=bool, seed=int, examples=int)
    examples: int = calibration["examples"]
    return examples - examples // 2 if calibration["split"] else examples


def halves(examples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two random halves; where the number is odd, the half that ranks is the larger."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    return order[: examples // 2], order[examples // 2 :]


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
