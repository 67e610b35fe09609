"""GramDetector: the method of the paper.

At every tap, the Gram statistics of an input are compared with the range of the training data of its
predicted class (Algorithm 1, Eq. 3-4). The deviations are divided by their expectation on held-out data and
summed (Eq. 5).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gramwatch.detect.detector import Detector
from gramwatch.detect.measurement import Calibration, Measurement, facts_of, how_many_rank
from gramwatch.detect.parts import Shares
from gramwatch.errors import CalibrationError, InputError, NotFittedError, listed, warn
from gramwatch.files import artifact
from gramwatch.files.artifact import Field
from gramwatch.inputs.adapters import InputsAdapter, LogitsAdapter, MaskAdapter
from gramwatch.inputs.batches import (
    Signature,
    all_finite,
    described,
    same_form,
    same_size,
    widened,
)
from gramwatch.methods.gram_rules import BOUNDS_RULES, SHRINK, GramRule, MeanOfRoots
from gramwatch.numerics.bounds import BOUNDS, STORAGES, Bounds, MinMax, make_bounds
from gramwatch.numerics.deviation import (
    CONFIDENCES,
    Confidence,
    Layout,
    TotalDeviation,
    outside_range,
    squared_distance,
    tap_deviations,
)
from gramwatch.numerics.samples import TOGETHER, Sample
from gramwatch.numerics.statistics import STATISTICS, check_count, check_orders
from gramwatch.observe.needs import WIDEST_TRIANGLE, Needs, Statistics
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Network, Tap, Taps, unwrap
from gramwatch.watch.tap import taps_from_json, taps_to_json

FEW_EXAMPLES = 20
"""A warning names classes with fewer training examples than this. Their bounds are too narrow."""
NO_WIDTH = 2**-8
"""Bounds narrower than this share of their value count as one value. float16 rounds by a quarter of it."""
MOST_GROUPS = 10**6
"""The most taps times orders of a file. Large networks have ten thousand; a file with more is refused."""
LATER_DEFAULTS = (("storage", "float32"), ("pixels", None), ("channels", None))
"""Settings that came after version 0.1.0, with their default values."""


class GramDetector(Detector):
    """Tells whether a classifier is looking at something it was never trained on (Sastry & Oore).

    Example:
        >>> detector = gramwatch.GramDetector(model)
        >>> detector.fit(train_loader)
        >>> detector.calibrate(validation_loader)
        >>> detection = detector(images)
        >>> detection.is_ood

    Args:
        model: any classifier that returns logits. It is not changed.
        taps: which tensors to watch: `"all"` convolutions, linear layers and activations; `"ends"`, the last
            tensor of each size; `"paper"` for the networks of `gramwatch_lab`; or names and globs.
        orders: the orders of the Gram matrices, P, at most 100.
        pixels: about how many pixels of each tensor count, on a regular grid; None: all, as in the paper.
            Fewer pixels cost less time: see docs/performance.md.
        channels: at most how many channels of each tensor count, in groups of 16 that are evenly spread;
            None: all, as in the paper. Fewer channels cost less time, memory and disk.
        statistic: `"row_sums"`, `"row_sums_of_roots"`, `"diagonal"`, `"off_diagonal"`, `"triangle"`, or
            `"auto"`: `triangle` for plain vectors up to 1,024 channels, `row_sums` for all other tensors.
            If the statistics of a batch exceed 1 GiB, the batch is run in pieces.
        bounds: `"min_max"`, or `"mean_variance"` (App. C).
        normalise: divide each tap's deviation by its expectation on validation data (Eq. 5).
        confidence: how the maximum softmax probability enters the score, see `TotalDeviation`.
        level: the share of in-distribution inputs to keep; `1 - level` is the false-alarm rate.
        inputs: how a batch becomes the network's input: a function of the batch, or a key. It is not needed
            for a tensor, a tuple whose first item is the input, or a mapping of keyword arguments.
        logits: where the logits are in the network's output, if the network returns more than logits: a
            name, a position, or a function of the output.
        mask: which places of an input are padding, which does not count: a function from the network's
            arguments to a mask `(N, length)` with 0 at padding, or the name of the argument that is the mask.
            None: `attention_mask`, if the network gets one. False: padding counts.
        storage: `"float32"`, or `"float16"` for `min_max` bounds. `"float16"` halves memory and file. It
            widens the bounds by up to a thousandth of their value, so no training example lies outside.

    Attributes:
        metadata: a free dictionary that is saved with the detector (preprocessing, class names, ...).
        taps: the watched tensors, after `fit`.
        class_counts_: the number of training examples per predicted class.
        threshold_: the score above which an input is out-of-distribution.
        calibration_scores_: the scores that rank, ascending.

    """

    name = "GramDetector"
    title = "Gram"
    sees = "texture"
    stands_beside_baseline = True

    def __init__(
        self,
        model: nn.Module | Network,
        *,
        taps: str | Iterable[str] = "all",
        orders: Iterable[int] = range(1, 11),
        pixels: int | None = None,
        channels: int | None = None,
        statistic: str = "auto",
        bounds: str = "min_max",
        normalise: bool = True,
        confidence: Confidence = "divide",
        level: float = 0.95,
        inputs: InputsAdapter = None,
        logits: LogitsAdapter = None,
        mask: MaskAdapter = None,
        storage: str = "float32",
    ) -> None:
        _check_choice("statistic", statistic, ["auto", *STATISTICS])
        _check_choice("bounds", bounds, list(BOUNDS))
        _check_choice("confidence", confidence, CONFIDENCES)
        _check_choice("storage", storage, STORAGES)
        if storage == "float16" and bounds != "min_max":
            raise ValueError(
                f"storage='float16' is for bounds='min_max': with bounds={bounds!r} use storage='float32'"
            )
        self.orders, self.pixels = check_orders(orders), check_count("pixels", pixels)
        self.channels = check_count("channels", channels, TOGETHER)
        self.statistic, self.bounds, self.storage = statistic, bounds, storage
        self.normalise = normalise
        self.confidence: Confidence = confidence
        self.selection = taps if isinstance(taps, str) else list(taps)
        super().__init__(model, level=level, inputs=inputs, logits=logits, mask=mask)

    def _begin(self) -> None:
        self._taps: Taps | None = None
        self._layouts: dict[torch.device, Layout] = {}
        self._bounds: Bounds | None = None
        self._class_counts: Tensor | None = None
        self._told_of_size = self._taken = False
        self._largest: Tensor | None = None
        super()._begin()

    # --- what is known so far ------------------------------------------------------------------------

    @property
    def needs(self) -> Needs:
        """The Gram statistics at the taps."""
        return Needs(statistics=self.statistics)

    @property
    def statistics(self) -> Statistics:
        """The Gram statistics that it needs."""
        taps = self.selection if isinstance(self.selection, str) else tuple(self.selection)
        return Statistics(taps, self.statistic, self.orders, Sample(self.pixels, self.channels))

    @property
    def fitted_bounds(self) -> Bounds:
        """The bounds of the fit."""
        return self._fitted()[1]

    @property
    def known_taps(self) -> Mapping[Statistics, Taps]:
        """The taps of the fit, by the statistics that are computed there."""
        return {} if self._taps is None else {self.statistics: self._taps}

    @property
    def taps(self) -> Taps:
        """The watched tensors, after `fit`."""
        if self._taps is None:
            raise NotFittedError(
                "the taps are found when fitting: call detector.fit(train_loader) first, "
                "or gramwatch.find_taps(model, images) to see them now"
            )
        return self._taps

    @property
    def tap_names(self) -> tuple[str, ...]:
        """The names of the taps."""
        return tuple(self.taps.names)

    measured_by_kernels = True
    shows_deviations = True

    @property
    def is_fitted(self) -> bool:
        """Whether the detector has seen training data."""
        return self._bounds is not None and self.has_examples

    @property
    def has_examples(self) -> bool:  # type: ignore[override]
        """Whether the detector has seen a finite training example."""
        if not self._taken:  # True stays True, so a GPU is waited for only until then
            self._taken = self._class_counts is not None and int(self._class_counts.sum()) > 0
        return self._taken

    @property
    def class_counts_(self) -> Tensor:
        """The number of training examples per predicted class."""
        return self._fitted()[0].clone()

    def tables(self) -> list[Tensor]:
        """The fitted tensors that judging reads."""
        counts, bounds = self._fitted()
        return [counts, *bounds.state().values()]

    def _fitted(self) -> tuple[Tensor, Bounds]:
        self.check_fitted()
        assert self._class_counts is not None
        assert self._bounds is not None
        return self._class_counts, self._bounds

    def _described_fit(self) -> str:
        if self._class_counts is None or self._taps is None:
            return "not fitted"
        return f"{len(self._taps)} taps, fitted on {int(self._class_counts.sum())} examples"

    @property
    def sees_differences(self) -> bool:  # type: ignore[override]
        """Whether training examples of a class differ at a tap, for any class."""
        counts, bounds = self._fitted()
        if not isinstance(bounds, MinMax) or counts.max() < 2:
            return True
        for known in (counts > 1).nonzero():  # most fits return at the first class
            low, high = bounds.rows(known)
            if outside_range(low, high, high).amax() > NO_WIDTH:
                return True
        return False

    def to(self, device: torch.device | str) -> "GramDetector":
        """Move the network and the fitted tensors to a device."""
        super().to(device)
        self._follow(torch.device(device))
        return self

    def _follow(self, device: torch.device) -> None:
        """Move the fitted tensors to the device of the network."""
        if (
            self._class_counts is not None
            and self._bounds is not None
            and self._class_counts.device != device
        ):
            bounds = self._empty_bounds(len(self._class_counts), device)
            bounds.load_state(self._bounds.state())
            self._class_counts, self._bounds = self._class_counts.to(device), bounds

    # --- inputs --------------------------------------------------------------------------------------

    def _warn_of_size(self, form: Signature) -> None:
        """Warn, once, of inputs whose size differs from the training data."""
        if not self._told_of_size and self._form is not None and not same_size(form, self._form):
            self._told_of_size = True
            warn(
                f"inputs of {described(form)} are judged, another size than the detector was "
                f"fitted on, {described(self._form)}. Gram's sums over pixels grow with the number of "
                "pixels: an input may look unusual by its size alone"
            )

    def _check_classes(self, logits: Tensor) -> None:
        if self._class_counts is not None and logits.shape[1] != len(self._class_counts):
            raise InputError(
                f"the network now has {logits.shape[1]} classes, "
                f"the detector was fitted with {len(self._class_counts)}"
            )

    # --- fit: Algorithm 1 ----------------------------------------------------------------------------

    def use(self, plan: Plan) -> None:
        """Take the taps from the plan, at the first batch."""
        if self._taps is not None:
            return
        self._taps = taps = plan.tables[self.statistics].taps
        count = self.statistics.sample.count
        wide = [tap.name for tap in taps if tap.is_vector and count(tap.channels) > WIDEST_TRIANGLE]
        if self.statistic == "auto" and wide:
            warn(
                f"{len(wide)} vector(s) over {WIDEST_TRIANGLE} channels are judged by row sums, "
                f"not by pairs: {listed(wide)}; statistic='triangle' takes the pairs all the same"
            )

    def take(self, observation: Observation) -> Tensor:
        """Widen the bounds of the predicted classes. Return how many examples are not finite.

        This does not wait for a GPU, unless bounds are float16.
        """
        logits, statistics, form = observation.logits, observation.statistics, observation.form
        assert statistics is not None
        assert form is not None
        self._check_classes(logits)
        self._form = form if self._form is None else widened(self._form, form)
        self._note_largest(statistics)
        if self._class_counts is None or self._bounds is None:
            self._class_counts = torch.zeros(logits.shape[1], dtype=torch.int64, device=logits.device)
            self._bounds = self._empty_bounds(logits.shape[1], logits.device)
        self._follow(logits.device)
        finite = all_finite(statistics)
        finite = finite if observation.finite is None else finite & observation.finite
        predicted = torch.where(finite, observation.predicted, -1)
        self._bounds.update(statistics, predicted)
        self._class_counts.scatter_add_(0, predicted.clamp_min(0), finite.long())
        return (~finite).sum()

    def _note_largest(self, statistics: Tensor) -> None:
        """Keep the largest magnitude of each statistic, NaN included. It shows which tap was not finite."""
        largest = torch.linalg.vector_norm(statistics, torch.inf, 0)
        before = self._largest
        self._largest = largest if before is None else torch.maximum(before.to(largest.device), largest)

    def _empty_bounds(self, classes: int, device: torch.device | str) -> Bounds:
        at_taps = [self.statistics.at(tap) for tap in self.taps]
        groups = [at_tap.features for at_tap in at_taps for _ in at_tap.orders]
        return make_bounds(self.bounds, self.storage, classes, groups, device)

    def finish(self, left_out: int = 0) -> None:
        """Warn of classes with few examples. Raise an error if no example was finite."""
        where = self.not_finite_at if left_out else ""
        self._largest = None
        if self._class_counts is None or not self.has_examples:
            what = "every training example held NaN or infinity" if left_out else "every batch was empty"
            raise InputError(f"{what}{where}: there is nothing to fit")
        counts = self._class_counts
        few = (counts < FEW_EXAMPLES).nonzero().flatten().tolist()
        if few:
            never = int((counts == 0).sum())
            warn(
                f"{len(few)} of {len(counts)} classes were predicted for fewer than {FEW_EXAMPLES} training "
                f"examples, {never} of them for none: class {listed([str(c) for c in few])}. Their bounds "
                "say little (detection.class_support tells for each verdict)"
            )

    @property
    def not_finite_at(self) -> str:  # type: ignore[override]
        """For a warning: the first tap whose statistics were not finite. Empty if all were finite."""
        if self._largest is None or bool((finite := self._largest.isfinite()).all()):
            return ""
        first = int((~finite).nonzero()[0])
        tap = int(torch.searchsorted(self._layout("cpu").starts, first, right=True)) - 1
        return f"; the first tap to show it is '{self.taps[tap].name}'"

    def check_merge(self, other: Detector) -> None:
        """Make sure that another detector can be merged into this one."""
        super().check_merge(other)
        assert isinstance(other, GramDetector)
        (counts, _), (their_counts, _) = self._fitted(), other._fitted()
        alike = self.taps.alike(other.taps) and same_form(other._form or [], self._form or [])
        if not alike:
            raise ValueError("the two watch different tensors: they must be fitted on the same network")
        if counts.shape != their_counts.shape:
            raise ValueError(f"the two have {len(counts)} and {len(their_counts)} classes")

    def _merge(self, other: "GramDetector") -> None:
        (counts, bounds), (their_counts, their_bounds) = self._fitted(), other._fitted()
        bounds.merge(their_bounds)
        self._form = widened(self._form or [], other._form or [])
        self._class_counts = counts + their_counts.to(counts.device)

    # --- calibrate and judge: Eq. 3-5 ----------------------------------------------------------------

    @torch.inference_mode()
    def measured(self, observation: Observation) -> Measurement:
        """Eq. 4, delta_l: the deviation at each tap."""
        logits, statistics = observation.logits, observation.statistics
        assert statistics is not None
        if self._class_counts is not None and self._class_counts.device != statistics.device:
            self._follow(statistics.device)
        counts, bounds = self._class_counts, self._bounds
        if counts is None or bounds is None:
            counts, bounds = self._fitted()  # raises the error that says what is missing
        if logits.shape[1] != len(counts):
            self._check_classes(logits)
        if observation.form != self._form:
            self._warn_of_size(observation.form or [])
        layout = self._layouts.get(statistics.device) or self._layout(statistics.device)
        deviations = tap_deviations(statistics, logits.argmax(1), bounds, layout)
        finite = torch.linalg.vector_norm(deviations, torch.inf, 1) < torch.inf
        finite = finite if observation.finite is None else finite & observation.finite
        return Measurement(deviations, logits, finite)

    def _layout(self, device: torch.device | str) -> Layout:
        """The layout of the statistics on a device, where it is kept."""
        device = torch.device(device)
        if device not in self._layouts:
            at_taps = [self.statistics.at(tap) for tap in self.taps]
            weights = torch.tensor([w for at_tap in at_taps for w in at_tap.weights], dtype=torch.float32)
            features = torch.tensor([at_tap.features for at_tap in at_taps for _ in at_tap.weights])
            layout = Layout.of([at_tap.size for at_tap in at_taps], weights.repeat_interleave(features))
            self._layouts[device] = layout.to(device)
        return self._layouts[device]

    def rule(self) -> GramRule:
        """Eq. 5, not fitted yet."""
        return GramRule(TotalDeviation(self.normalise, self.confidence))

    def member_rule(self) -> MeanOfRoots:
        """The mean of roots, not fitted yet."""
        return MeanOfRoots(TotalDeviation(self.normalise, self.confidence, shrink=SHRINK))

    @property
    def why_no_member(self) -> str:  # type: ignore[override]
        """Why a guard cannot have it as a member; empty if it can."""
        return "has confidence='subtract', which a guard cannot join" if self.confidence == "subtract" else ""

    def check_calibration(self, measured: Measurement) -> None:
        """Refuse training examples as calibration data."""
        # A training example deviates only by rounding when it is run again in another batch.
        deviating = (measured.deviations > 1e-3).any(1).double().mean().item()
        if deviating < 0.01:
            raise CalibrationError(
                f"only {deviating:.1%} of the calibration examples deviate from the training data at all: "
                "they look like training examples. Calibrate on data that the detector was not fitted on"
            )

    def check_rule(self, rule: GramRule | MeanOfRoots) -> None:
        """Warn of taps that the score leaves out."""
        total = rule.total
        assert total.expectation_ is not None
        silent = (total.expectation_ == 0).nonzero().flatten().tolist()
        if silent and total.normalise:
            warn(
                f"{len(silent)} of {len(self.taps)} taps never deviate on the calibration data and are left "
                f"out of the score: {listed([self.taps[i].name for i in silent])}"
            )

    def shown(self, values: Tensor, predicted: Tensor) -> dict[str, Tensor]:
        """The deviations, and the number of training examples of the predicted class."""
        assert self._class_counts is not None
        return {"deviations": values.float(), "class_support": self._class_counts[predicted]}

    # --- explain -------------------------------------------------------------------------------------

    def term_taps(self, plan: Plan) -> tuple[Tap, ...]:
        """The watched taps."""
        return tuple(self.taps)

    def shares_at(self, observation: Observation, rule: Any, example: int, tap: int) -> Shares:
        """The statistics of one tap outside their range: channels, or pairs of channels, by order."""
        assert observation.statistics is not None
        (counts, bounds), asked = self._fitted(), self.statistics.at(self.taps[tap])
        rows, part = slice(example, example + 1), slice(*self._layout("cpu").starts[tap : tap + 2].tolist())
        statistics, predicted = observation.statistics[rows, part], observation.predicted[rows]
        low, high = bounds.rows(predicted, part)
        if isinstance(bounds, MinMax):
            outside = outside_range(statistics, low, high)
        else:
            outside, high = squared_distance(statistics, low, high), low
        outside = outside * self._layout(observation.logits.device).weights[part]
        channels = self.statistics.sample.count(self.taps[tap].channels)
        numbers = torch.arange(channels)
        if asked.statistic == "triangle":
            numbers = torch.triu_indices(channels, channels).T
        return Shares(
            amount=outside.flatten().cpu().double(),
            channel=numbers.repeat(len(asked.orders), *(1 for _ in numbers.shape[1:])),
            of=[f"order {order}" for order in asked.orders for _ in range(asked.features)],
            value=statistics.flatten().cpu(),
            low=low.flatten().cpu(),
            high=high.flatten().cpu(),
            examples=int(counts[predicted]),
        )

    def channels_at(self, tap: Tap) -> Tensor:
        """The numbers of the channels that count at a tap."""
        return self.statistics.sample.numbers(tap.channels)

    # --- save and load -------------------------------------------------------------------------------

    @classmethod
    def values_in(cls, header: Mapping[str, Any]) -> int:
        """The number of values that it measures, from its part of a file: one for each tap."""
        return len(header["taps"]["watched"])

    def settings_as_json(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            "taps": self.selection,
            "orders": list(self.orders),
            "pixels": self.pixels,
            "channels": self.channels,
            "statistic": self.statistic,
            "bounds": self.bounds,
            "normalise": self.normalise,
            "confidence": self.confidence,
            "level": self.level,
            "storage": self.storage,
        }

    def contents(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What to save: plain values, and tensors."""
        counts, bounds = self._fitted()
        tensors = {"class_counts": counts}
        tensors |= {f"bounds.{name}": tensor for name, tensor in bounds.state().items()}
        how, calibration = None, self._calibration
        if calibration is not None:
            how = facts_of(calibration.how) | {"maximum": calibration.rule.total.maximum_}
            tensors |= calibration.tensors()
        settings = self.settings_as_json()
        header = {
            "detector": self.name,
            # Defaults that version 0.1.0 does not know are left out, so that it can read the file too.
            "settings": {k: v for k, v in settings.items() if (k, v) not in LATER_DEFAULTS},
            "inputs": self._form,
            "taps": taps_to_json(self.taps),
            "classes": len(counts),
            "calibration": how,
        }
        return header, tensors

    @classmethod
    def described(
        cls, header: Mapping[str, Any], model: nn.Module | Network
    ) -> "tuple[GramDetector, artifact.Shapes]":
        """The detector without its tensors, and the fields that its tensors must match."""
        settings, classes, calibration = header["settings"], header["classes"], header["calibration"]
        artifact.check_settings(cls, settings)
        artifact.check_types(header, classes=int, inputs=list[list[Any]])
        detector = cls(model, **settings)
        for shape, dtype in header["inputs"]:
            if not (artifact.fits(shape, list[int | None]) and artifact.fits(dtype, str)):
                raise ValueError(f"its inputs are {header['inputs']!r:.60}")
        detector._form = header["inputs"]
        detector._taps = taps_from_json(header["taps"])
        if len(detector._taps) * len(detector.orders) > MOST_GROUPS:
            raise ValueError(f"{len(detector._taps):,} taps are too many")
        shapes = {"class_counts": Field((classes,), torch.int64, artifact.within(0, 2**53))}
        rules = BOUNDS_RULES[detector.bounds]
        for name, empty in detector._empty_bounds(classes, "meta").state().items():
            shapes[f"bounds.{name}"] = Field(tuple(empty.shape), empty.dtype, rules[name])
        if calibration is not None:
            artifact.check_types(calibration, maximum=float)
            if detector.confidence == "subtract" and not calibration["maximum"] > 0:
                raise ValueError("the largest deviation must be positive")
            shapes |= Calibration.fields(GramRule, len(detector._taps), how_many_rank(calibration))
        return detector, shapes

    def restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors from a file."""
        place = next(unwrap(self.model).parameters(), torch.empty(0)).device
        self._class_counts = tensors["class_counts"].to(place)
        if not self.has_examples:
            raise ValueError("it has seen no example")
        if self.bounds == "min_max":
            _check_ranges(tensors["bounds.minimum"], tensors["bounds.maximum"])
        self._bounds = self._empty_bounds(int(header["classes"]), place)
        saved = {name: tensors[f"bounds.{name}"] for name in self._bounds.state()}
        self._bounds.load_state(saved)
        how = header["calibration"]
        if how is not None:
            rule = GramRule(replace(self.rule().total, maximum_=float(how["maximum"])))
            self._calibration = Calibration.loaded(rule, tensors, self.level, how)

    def take_over(self, before: "GramDetector") -> None:
        """Continue the fit of another detector."""
        for name in ("_taps", "_bounds", "_form", "_class_counts"):
            setattr(self, name, getattr(before, name))
        self._largest = None


def _check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _check_ranges(minimum: Tensor, maximum: Tensor) -> None:
    """Raise an error unless every range is finite and not reversed, or empty."""
    for low, high in zip(minimum, maximum, strict=True):
        whole = (low <= high) & low.isfinite() & high.isfinite()
        empty = low.isposinf() & high.isneginf()
        if not bool((whole | empty).all()):
            raise ValueError("the least of its bounds exceeds the largest, or one of them is infinite")
