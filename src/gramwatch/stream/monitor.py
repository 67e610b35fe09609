"""Monitor: a stream of detections, and an alarm when the stream has changed.

The statistics are in `sequential`. This module connects them to a detector, counts which members and classes
drive the evidence, and saves the state.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gramwatch.detect.measurement import Calibrated, Detection
from gramwatch.errors import ArtifactError, GramwatchError, InputError, warn
from gramwatch.files import artifact
from gramwatch.files.artifact import Field
from gramwatch.guard.guard import MOST_CLASSES
from gramwatch.stream.sequential import (
    BINS,
    Evidence,
    FixedReference,
    Floats,
    Ints,
    OnlineRanks,
    PowerBets,
    grid_of,
)

Reference = Literal["online", "fixed"]
Draw = Literal["scores", "seed"]
"""The sources of the seed of lots and parts: the seed and the calibration scores, or the seed alone (version
0.1)."""
GRID_EXAMPLES = 100
"""The most calibration examples that set the grid and do not rank."""
POINTS = 1024
"""The number of points in the history."""


@dataclass(frozen=True)
class Driver:
    """The contribution of a part or a class to the evidence."""

    name: str | int
    """The name of a member, or the number of a predicted class."""
    images: int
    """Images since the change began, of this class."""
    flagged: int
    """The number of them that this part flags, `p <= 1 - level`. For a class: that the detector flags."""
    expected: float
    """The number expected without a change: `(1 - level) images`."""

    @property
    def excess(self) -> float:
        """The number of flagged images above the expected number."""
        return self.flagged - self.expected


class Monitor:
    """Watches a stream of detections and raises an alarm when it no longer looks like the calibration data.

    While nothing has changed, the mean number of images until a false alarm is at least
    `mean_time_to_false_alarm`, A. Within t images there is a false alarm with a probability of at most `t/A`.

    With `reference="online"`, each score is ranked among the calibration scores and the stream so far. This
    holds exactly, for any number of calibration examples, if calibration examples and ordinary images are
    exchangeable: drawn independently from the same source. Outliers that come from the first images on become
    part of what it is compared with. With `reference="fixed"`, scores are compared with the calibration
    examples only. Nothing becomes ordinary. The promise then holds for a share `confidence` of all
    calibration sets. docs/monitor.md says which to choose, and what breaks both.

    Example:
        >>> monitor = gramwatch.Monitor(guard)
        >>> for images in stream:
        ...     if monitor.update(guard(images)):
        ...         print(monitor)
        ...         break

    Args:
        detector: a calibrated guard, any other detector, or an `ExportedGuard`. With `per_class=True`, scores
            are ranked within groups of classes, and a changed mix of classes alone raises no alarm.
        mean_time_to_false_alarm: A, counted in images that are used.
        reference: what scores are compared with: `"online"` or `"fixed"`.
        every: use every n-th image only. Neighbouring frames of a video are not independent, and would raise
            false alarms.
        confidence: for `"fixed"`: the share of calibration sets for which the promise holds.
        replica: the number of this replica and the number of replicas, if several watch parts of one stream.
            Each ranks by its own part of the calibration scores. The mean of their `strength` has the
            promise, with time counted per replica.
        seed: for the lots that break ties, and for the choice of the examples that set the grid. Both are
            drawn by a hash of the seed and the calibration scores. Replicas have the same seed.

    """

    _draw: Draw = "scores"

    def __init__(
        self,
        detector: Calibrated,
        *,
        mean_time_to_false_alarm: float = 1_000_000,
        reference: Reference = "online",
        every: int = 1,
        confidence: float = 0.95,
        replica: tuple[int, int] = (0, 1),
        seed: int = 0,
    ) -> None:
        number, count = replica
        if not mean_time_to_false_alarm > 1:
            raise ValueError(f"mean_time_to_false_alarm must be above 1, got {mean_time_to_false_alarm}")
        if reference not in get_args(Reference):
            raise ValueError(f"reference must be 'online' or 'fixed', got {reference!r}")
        if every < 1 or seed < 0:
            raise ValueError(f"every must be at least 1 and seed at least 0, got {every} and {seed}")
        if not 0 < confidence < 1:
            raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
        if not 0 <= number < count:
            raise ValueError(f"replica must be a number from 0 and how many there are, got {replica}")
        self.mean_time_to_false_alarm = float(mean_time_to_false_alarm)
        self.reference: Reference = reference
        self.every, self.seed, self.confidence = int(every), int(seed), float(confidence)
        self.replica = (int(number), int(count))
        self.level = detector.level
        self._calibrate(detector)
        self._begin()

    # --- the reference -------------------------------------------------------------------------------

    def _calibrate(self, detector: Calibrated) -> None:
        """Copy from the detector the scores that stream scores are compared with."""
        calibration = detector.calibration()
        if calibration.rule.standardises and not calibration.how["split"]:
            warn("the detector was calibrated with split=False: no false-alarm rate of a monitor is promised")
        scores = calibration.scores[:, 0].double().cpu().numpy()
        order = scores.argsort(kind="stable")  # the order in the file must not decide
        scores = scores[order]
        self._group_of: Ints = calibration.ranks.group_of.cpu().numpy()
        groups = np.zeros(len(scores), np.int64)
        if len(self._group_of) > 1 and calibration.predicted is not None:
            groups = self._group_of[calibration.predicted.cpu().numpy()[order]]
        count = int(self._group_of.max()) + 1
        level = np.array([self.level])
        tolerance = float(calibration.tolerance[0])
        further = [self._group_of] if count > 1 else []
        further += [np.array([tolerance])] if tolerance else []  # older calibrations have none
        self._checksum = _checksum(level, scores, groups, *further)
        if self.reference == "fixed":
            self._fixed = FixedReference(np.bincount(groups, minlength=count), self.confidence)
            return
        drawn = np.random.default_rng(self._entropy).permutation(len(scores))
        kept = max(2, min(GRID_EXAMPLES, len(scores) // 10))
        ranking = drawn[kept:][self.replica[0] :: self.replica[1]]
        self._grid = grid_of(scores[drawn[:kept]], tolerance)
        counts = np.zeros((1, count, BINS), np.int64)
        np.add.at(counts[0], (groups[ranking], self._bins(scores[ranking])), 1)
        self._ranks = OnlineRanks(counts)
        self._examples = len(ranking)

    def _redraw(self, detector: Calibrated, draw: Draw) -> None:
        """Continue the draw that a file began. Say if its promise is weaker."""
        self._draw = draw
        self._calibrate(detector)
        self._begin()
        if self.reference == "online":
            warn(
                "the monitor was begun by an earlier version and goes on as it was begun. It was drawn by "
                "the seed alone, so false alarms may be more frequent than promised: a new monitor has the "
                "promise"
            )

    def _bins(self, scores: Floats) -> Ints:
        return np.searchsorted(self._grid, scores)

    def _begin(self) -> None:
        """Start without any image."""
        self._bets = PowerBets()
        self._evidence = Evidence(1, self._number_of_bets)
        self._history = History()
        self._alarm: Alarm | None = None
        self.seen = 0
        """The number of images so far, used or not."""
        self._names: tuple[str, ...] = ()
        self._parts: Ints = np.zeros((self._number_of_bets, 0), np.int64)  # flagged, by bet and part
        self._classes: Ints = np.zeros((self._number_of_bets, 0, 2), np.int64)  # images and flagged
        self._random = self._lots(0)
        self._torn = False  # true while a part of a batch is taken in

    def _check_whole(self) -> None:
        if self._torn:
            raise GramwatchError(
                "an update of this monitor was interrupted, and a part of its batch is taken in: load the "
                "last saved state, or make a new monitor"
            )

    @property
    def _number_of_bets(self) -> int:
        return PowerBets.count if self.reference == "online" else FixedReference.count

    @property
    def _entropy(self) -> list[int]:
        """The seed of the draws of parts and lots.

        Parts are drawn from sorted scores. With the seed alone, all monitors of a size would take out the
        same order statistics. The rest would not be exchangeable with the stream. Lots would not be uniform
        if all monitors had the same ones. The checksum makes both as good as random over calibration sets.
        """
        return [self.seed, int(self._checksum, 16)] if self._draw == "scores" else [self.seed]

    def _lots(self, used: int) -> np.random.Generator:
        """The random numbers after `used` images. They follow from the seed and the calibration."""
        bits = np.random.PCG64(np.random.SeedSequence([*self._entropy, self.replica[0]]))
        return np.random.Generator(bits.advance(used))

    # --- the stream ----------------------------------------------------------------------------------

    def update(self, detection: Detection) -> bool:
        """Take in the detections of a batch, in their order. Return whether there is an alarm."""
        self._check_whole()
        self._know(detection)
        used = slice(-self.seen % self.every, None, self.every)
        scores, p_values = _array(detection.score)[used], _array(detection.p_value)[used]
        predicted = detection.predicted.cpu().numpy()[used]
        groups = self._group_of[predicted] if len(self._group_of) > 1 else np.zeros_like(predicted)
        flagged = detection.is_ood.cpu().numpy()[used]
        limit = (1 - self.level) * (1 + 1e-9)  # 1 - 0.9 is rounded to less than 0.1
        parts = np.array([_array(part)[used] <= limit for part in (detection.parts or {}).values()])
        parts = parts.reshape(len(self._names), len(scores)).T.astype(np.int64)
        self._torn = True
        for i, bets in enumerate(self._bets_of(scores, p_values, groups)):
            fresh = self._evidence.add(bets)[0]
            self._count(fresh, int(predicted[i]), bool(flagged[i]), parts[i])
            self._history.add(self.strength, bool(flagged[i]))
            if self._alarm is None and self.strength >= self.mean_time_to_false_alarm:
                self._alarm = Alarm(self._evidence.time, self._start, self._best)
        self.seen += len(detection)
        self._torn = False
        return self.alarm

    def _bets_of(self, scores: Floats, p_values: Floats, groups: Ints) -> Iterator[Floats]:
        """The bets of the images of a batch, one after the other, `(1, J)` each."""
        if self.reference == "fixed":
            yield from self._fixed(p_values, groups)[:, None]
            return
        bins, lots = self._bins(scores), 1 - self._random.random(len(scores))
        for i in range(len(scores)):
            image = slice(i, i + 1)
            yield self._bets(self._ranks.rank(bins[image], groups[image], lots[image]))

    def _know(self, detection: Detection) -> None:
        """At the first batch, note the parts and the number of classes. Later ones must have the same."""
        names, classes = tuple(detection.parts or {}), detection.logits.shape[1]
        if not self.seen:
            self._names = names
            self._parts = np.zeros((self._number_of_bets, len(names)), np.int64)
            self._classes = np.zeros((self._number_of_bets, classes, 2), np.int64)
        if names != self._names or classes != self._classes.shape[1]:
            raise InputError(
                f"these detections have the parts {list(names)} and {classes} classes, earlier ones had "
                f"{list(self._names)} and {self._classes.shape[1]}: a monitor watches one detector"
            )

    def _count(self, fresh: NDArray[np.bool_], predicted: int, flagged: bool, parts: Ints) -> None:
        """Count flagged images for each bet since its last restart. An alarm ends the restarts."""
        if self._alarm is None:
            self._parts[fresh] = 0
            self._classes[fresh] = 0
        self._parts += parts
        self._classes[:, predicted] += (1, flagged)

    def restart(self) -> None:
        """Forget the evidence and the alarm, not the images: ranks go on, and the promise holds anew.

        After a true alarm, the images since the change are part of what `"online"` compares with. Make a new
        monitor then.
        """
        self._evidence = Evidence(1, self._number_of_bets, self._evidence.time)
        self._alarm = None
        self._parts[:] = 0
        self._classes[:] = 0

    # --- what is known -------------------------------------------------------------------------------

    @property
    def alarm(self) -> bool:
        """Whether the strength has reached `mean_time_to_false_alarm`, now or earlier."""
        return self._alarm is not None

    @property
    def alarm_at(self) -> int | None:
        """The number of images until the alarm, its own included; None without an alarm."""
        return None if self._alarm is None else (self._alarm.at - 1) * self.every + 1

    @property
    def strength(self) -> float:
        """The evidence, R. At `mean_time_to_false_alarm` it raises the alarm.

        Without a change its mean is the number of images so far. Most of the time it is far below.
        """
        return float(self._evidence.strength[0])

    @property
    def _best(self) -> int:
        """The bet with the most evidence, at the alarm if there is one."""
        return self._alarm.bet if self._alarm is not None else int(self._evidence.sums[0].argmax())

    @property
    def _start(self) -> int:
        return self._alarm.start if self._alarm is not None else int(self._evidence.starts[0, self._best])

    @property
    def since(self) -> int:
        """The number of images before the change, by the strongest bet, whose gain began there (CUSUM).

        This is an estimate. Without an alarm it says little.
        """
        return self._start * self.every

    @property
    def parts(self) -> list[Driver]:
        """The flagged images of each member of a guard since the change, largest excess first."""
        images, flagged = self._evidence.time - self._start, self._parts[self._best]
        return self._drivers(self._names, [images] * len(flagged), flagged)

    @property
    def classes(self) -> list[Driver]:
        """The flagged images of each predicted class since the change, largest excess first."""
        images, flagged = self._classes[self._best].T
        seen = images.nonzero()[0]
        return self._drivers(seen.tolist(), images[seen], flagged[seen])

    def _drivers(
        self, names: Sequence[str | int], images: Iterable[int], flagged: Iterable[int]
    ) -> list[Driver]:
        rate = 1 - self.level
        rows = [
            Driver(name, int(n), int(k), rate * int(n))
            for name, n, k in zip(names, images, flagged, strict=True)
        ]
        return sorted(rows, key=lambda row: -row.excess)

    def __repr__(self) -> str:
        state = f"{self.seen:,} images, strength {self.strength:.3g} of {self.mean_time_to_false_alarm:.3g}"
        if self._alarm is None:
            return f"Monitor({self.reference}: {state}, no alarm)"
        leading = ", ".join(
            f"{kind} {rows[0].name} flags {rows[0].flagged:,} of {rows[0].images:,} "
            f"({rows[0].expected:.3g} expected)"
            for kind, rows in (("part", self.parts), ("class", self.classes))
            if rows
        )
        return (
            f"Monitor({self.reference}: {state}, ALARM at image {self.alarm_at:,}, "
            f"change after about {self.since:,}; {leading})"
        )

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the strength and the share of flagged images over time."""
        from gramwatch.stream.picture import draw_stream

        time, strength, share = self._history.curves()
        draw_stream(
            path,
            time * self.every,
            strength,
            share,
            alarm_level=self.mean_time_to_false_alarm,
            rate=1 - self.level,
            alarm_at=self.alarm_at,
            since=self.since if self.alarm else None,
        )

    # --- save and load -------------------------------------------------------------------------------

    def settings_as_json(self) -> dict[str, Any]:
        """The arguments of the constructor, without the detector."""
        return {
            "mean_time_to_false_alarm": self.mean_time_to_false_alarm,
            "reference": self.reference,
            "every": self.every,
            "confidence": self.confidence,
            "replica": list(self.replica),
            "seed": self.seed,
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to one safetensors file. The file replaces an older one whole or not at all."""
        self._check_whole()
        header = {
            "monitor": self.settings_as_json() | {"draw": self._draw},
            "calibration": self._checksum,
            "seen": self.seen,
            "stride": self._history.stride,
            "parts": list(self._names),
            "classes": self._classes.shape[1],
            "alarm": None if self._alarm is None else vars(self._alarm),
        }
        tensors = {name: torch.from_numpy(value) for name, value in self._arrays().items() if value.size}
        artifact.write(path, header, tensors)

    @classmethod
    def load(cls, path: str | PathLike[str], detector: Calibrated) -> "Monitor":
        """Read a saved monitor. It goes on as if it had never stopped. Nothing in the file is executed.

        The detector must have the calibration that it had then.
        """
        detector.calibration()  # raises the error that says what is missing
        saved = artifact.opened(path)
        header = saved.header
        with artifact.reading(saved.path):
            if "monitor" not in header:
                raise ArtifactError("it holds no monitor")
            settings = dict(header["monitor"])
            draw = settings.pop("draw", "seed")
            artifact.check_types({"draw": draw}, draw=Draw)
            artifact.check_settings(cls, settings)
            monitor = cls(detector, **{**settings, "replica": tuple(settings["replica"])})
            if header["calibration"] != monitor._checksum:
                raise ArtifactError("it was begun with a detector of another calibration: make a new monitor")
            if draw != monitor._draw:
                monitor._redraw(detector, draw)
            shapes = monitor._described(header)
        tensors = saved.tensors(shapes)
        with artifact.reading(saved.path):
            monitor._restore(header, tensors)
        return monitor

    @property
    def _used(self) -> int:
        """How many of the images so far were used."""
        return -(-self.seen // self.every)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """The state, by the names in a file. An empty array is not written."""
        arrays: dict[str, NDArray[Any]] = {
            "sums": self._evidence.sums,
            "gains": self._evidence.gains,
            "starts": self._evidence.starts,
            "history.strength": self._history.strength,
            "history.flagged": self._history.flagged,
            "parts": self._parts,
            "classes": self._classes,
        }
        if self.reference == "online":
            arrays["counts"] = self._ranks.counts[0].copy()
        return arrays

    def _described(self, header: Mapping[str, Any]) -> artifact.Shapes:
        """The fields of the tensors that a file must hold."""
        artifact.check_types(
            header, seen=int, stride=int, parts=list[str], classes=int, alarm=dict[str, int] | None
        )
        seen, stride, classes = (header[name] for name in ("seen", "stride", "classes"))
        bets = self._number_of_bets
        if not 0 <= seen < 2**62 or not 0 <= classes <= MOST_CLASSES:
            raise ValueError(f"it has seen {seen} images of {classes} classes")
        used = -(-seen // self.every)
        if stride < 1 or stride & (stride - 1) or used > POINTS * stride:
            raise ValueError(f"its history has a point for {stride} images")
        if header["alarm"] is not None:
            _check_alarm(header["alarm"], used, bets)
        upto, positive = artifact.within(0, used), artifact.NOT_NEGATIVE
        shapes = {
            "sums": Field((1, bets), torch.float64, positive),
            "gains": Field((1, bets), torch.float64, positive),
            "starts": Field((1, bets), torch.int64, upto),
            "history.strength": Field((POINTS,), torch.float64, positive),
            "history.flagged": Field((POINTS,), torch.int64, upto),
        }
        if header["parts"]:
            shapes["parts"] = Field((bets, len(header["parts"])), torch.int64, upto)
        if classes:
            shapes["classes"] = Field((bets, classes, 2), torch.int64, upto)
        if self.reference == "online":
            highest = artifact.within(0, used + self._examples)
            shapes["counts"] = Field((self._ranks.counts.shape[1], BINS), torch.int64, highest)
        return shapes

    def _restore(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        self.seen, self._names = header["seen"], tuple(header["parts"])
        self._evidence.sums, self._evidence.gains = arrays["sums"], arrays["gains"]
        self._evidence.starts, self._evidence.time = arrays["starts"], self._used
        self._history = History(header["stride"], arrays["history.strength"], arrays["history.flagged"])
        self._history.time = self._used
        self._parts = arrays.get("parts", self._parts)
        self._classes = arrays.get("classes", self._classes)
        self._alarm = None if header["alarm"] is None else Alarm(**header["alarm"])
        self._random = self._lots(self._used)
        if self.reference == "online":
            if int(arrays["counts"].sum()) != self._used + self._examples:
                raise ValueError("its counts are not those of its images")
            self._ranks = OnlineRanks(arrays["counts"][None])


@dataclass(frozen=True)
class Alarm:
    """The moment of an alarm, in images that were used."""

    at: int
    """The number of images, with the one that raised it."""
    start: int
    """The number of images before the change, estimated."""
    bet: int
    """The bet with the most evidence."""


class History:
    """The strength and the number of flagged images over time, in a constant number of points.

    A point stands for `stride` images. When all points are taken, neighbours are joined and the stride
    doubles.
    """

    def __init__(self, stride: int = 1, strength: Floats | None = None, flagged: Ints | None = None) -> None:
        self.stride = stride
        self.strength: Floats = np.zeros(POINTS) if strength is None else strength
        """The highest strength of each point."""
        self.flagged: Ints = np.zeros(POINTS, np.int64) if flagged is None else flagged
        """How many images of each point were flagged."""
        self.time = 0
        """The number of images so far."""

    def add(self, strength: float, flagged: bool) -> None:
        """Take in one image."""
        if self.time == POINTS * self.stride:
            self.strength = _joined(np.maximum(self.strength[0::2], self.strength[1::2]))
            self.flagged = _joined(self.flagged[0::2] + self.flagged[1::2])
            self.stride *= 2
        point = self.time // self.stride
        self.strength[point] = max(self.strength[point], strength)
        self.flagged[point] += flagged
        self.time += 1

    def curves(self) -> tuple[Ints, Floats, Floats]:
        """The number of images, the highest strength and the share of flagged images at each point."""
        points = -(-self.time // self.stride)
        ends = np.minimum(np.arange(1, points + 1) * self.stride, self.time)
        images = np.diff(ends, prepend=0)
        return ends, self.strength[:points], self.flagged[:points] / images


def _joined(half: NDArray[Any]) -> NDArray[Any]:
    """The points of the first half, and room for as many more."""
    return np.concatenate([half, np.zeros_like(half)])


def _check_alarm(alarm: Mapping[str, int], used: int, bets: int) -> None:
    if alarm.keys() != {"at", "start", "bet"}:
        raise ValueError("its alarm is not described")
    if not 0 <= alarm["start"] < alarm["at"] <= used or not 0 <= alarm["bet"] < bets:
        raise ValueError(f"its alarm is {dict(alarm)}")


def _array(values: Tensor) -> Floats:
    array: Floats = values.detach().double().cpu().numpy()
    return array


def _checksum(*arrays: NDArray[Any]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
