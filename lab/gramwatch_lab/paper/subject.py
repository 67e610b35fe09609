"""One network under study: the methods that judge it, and the cells they fill.

All methods that need training data are fitted in one pass, and all are measured in one pass over each set.
What each says of each set is a cell of its own.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gramwatch.detect.detector import Detector
from gramwatch.detect.measurement import Measurement, Rule
from gramwatch.errors import InputError, MissingDataError
from gramwatch.evaluation.evaluate import Evaluation, Measured, Together, evaluate_measured, fit_together
from gramwatch.files import artifact
from gramwatch.inputs.batches import all_finite
from gramwatch.inputs.networks import Loaded
from gramwatch.methods import METHODS, TRAINED, Method, fgsm
from gramwatch.methods.gram import GramDetector
from gramwatch.methods.gram_rules import GramRule
from gramwatch.methods.mahalanobis import Mahalanobis
from gramwatch.methods.odin import ODIN
from gramwatch.numerics.deviation import TotalDeviation, tap_deviations
from gramwatch.observe.observation import Observation
from gramwatch_lab import datasets
from gramwatch_lab.paper.cells import Cells
from gramwatch_lab.paper.sets import PART_OF, TITLES, OodSet, ood_sets
from gramwatch_lab.training.images import PADDING

TUNING = 1000
"""Images of each kind that ODIN and Mahalanobis are tuned on; a fifth of the set, where that is less."""
FGSM = "FGSM by true classes"
"""What a method is tuned on that is tuned on adversarial examples."""
VALIDATION = "validation"
"""The title of what is measured of in-distribution images for validation, where they are a split."""
FORM = 2
"""Cells of methods hold values, and which examples are finite. Cells of an earlier form are measured anew."""
BLOCK_ENDS: Mapping[str, tuple[str, ...]] = {
    "resnet34": ("relu", "layer1.2.relu#2", "layer2.3.relu#2", "layer3.5.relu#2", "layer4.2.relu#2"),
    "densenet": ("conv1", "trans1.conv1", "trans2.conv1", "relu"),
    "wrn40_2": ("conv1", "block2.layer.0.relu1", "block3.layer.0.relu1", "relu"),
    **{
        f"resnet{6 * blocks + 2}": ("relu", *(f"layer{stage}.{blocks - 1}.relu#2" for stage in (1, 2, 3)))
        for blocks in (3, 5, 7, 9, 18)
    },
}
"""Where Mahalanobis looks: the ends of the blocks, as its authors have it. Elsewhere, all taps."""


@dataclass(frozen=True)
class MethodSpec:
    """A method with its settings: what a detector is made from."""

    title: str
    kind: str
    """`"gram"`, `"gram_by_order"`, or a name of `gramwatch.methods.METHODS` or `TRAINED`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tuned_on: str = ""
    """What it is tuned on: the title of a set, or `FGSM`."""
    moved: bool = False
    """Whether it is also fitted on the training images mirrored and shifted; Gram only."""

    @property
    def detector_class(self) -> type[Detector]:
        """What is made."""
        if self.kind.startswith("gram"):
            return GramByOrder if self.kind == "gram_by_order" else GramDetector
        return (METHODS | TRAINED)[self.kind]

    def make(self, network: nn.Module) -> Detector:
        """A detector, not fitted."""
        return self.detector_class(network, **self.settings)

    def as_json(self) -> dict[str, Any]:
        """What its cells depend on."""
        moved = {"moved": True} if self.moved else {}
        return {"kind": self.kind, "settings": dict(self.settings), "tuned_on": self.tuned_on, **moved}


class GramByOrder(GramDetector):
    """Gram with deviations told apart by order too: `(N, taps x orders)`, the orders of a tap together."""

    @torch.inference_mode()
    def measured(self, observation: Observation) -> Measurement:
        """The deviation at each tap, of each order."""
        statistics, finite = observation.statistics, observation.finite
        assert statistics is not None
        assert finite is not None
        _, bounds = self._fitted()
        at = [self.statistics.at(tap) for tap in self.taps]
        sizes = [statistic.features for statistic in at for _ in statistic.orders]
        starts = torch.tensor([0, *sizes]).cumsum(0).to(statistics.device)
        layout = replace(self._layout(statistics.device), starts=starts)
        deviations = tap_deviations(statistics, observation.predicted, bounds, layout)
        return Measurement(deviations, observation.logits, finite & all_finite(deviations))


def rules_of(methods: Sequence[MethodSpec]) -> dict[str, Rule]:
    """By title, how a measurement becomes a score. Methods that measure their score itself are left out."""
    rules: dict[str, Rule] = {}
    for method in methods:
        kind = method.detector_class
        if issubclass(kind, GramDetector):
            rules[method.title] = GramRule(TotalDeviation())
        elif issubclass(kind, Method) and kind.rule_kind.standardises:
            rules[method.title] = kind.rule_kind()
    return rules


class Batches:
    """Images on the network's device, prepared for it batch by batch; labels with them, if any."""

    def __init__(self, loaded: Loaded, images: Tensor, labels: Tensor | None, size: int) -> None:
        self.loaded, self.labels, self.size = loaded, labels, size
        self.images = images.to(next(loaded.network.parameters()).device)

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor] | Tensor]:
        for start in range(0, len(self.images), self.size):
            part = slice(start, start + self.size)
            batch = self.loaded.prepare(self.images[part])
            yield batch if self.labels is None else (batch, self.labels[part])


class Subject:
    """A network, its data and its cells.

    Args:
        loaded: the network with its weights.
        in_distribution: what it was trained on: a name of `gramwatch_lab.datasets`.
        cells: where finished parts are kept.
        root: where the data lie.
        subset: how many images of each set, and ten times as many to fit on; None for all.
        tuning: whether images are set aside to tune on.
        batch: images at once.
        say: where progress goes.

    """

    def __init__(
        self,
        loaded: Loaded,
        in_distribution: str,
        cells: Cells,
        *,
        root: str | PathLike[str] | None = None,
        subset: int | None = None,
        tuning: bool = False,
        batch: int = 250,
        say: Callable[[str], None] = print,
    ) -> None:
        self.loaded, self.in_distribution, self.cells = loaded, in_distribution, cells
        self.root, self.subset, self.tuning, self.batch, self._say = root, subset, tuning, batch, say
        self.weights = artifact.fingerprint(loaded.network)["weights"]
        self._inside = OodSet(TITLES.get(in_distribution, in_distribution), in_distribution)
        self._validation = (
            replace(self._inside, title=VALIDATION, split="val") if in_distribution in PART_OF else None
        )
        self._together: tuple[dict[str, Detector], Together] | None = None
        self._grid_inside: Tensor | None = None

    @property
    def network(self) -> nn.Module:
        """The network itself."""
        return self.loaded.network

    @property
    def title(self) -> str:
        """The network, as tables call it."""
        return self.loaded.record.title

    @property
    def inside_title(self) -> str:
        """The in-distribution set, as tables call it."""
        return self._inside.title

    @property
    def published_title(self) -> str:
        """The in-distribution set of the published figures that stand beside ours."""
        whole = PART_OF.get(self.in_distribution, self.in_distribution)
        return TITLES.get(whole, whole)

    @property
    def label(self) -> str:
        """What files are named after: the network, and the in-distribution set if it is not the usual one."""
        usual = self.in_distribution in ("cifar10", "mnist")
        name = self.loaded.name.replace(":", "-")
        return name if usual else f"{name}-{self.in_distribution}"

    # --- images --------------------------------------------------------------------------------------

    def load(
        self, name: str, split: str = "test", reduce: str | None = None, count: int | None = None
    ) -> datasets.ImageSet:
        """A set in the form that the network takes: its size, its channels."""
        channels, size, _ = self.loaded.record.shape
        return datasets.load(
            name, self.root, split=split, size=size, reduce=reduce, grey=channels == 1, count=count
        )

    def _images(self, which: OodSet) -> Tensor:
        """The images of a set, in a random order where some are set aside to tune on."""
        return self._shuffled(self.load(which.name, which.split, which.reduce, self.subset).images)

    def _shuffled(self, of_set: Tensor) -> Tensor:
        """What a set has for each image, in the order in which some are set aside to tune on."""
        if not self.tuning:
            return of_set
        return of_set[torch.randperm(len(of_set), generator=torch.Generator().manual_seed(0))]

    def _aside(self, images: Tensor) -> int:
        """How many images are set aside to tune on."""
        return min(TUNING, len(images) // 5) if self.tuning else 0

    def test_batches(self, which: OodSet) -> Batches:
        """The images to be judged."""
        images = self._images(which)
        return Batches(self.loaded, images[self._aside(images) :], None, self.batch)

    def tuning_batches(self, which: OodSet) -> Batches:
        """The images to tune on, none of which is judged."""
        images = self._images(which)
        return Batches(self.loaded, images[: self._aside(images)], None, self.batch)

    def fgsm_batches(self) -> list[Tensor]:
        """Adversarial examples of the in-distribution images to tune on, by their true classes."""
        labels = self.load(self.in_distribution, count=self.subset).labels
        if labels is None:
            raise InputError(f"{self.inside_title} has no labels: FGSM needs the true classes")
        inside = self.tuning_batches(self._inside)
        inside.labels = self._shuffled(labels)[: len(inside.images)]
        return [fgsm(self.network, images, true, scale=self.loaded.std) for images, true in inside]

    def training_batches(self, moved: bool = False) -> Batches:
        """The training images with their labels, mirrored and shifted at random or as they are."""
        began = time.monotonic()
        count = None if self.subset is None else 10 * self.subset
        train = self.load(self.in_distribution, "train", count=count)
        self.say(f"{self.inside_title}: {len(train):,} training images loaded", began)
        images = mirrored_and_shifted(train.images) if moved else train.images
        return Batches(self.loaded, images, train.labels, self.batch)

    def accuracy(self) -> float:
        """The share of in-distribution test images that the network gets right."""
        return self.accuracy_on(self.load(self.in_distribution, count=self.subset))

    def accuracy_on(self, test: datasets.ImageSet) -> float:
        """The share of in-distribution images that the network gets right."""
        if test.labels is None:
            raise InputError(f"{self.inside_title} has no labels")
        right = torch.zeros((), dtype=torch.int64)
        with torch.inference_mode():
            for images, labels in Batches(self.loaded, test.images, test.labels, self.batch):
                right += (self.network(images).argmax(1).cpu() == labels).sum()
        return float(right) / len(test)

    # --- cells ---------------------------------------------------------------------------------------

    def measure(self, methods: Sequence[MethodSpec], sets: Sequence[OodSet]) -> dict[str, Measured]:
        """What every method measures of the in-distribution test data, under its title, and of every set.

        Validation data that are a split of their own have the title `VALIDATION`. A set whose data are absent
        is left out. Only cells that are not finished are computed.
        """
        inside = [self._inside] if self._validation is None else [self._inside, self._validation]
        unfinished = {which: self._unfinished(methods, which) for which in (*inside, *sets)}
        # First of all: what is needed only for sets that are absent need not be fitted.
        unfinished = {
            which: missing for which, missing in unfinished.items() if not missing or self.present(which)
        }
        waiting = [m for m in methods if any(m in missing for missing in unfinished.values())]
        detectors = self._fitted(waiting) if waiting else {}
        for which, missing in unfinished.items():
            if missing:
                self._measure(which, missing, detectors)
        return {which.title: self._finished(methods, which) for which in unfinished}

    def evaluate(self, measured: Mapping[str, Measured], rules: Mapping[str, Rule]) -> Evaluation:
        """The figures of what `measure` found, or of what was made of it."""
        sets = {
            title: measurement
            for title, measurement in measured.items()
            if title not in (self.inside_title, VALIDATION)
        }
        return evaluate_measured(
            measured[self.inside_title], sets, rules, validation=measured.get(VALIDATION)
        )

    def is_outlying(self, which: OodSet) -> bool:
        """Whether a set is out-of-distribution for this network."""
        return True

    def present(self, which: OodSet) -> bool:
        """Whether a set can be loaded; if not, the reason is told."""
        began = time.monotonic()
        try:
            images = self._images(which)
        except MissingDataError as error:
            if which in (self._inside, self._validation):
                raise
            self.say(f"{which.title}: data not present ({error})")
            return False
        self.say(f"{which.title}: {len(images):,} images loaded", began)
        return True

    def _unfinished(self, methods: Sequence[MethodSpec], which: OodSet) -> list[MethodSpec]:
        """The methods whose cells are to be computed; all of them where there are no logits."""
        if not self.cells.has(*self._logits_cell(which)):
            return list(methods)
        return [m for m in methods if not self.cells.has(*self._cell(m, which))]

    def _measure(
        self, which: OodSet, methods: Sequence[MethodSpec], detectors: Mapping[str, Detector]
    ) -> None:
        began = time.monotonic()
        titles = [method.title for method in methods]
        chosen = {title: detectors[title] for title in titles}
        if self._together is None or self._together[0] != chosen:
            self._together = (chosen, Together(chosen))
        measured = self._together[1].measure(self.test_batches(which), which.title)
        if not self.cells.has(*self._logits_cell(which)):
            self.cells.keep(*self._logits_cell(which), {"logits": measured[titles[0]].logits})
        for method in methods:
            measurement = measured[method.title]
            self.cells.keep(
                *self._cell(method, which), {"values": measurement.values, "finite": measurement.finite}
            )
        self.say(f"{which.title}: judged by {_listed(titles)}", began)

    def _finished(self, methods: Sequence[MethodSpec], which: OodSet) -> Measured:
        """What the cells of a set hold. The logits are the same for all methods, and are held once."""
        kept = self._read(methods, which)
        damaged = [method for method in methods if method.title not in kept]
        if damaged:
            self._measure(which, damaged, self._fitted(damaged))
            kept = self._read(methods, which)
        return {method.title: kept[method.title] for method in methods}

    def _read(self, methods: Sequence[MethodSpec], which: OodSet) -> Measured:
        """What the cells of a set hold, but for those that are damaged."""
        shared = self.cells.read(*self._logits_cell(which))
        cells = {method.title: self.cells.read(*self._cell(method, which)) for method in methods}
        return {
            title: Measurement(cell["values"], shared["logits"], cell["finite"])
            for title, cell in cells.items()
            if cell is not None and shared is not None
        }

    def _cell(self, method: MethodSpec, which: OodSet) -> tuple[str, dict[str, Any]]:
        settings = {**self._settings(method), **_as_json(which), "form": FORM}
        return f"{self.loaded.name} {method.title} {which.title}", settings

    def _logits_cell(self, which: OodSet) -> tuple[str, dict[str, Any]]:
        return f"{self.loaded.name} logits {which.title}", {**self._shared_settings(), **_as_json(which)}

    def _settings(self, method: MethodSpec) -> dict[str, Any]:
        """What a fitted method depends on."""
        return {**self._shared_settings(), "method": method.as_json()}

    def _shared_settings(self) -> dict[str, Any]:
        """What all methods depend on."""
        return {
            "network": self.loaded.name,
            "weights": self.weights,
            "normalisation": [self.loaded.mean, self.loaded.std],
            "in_distribution": self.in_distribution,
            "subset": self.subset,
            "seed": 0,
            "set_aside": self.tuning,
        }

    # --- detectors -----------------------------------------------------------------------------------

    def _fitted(self, methods: Sequence[MethodSpec]) -> dict[str, Detector]:
        """The methods fitted, and tuned where they are to be, by title; from their files where there are."""
        plain = {self._file(m): m for m in (replace(method, tuned_on="") for method in methods)}
        waiting = [method for file, method in plain.items() if not file.exists()]
        if waiting:
            fresh = {m.title: m.make(self.network) for m in waiting}
            learning = any(detector.learns for detector in fresh.values())
            training: Batches | list[Any] = self.training_batches() if learning else []
            began = time.monotonic()
            fit_together(fresh, training)
            moved = {m.title: fresh[m.title] for m in waiting if m.moved}
            if moved:
                fit_together(moved, self.training_batches(moved=True))
            self.cells.folder.mkdir(parents=True, exist_ok=True)
            for method in waiting:
                fresh[method.title].save(self._file(method))
            self.say(f"{_listed(list(fresh))} fitted", began)
        return {method.title: self._tuned(method) for method in methods}

    def _file(self, method: MethodSpec) -> Path:
        return self.cells.path(f"{self.loaded.name} {method.title} fitted", self._settings(method))

    def _read_detector(self, method: MethodSpec) -> Detector:
        return method.detector_class.from_artifact(artifact.read(self._file(method)), self.network)

    def _tuned(self, method: MethodSpec) -> Detector:
        if not method.tuned_on or self._file(method).exists():
            return self._read_detector(method)
        began = time.monotonic()
        detector = self._read_detector(replace(method, tuned_on=""))
        assert isinstance(detector, ODIN | Mahalanobis)
        inside: Any = self.tuning_batches(self._inside)
        if method.tuned_on == FGSM:
            outside: Any = self.fgsm_batches()
        else:
            outside = self.tuning_batches(
                next(
                    ood_set for ood_set in ood_sets(self.in_distribution) if ood_set.title == method.tuned_on
                )
            )
        with _tensor_cores():
            if isinstance(detector, ODIN):  # most of the work is the same for every set
                if self._grid_inside is None:
                    self._grid_inside = detector.scores_on_grid(inside)
                inside = self._grid_inside
            detector.tune(inside, outside)
        detector.save(self._file(method))
        told = {name: getattr(detector, name) for name in detector.settings if name != "scale"}
        self.say(f"{method.title} tuned on {method.tuned_on}: {told}", began)
        return detector

    def say(self, text: str, began: float | None = None) -> None:
        """Tell what was done, and how long it took."""
        took = "" if began is None else f"{time.monotonic() - began:7.1f} s"
        self._say(f"{took:>9}  {text}")


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """Let a GPU compute in TF32, to search a grid of settings. What is judged is computed in full float32."""
    kinds: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [kind.allow_tf32 for kind in kinds]
    for kind in kinds:
        kind.allow_tf32 = True
    try:
        yield
    finally:
        for kind, allowed in zip(kinds, before, strict=True):
            kind.allow_tf32 = allowed


def mirrored_and_shifted(images: Tensor, seed: int = 0) -> Tensor:
    """Half of the images mirrored, all shifted by up to `PADDING` pixels, as in training: black comes in."""
    generator = torch.Generator().manual_seed(seed)
    mirrored = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    corners = torch.randint(0, 2 * PADDING + 1, (len(images), 2), generator=generator).tolist()
    height, width = images.shape[2:]
    padded = F.pad(torch.where(mirrored, images.flip(3), images), [PADDING] * 4)
    cuts = zip(padded, corners, strict=True)
    return torch.stack([image[:, y : y + height, x : x + width] for image, (y, x) in cuts])


def _listed(titles: Sequence[str], most: int = 4) -> str:
    return ", ".join(titles) if len(titles) <= most else f"{len(titles)} methods"


def _as_json(which: OodSet) -> dict[str, Any]:
    split = {} if which.split == "test" else {"split": which.split}
    return {"set": which.name, "reduce": which.reduce, **split}
