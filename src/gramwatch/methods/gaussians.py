"""Normal distributions of the classes at every tap: running sums, covariances, distances, explanations.

The methods that measure Mahalanobis distances share this: `mahalanobis`, `unit_mahalanobis`, `profile` and
their kin. The equations are those of Lee et al. (2018).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from gramwatch.detect.parts import Shares
from gramwatch.errors import InputError, NotFittedError
from gramwatch.files.artifact import FINITE, NOT_NEGATIVE, POSITIVE, Field
from gramwatch.methods.base import Method
from gramwatch.methods.features import TINY, features_of
from gramwatch.observe.needs import Needs
from gramwatch.observe.observation import Observation
from gramwatch.observe.plan import Plan
from gramwatch.watch import Tap

COPIED = 2**23
"""So many numbers of covariances are inverted at once."""


class ClassDistances(Method):
    """Distances to the nearest class mean at every tap, with one covariance for all classes.

    The fit keeps running sums and no examples. Fitting again adds to the sums. Two detectors can be merged.
    """

    looks_at = frozenset({"channel_means"})
    """What is compared with the classes: the channel means of all taps, or the penultimate features."""
    running = True
    which: ClassVar[tuple[int | None, int | None]] = (None, None)
    """Which of the taps count, as the bounds of a slice. If none is left, all taps count."""
    unit: ClassVar[bool] = False
    """Whether features are scaled to length one."""
    classes_by: ClassVar[Literal["labels", "predictions", "none"]] = "labels"
    """The classes of training examples: labels if the loader has them, else predictions; predictions; or one
    class for all."""
    kept: ClassVar = {
        "widths_": Field(("taps",), torch.int64, POSITIVE),
        "counts_": Field(("all classes",), torch.float64, NOT_NEGATIVE, optional=True),
        "sums_": Field(("sums",), torch.float64, FINITE, optional=True),
        "products_": Field(("products",), torch.float64, FINITE, optional=True),
        "ranks_": Field(("taps",), torch.int64, NOT_NEGATIVE),
        "classes_": Field(("classes",), torch.int64, NOT_NEGATIVE),
        "origins_": Field(("channels",), torch.float64, FINITE),
        "whitening_": Field(("whitening",), torch.float64, FINITE),
        "centres_": Field(("centres",), torch.float64, FINITE),
    }

    widths_: Tensor | None
    """The channels of each tap."""
    counts_: Tensor | None
    """The number of examples of each class."""
    sums_: Tensor | None
    """The sums of each class and tap, about the origin of the tap, one tap after the other."""
    products_: Tensor | None
    """The sums of outer products of each tap, `(width, width)`, about its origin, likewise."""
    ranks_: Tensor | None
    """The ranks of the covariances."""
    classes_: Tensor | None
    """The classes of the training data."""
    origins_: Tensor | None
    """The origins of the taps, one after the other."""
    whitening_: Tensor | None
    """W of each tap, `(width, rank)`, one after the other."""
    centres_: Tensor | None
    """The whitened class means of each tap, `(classes, rank)`, one after the other."""

    @property
    def needs(self) -> Needs:
        """The channel means at the taps that count."""
        return replace(super().needs, mean_taps=self.which)

    def _begin(self) -> None:
        self._sums: _Sums | None = None
        self._cached: _Fitted | None = None
        super()._begin()

    # --- fit -----------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def take(self, observation: Observation) -> Tensor | int:
        """Add one batch of training examples to the sums. Examples that are not finite are left out.

        After the first batch with a finite example, this does not wait for a GPU.
        """
        finite = observation.finite
        if self._sums is None and finite is not None and not finite.any():
            return len(observation)
        taps, logits = self._compared(observation), observation.logits
        features = by_width(taps, self.unit)
        classes = observation.classes if self.classes_by == "labels" else observation.predicted
        if self.classes_by == "none":
            classes = classes.new_zeros(len(classes))
        if self._sums is None:
            known = 1 if self.classes_by == "none" else logits.shape[1]
            widths = [means.shape[1] for means in taps]
            self._sums = self._seen(logits.device) or _Sums.begun(widths, features, finite, known)
        self._sums.add(features, classes, finite, given=classes is observation.labels)
        return 0 if finite is None else (~finite).sum()

    @torch.inference_mode(False)
    @torch.no_grad()
    def finish(self, left_out: int = 0) -> None:
        """Compute class means and covariances from the sums."""
        sums = self._sums or self._seen(torch.device("cpu"))
        if sums is None:
            raise InputError(f"{self.name} has seen no finite training example: there is nothing to fit")
        self._keep(sums)
        self._sums, self._cached = None, None
        present = (sums.counts > 0).nonzero().flatten()
        fitted = sums.whitened(present)
        self.ranks_ = torch.tensor([whitening.shape[1] for whitening, _ in fitted])
        self.classes_ = present
        self.whitening_ = torch.cat([whitening.flatten() for whitening, _ in fitted])
        self.centres_ = torch.cat([centres.flatten() for _, centres in fitted])
        self._fitted = True

    @property
    def says_nothing(self) -> str:  # type: ignore[override]
        """The reason why every input gets the same score: training examples do not differ. Else empty."""
        if self.ranks_ is None or self.ranks_.any():
            return ""
        return (
            f"{self.name}: the training examples do not differ from their class means, so that there is no "
            "covariance. At least one class needs two examples that differ"
        )

    def _keep(self, sums: "_Sums") -> None:
        """Keep the sums in the form of the file, on their device."""
        sums.check()
        self.widths_, self.counts_ = torch.tensor(sums.widths), sums.counts.clone()
        self.origins_ = _side_by_side((group.taps, group.origins) for group in sums.groups)
        self.sums_ = _side_by_side((group.taps, group.by_class) for group in sums.groups)
        self.products_ = _side_by_side((group.taps, group.products) for group in sums.groups)

    def _seen(self, device: torch.device) -> "_Sums | None":
        """The kept sums on a device. None before the first batch."""
        if self.widths_ is None:
            return None
        if self.counts_ is None or self.sums_ is None or self.products_ is None or self.origins_ is None:
            raise InputError(
                f"{self.name} was saved without its sums, so nothing can be added: fit a new one"
            )
        widths, classes = self.widths_.tolist(), len(self.counts_)
        by_tap = zip(
            self.origins_.split(widths),
            self.sums_.split([classes * width for width in widths]),
            self.products_.split([width * width for width in widths]),
            strict=True,
        )
        parts, groups = list(by_tap), []
        for width, taps in _taps_by_width(widths).items():
            origins, sums, products = (
                torch.stack(stack).to(device) for stack in zip(*(parts[tap] for tap in taps), strict=True)
            )
            shape = len(taps), -1, width
            groups.append(_Group(taps, origins, sums.view(shape), products.view(shape)))
        return _Sums(widths, self.counts_.to(device, copy=True), groups)

    def state(self) -> dict[str, Tensor]:
        """The fitted tensors by name. During a fit they include the sums so far."""
        if self._sums is not None:
            self._keep(self._sums)
        return super().state()

    def _check_state(self) -> None:
        if self.widths_ is None:
            return
        widths: list[int] = self.widths_.tolist()
        ranks: list[int] = widths if self.ranks_ is None else self.ranks_.tolist()
        present = 0 if self.classes_ is None else len(self.classes_)
        classes = 0 if self.counts_ is None else len(self.counts_)
        pairs = list(zip(widths, ranks, strict=True))
        wanted = {
            "origins_": sum(widths),
            "sums_": classes * sum(widths),
            "products_": sum(width * width for width in widths),
            "whitening_": sum(width * rank for width, rank in pairs),
            "centres_": present * sum(ranks),
        }
        for name, size in wanted.items():
            tensor = getattr(self, name)
            if tensor is not None and len(tensor) != size:
                raise ValueError(f"{name} has {len(tensor):,} numbers, not {size:,}")
        if any(rank > width for width, rank in pairs) or (self.ranks_ is not None and not present):
            raise ValueError("its covariance has more directions than channels, or there is no class")

    def _merge(self, other: Any) -> None:
        self.add_unfinished(other)
        self.finish()

    @torch.inference_mode(False)
    @torch.no_grad()
    def add_unfinished(self, other: Method) -> None:
        """Add the sums of another detector. Class means and covariances wait for `finish`."""
        assert isinstance(other, ClassDistances)
        mine = self._sums or self._seen(torch.device("cpu"))
        theirs = other._seen(torch.device("cpu") if mine is None else mine.counts.device)
        if theirs is None or mine is None:  # one of them has seen no finite example
            self._sums = mine or theirs
            return
        if mine.widths != theirs.widths:
            raise InputError(f"{self.name}: the two were fitted on other taps")
        mine.join(theirs)
        self._sums = mine

    def take_over(self, before: Method) -> None:
        """Continue from the sums of another detector."""
        self._sums = None
        super().take_over(before)

    # --- judge ---------------------------------------------------------------------------------------

    def _fitted_on(self, device: torch.device, taps: Sequence[Tensor] | None = None) -> "_Fitted":
        """The fitted distributions of all taps on a device. The copy is kept there.

        Args:
            device: the device.
            taps: what is compared with them. Another number of taps or channels is an error.

        """
        fitted = self._cached
        if fitted is None or fitted.device != device or fitted.whitening is not self.whitening_:
            self._cached = fitted = self._copied_to(device)
        if taps is not None and [means.shape[1] for means in taps] != fitted.widths:
            now, then = [means.shape[1] for means in taps], fitted.widths
            raise InputError(
                f"{self.name} was fitted on {len(then)} tap(s) with {sum(then)} channels in all, {len(now)} "
                f"tap(s) with {sum(now)} channels were given. Taps are found at the first batch: give "
                "a first batch of a size that the fit saw"
            )
        return fitted

    @torch.inference_mode(False)
    def _copied_to(self, device: torch.device) -> "_Fitted":
        """The fitted distributions of all taps, from the kept tensors."""
        if self.widths_ is None or self.ranks_ is None or self.classes_ is None:
            raise NotFittedError(f"{self.name} is not fitted: call detector.fit(train_loader) first")
        assert self.origins_ is not None
        assert self.whitening_ is not None
        assert self.centres_ is not None
        widths, ranks, classes = self.widths_.tolist(), self.ranks_.tolist(), len(self.classes_)
        sizes = [width * rank for width, rank in zip(widths, ranks, strict=True)]
        expected = _usable(self.ranks_.clamp_min(1).double(), device)
        by_tap = zip(
            _usable(self.origins_, device).split(widths),
            _usable(self.whitening_, device).split(sizes),
            _usable(self.centres_, device).split([classes * rank for rank in ranks]),
            expected,
            ranks,
            strict=True,
        )
        gaussians = [
            Gaussian.of(origin, whitening.view(len(origin), rank), centres.view(classes, rank), of_tap)
            for origin, whitening, centres, of_tap, rank in by_tap
        ]
        return _Fitted(device, self.whitening_, widths, gaussians, expected)

    def _compared(self, observation: Observation) -> Sequence[Tensor]:
        """The tensors that are compared with the classes, `(N, width)` for each tap."""
        if "features" in self.looks_at:
            return (features_of(observation, self.name),)
        return observation.channel_means

    def _at_taps(self, observation: Observation, which: slice = slice(None)) -> "list[_AtTap]":
        """The features of a batch at each tap, or at some, and their distances from the classes."""
        taps, at_taps = self._compared(observation), []
        fitted = self._fitted_on(observation.logits.device, taps)
        for means, gaussian in zip(taps[which], fitted.gaussians[which], strict=True):
            features = means.double()
            length: Tensor | None = None
            if self.unit:
                length = torch.linalg.vector_norm(features, dim=1, keepdim=True)
                features = features / length.clamp_min(TINY)
            # Few operations: on a GPU each one costs a launch.
            white = torch.addmm(gaussian.shift, features, gaussian.whitening)
            parts = torch.addmm(gaussian.squares, white, gaussian.points.T, alpha=-2)
            squared = (parts + white.square().sum(1, keepdim=True)).clamp_min(0)
            at_taps.append(_AtTap(gaussian, features, length, squared[:, :-1].amin(1), squared[:, -1]))
        return at_taps

    def distances(self, observation: Observation) -> Tensor:
        """The distance of each example to the nearest class at each tap, `(N, taps)`; Eq. 2 without sign."""
        return torch.stack([at_tap.nearest for at_tap in self._at_taps(observation)], 1)

    def _over_expectation(self, distances: Tensor) -> Tensor:
        """The distances at each tap, `(N, taps)`, divided by their expectation.

        On training data, the mean squared distance of an example to its own class is the trace of S^-1 S.
        That is the rank.
        """
        return distances / self._fitted_on(distances.device).expected

    # --- explain -------------------------------------------------------------------------------------

    sees = "features"

    def term_taps(self, plan: Plan) -> tuple[Tap, ...]:
        """The taps that count."""
        return tuple(plan.taps_of(self.needs) or ())

    def shares_at(self, observation: Observation, rule: Any, example: int, tap: int) -> Shares:
        """What channels add to the squared distance at a tap: `d_i (S^-1 d)_i`, which may be negative."""
        if self.sums_ is None or self.counts_ is None or self.widths_ is None or self.origins_ is None:
            raise InputError(f"{self.name} was saved without its sums: its channels cannot be explained")
        (at_tap,) = self._at_taps(observation[example : example + 1], slice(tap, tap + 1))
        gaussian, features = at_tap.gaussian, at_tap.features
        number, difference = gaussian.nearest(features)
        assert self.classes_ is not None
        nearest = int(self.classes_[int(number)])
        count, widths = self.counts_[nearest], self.widths_.tolist()
        sums = self.sums_.split([len(self.counts_) * width for width in widths])[tap]
        offset = sums.view(len(self.counts_), -1)[nearest] / count.clamp_min(1)
        mean = (self.origins_.split(widths)[tap] + offset).to(features)
        pull = difference @ gaussian.whitening.T
        amount = ((features - mean) * pull).flatten().cpu()
        return Shares(
            amount=amount,
            channel=torch.arange(len(amount)),
            of=["distance"] * len(amount),
            value=features.flatten().cpu(),
            low=mean.cpu(),
            high=mean.cpu(),
            examples=int(count),
        )

    def unusual_at(self, observation: Observation, tap: int, maps: Tensor) -> Tensor:
        """How much further than the median pixel each pixel lies from the nearest class of its image.

        The distance of a pixel is that of its activations, in place of the channel means.
        """
        features = observation.channel_means[tap].double()
        gaussian = self._fitted_on(features.device).gaussians[tap]
        white = gaussian.whitening.T.to(maps) @ maps  # as large as the maps: changed in place
        if self.unit:
            length = features.norm(dim=1, keepdim=True).clamp_min(TINY)
            features = features / length
            white.div_(length.unsqueeze(2).to(maps))
        nearest, _ = gaussian.nearest(features)
        white.add_((gaussian.shift - gaussian.points[nearest]).unsqueeze(2).to(maps))
        distance = white.square_().sum(1)
        return (distance - distance.median(1, keepdim=True).values).clamp_min(0)


class Gaussian(NamedTuple):
    """The classes at one tap: normal distributions with one covariance S, whitened by W, W W^T = S^-1."""

    shift: Tensor
    """Minus the origin of the centres, whitened, `(rank,)`."""
    whitening: Tensor
    """W, `(width, rank)`."""
    points: Tensor
    """The whitened class means, and in the last row their mean, `(classes + 1, rank)`."""
    squares: Tensor
    """The squared lengths of the points, `(classes + 1,)`."""
    expected: Tensor
    """The squared distance to expect, a scalar."""

    @staticmethod
    def of(origin: Tensor, whitening: Tensor, centres: Tensor, expected: Tensor) -> "Gaussian":
        """From the kept tensors. The centres are relative to the origin."""
        points = torch.cat([centres, centres.mean(0, keepdim=True)])
        return Gaussian(-(origin @ whitening), whitening, points, points.square().sum(1), expected)

    def nearest(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the nearest class `(N,)`, and the whitened difference from its mean, `(N, rank)`."""
        white = torch.addmm(self.shift, features, self.whitening)
        nearest = torch.addmm(self.squares, white, self.points.T, alpha=-2)[:, :-1].argmin(1)
        return nearest, white - self.points[nearest]


class _AtTap(NamedTuple):
    """The features of a batch at one tap."""

    gaussian: Gaussian
    """The classes, as the features see them."""
    features: Tensor
    """`(N, width)`, float64."""
    length: Tensor | None
    """The length of the features before they were scaled to length one, `(N, 1)`. None: they were not."""
    nearest: Tensor
    """The squared distance to the nearest class, `(N,)`."""
    middle: Tensor
    """The squared distance to the middle of all classes, `(N,)`."""


class _Fitted(NamedTuple):
    """The tensors that judging needs, on a device."""

    device: torch.device
    whitening: Tensor
    """The fitted tensor that `gaussians` was computed from. Another tensor there means another fit."""
    widths: list[int]
    """The channels of each tap."""
    gaussians: list[Gaussian]
    """One for each tap."""
    expected: Tensor
    """The squared distance to expect at each tap, `(taps,)`."""


class _Group(NamedTuple):
    """Running sums of all taps of one width, in one tensor each: on a GPU, every launch costs time."""

    taps: list[int]
    """The numbers of the taps."""
    origins: Tensor
    """`(taps, width)`"""
    by_class: Tensor
    """The sums of each class, `(taps, classes, width)`."""
    products: Tensor
    """The sums of outer products, `(taps, width, width)`."""

    def add(self, features: Tensor, classes: Tensor, kept: Tensor | None) -> None:
        """Take in one batch: features `(taps, N, width)`, classes `(N,)`, and which examples count."""
        centred = features - self.origins.unsqueeze(1)
        if kept is not None:
            centred = torch.where(kept.unsqueeze(1), centred, 0)
        if self.by_class.shape[1] == 1:
            self.by_class.add_(centred.sum(1, keepdim=True))
        else:
            self.by_class.index_add_(1, classes, centred)
        self.products.baddbmm_(centred.transpose(1, 2), centred)

    def join(self, other: "_Group", counts: Tensor) -> None:
        """Add the sums of another fit, which has other origins. `counts` are its examples by class."""
        moved = other.origins - self.origins
        across = other.by_class.sum(1).unsqueeze(2) * moved.unsqueeze(1)
        both = counts.sum() * moved.unsqueeze(2) * moved.unsqueeze(1)
        self.by_class.add_(other.by_class + counts.unsqueeze(1) * moved.unsqueeze(1))
        self.products.add_(other.products + across + across.transpose(1, 2) + both)

    def whitened(self, counts: Tensor, present: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each tap, the inverse root of the covariance about the class means, and the whitened means."""
        at_once = max(1, COPIED // self.products[0].numel())
        parts = (t.split(at_once) for t in (self.origins, self.by_class, self.products))
        for origins, by_class, products in zip(*parts, strict=True):
            yield from whitened(origins, by_class[:, present], products, counts[present])


def whitened(
    origins: Tensor, by_class: Tensor, products: Tensor, counts: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Eq. 1 for taps of the same width: `(width, rank)` and `(classes, rank)` for each tap."""
    total, width = counts.sum(), origins.shape[1]
    means = by_class / counts.unsqueeze(1)
    about_origin = products / total
    covariance = about_origin - (means.transpose(1, 2) * (counts / total)) @ means
    covariance = (covariance + covariance.transpose(1, 2)) / 2
    # Smaller eigenvalues are rounding errors, of the sums in float64 or of the features in float32.
    variances = about_origin.diagonal(dim1=1, dim2=2)
    size = (variances + origins.square()).amax(1)
    rounding = width * torch.finfo(torch.float64).eps * variances.sum(1)
    smallest = torch.maximum(rounding, (4 * torch.finfo(torch.float32).eps) ** 2 * size)
    # A root of the inverse takes much less time than eigenvalues. The sum of its squares is the sum of the
    # inverse eigenvalues. So all eigenvalues are larger than one over that sum.
    lower, failed = torch.linalg.cholesky_ex(covariance)
    identity = torch.eye(width, dtype=lower.dtype, device=lower.device).expand_as(lower)
    roots = torch.linalg.solve_triangular(lower.transpose(1, 2), identity, upper=True)
    regular = (failed == 0) & (roots.square().sum((1, 2)) * smallest < 1)
    for tap, is_regular in enumerate(regular.tolist()):
        whitening = roots[tap]
        if not is_regular:
            values, vectors = torch.linalg.eigh(covariance[tap])
            vary = values > smallest[tap]
            whitening = vectors[:, vary] / values[vary].sqrt()
        yield whitening, means[tap] @ whitening


@dataclass
class _Sums:
    """Running sums in float64, relative to an origin: the mean of the first batch."""

    widths: list[int]
    """The channels of each tap."""
    counts: Tensor
    """The number of examples of each class, `(classes,)`."""
    groups: list[_Group]
    """The taps of each width, in the order of `by_width`."""
    labels: Tensor | None = None
    """Minus the smallest label, and the largest label, if labels were given: they may be out of range."""

    @staticmethod
    def begun(widths: list[int], first: list[Tensor], finite: Tensor | None, classes: int) -> "_Sums":
        """Empty sums, relative to the mean of the finite examples of a first batch, as `by_width` has it."""
        groups = []
        for taps, features in zip(_taps_by_width(widths).values(), first, strict=True):
            mean = features.mean(1)
            if finite is not None:
                kept = finite.to(features.device).unsqueeze(1)
                mean = torch.where(kept, features, 0).sum(1) / kept.sum()
            across = len(taps), mean.shape[1]
            zeros = mean.new_zeros(across[0], classes, across[1]), mean.new_zeros(*across, across[1])
            groups.append(_Group(taps, mean, *zeros))
        device = first[0].device if first else torch.device("cpu")
        return _Sums(widths, torch.zeros(classes, dtype=torch.float64, device=device), groups)

    def join(self, other: "_Sums") -> None:
        """Add the sums of another fit, which has other origins."""
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            mine.join(theirs, other.counts)
        self.counts += other.counts

    def add(self, features: list[Tensor], classes: Tensor, finite: Tensor | None, given: bool) -> None:
        """Take in one batch: its features as `by_width` has them, and its classes.

        It does not wait for a GPU. Examples that are not finite are left out. With `given`, the classes are
        labels. Labels that are no class of the network are left out, and `check` raises an error.
        """
        classes, known = classes.to(self.counts.device), len(self.counts)
        kept = None if finite is None else finite.to(self.counts.device)
        if given:
            extent = torch.stack([-classes.amin(), classes.amax()])
            self.labels = extent if self.labels is None else torch.maximum(self.labels, extent)
            if not extent.is_cuda:
                self.check()
            inside = (classes >= 0) & (classes < known)
            kept = inside if kept is None else kept & inside
            classes = classes.clamp(0, known - 1)
        counted = torch.ones_like(classes) if kept is None else kept
        self.counts.index_add_(0, classes, counted.double())
        for group, of_group in zip(self.groups, features, strict=True):
            group.add(of_group, classes, kept)

    def check(self) -> None:
        """Raise an error if labels were no classes of the network. It waits for a GPU."""
        if self.labels is None:
            return
        low, high, known = -int(self.labels[0]), int(self.labels[1]), len(self.counts)
        if low < 0 or high >= known:
            self.labels = None
            raise InputError(
                f"labels from {low} to {high} were given, the network has classes 0 to {known - 1}"
            )

    def whitened(self, present: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each tap, the inverse root of the covariance about the class means, and the whitened means."""
        fitted = {
            tap: of_tap
            for group in self.groups
            for tap, of_tap in zip(group.taps, group.whitened(self.counts, present), strict=True)
        }
        return [fitted[tap] for tap in range(len(self.widths))]


def _taps_by_width(widths: Iterable[int]) -> dict[int, list[int]]:
    """The numbers of the taps of each width."""
    taps: dict[int, list[int]] = {}
    for tap, width in enumerate(widths):
        taps.setdefault(width, []).append(tap)
    return taps


def by_width(taps: Sequence[Tensor], unit: bool) -> list[Tensor]:
    """The features of all taps in float64, `(taps, N, width)` for each width; with `unit`, of length one."""
    groups = _taps_by_width(means.shape[1] for means in taps).values()
    grouped = [torch.stack([taps[tap] for tap in group]).double() for group in groups]
    if not unit:
        return grouped
    return [f / torch.linalg.vector_norm(f, dim=-1, keepdim=True).clamp_min(TINY) for f in grouped]


def _side_by_side(groups: Iterable[tuple[Sequence[int], Tensor]]) -> Tensor:
    """The tensors of all taps, flat, in the order of the taps: a copy."""
    parts = {tap: part for taps, tensor in groups for tap, part in zip(taps, tensor, strict=True)}
    return torch.cat([parts[tap].flatten() for tap in range(len(parts))])


def _usable(t: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. It can take part in gradients."""
    moved = t.to(device)
    return moved.clone() if moved.is_inference() else moved
