"""explain_set: why the images of a set are unusual, by tap and class, in groups of similar reasons."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from gramwatch.detect.detector import Detector
from gramwatch.errors import InputError
from gramwatch.explain.explained import Explained
from gramwatch.explain.reasons import draw_heat
from gramwatch.inputs.batches import count_examples, mapped
from gramwatch.numerics.metrics import auroc

MOST_CLUSTERS = 8
"""The most clusters that are tried, if their number is not given."""
AT_ONCE = 64
"""The most images that are explained together."""


@dataclass(frozen=True)
class Apart:
    """One tap of one member, and how well its contributions alone tell two sets apart."""

    member: str
    tap: str
    auroc: float
    """The probability that an image of the other set has a larger contribution."""
    here: float
    """The mean contribution in this set."""
    there: float
    """The mean contribution in the other set."""


@dataclass(frozen=True)
class Cluster:
    """Images that are unusual for similar reasons."""

    examples: list[int]
    """Their numbers in the set. The most typical one is first."""
    taps: list[tuple[str, str, float]]
    """The members, taps and mean contributions that are furthest above those of the other examples."""

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True)
class ExplainedSet:
    """The contributions to the scores of N images, as `explain_set` returns them."""

    contributions: Tensor
    """The contribution of each tap of each member, and of members without taps, `(N, columns)`."""
    columns: tuple[tuple[str, str], ...]
    """The member and the tap of each column. A member without parts has the tap `""`."""
    members: Tensor
    """`(N, members)`"""
    member_names: tuple[str, ...]
    score: Tensor
    p_value: Tensor
    is_ood: Tensor
    predicted: Tensor
    class_names: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.score)

    def __repr__(self) -> str:
        flagged = int(self.is_ood.sum())
        return f"ExplainedSet: {len(self)} images, {flagged} out-of-distribution, {len(self.columns)} columns"

    def __getitem__(self, examples: Sequence[int]) -> "ExplainedSet":
        """The explanation of the chosen images."""
        names = ("contributions", "members", "score", "p_value", "is_ood", "predicted")
        rows = torch.tensor(examples, dtype=torch.long)
        return replace(self, **{name: getattr(self, name)[rows] for name in names})

    def by_class(self) -> tuple[list[int], Tensor]:
        """The predicted classes that occur, and their mean contributions, `(classes, columns)`."""
        classes = self.predicted.unique().tolist()
        rows = [self.contributions[self.predicted == number].mean(0) for number in classes]
        return classes, torch.stack(rows)

    def plot(self, path: str | PathLike[str] | None = None) -> Any:
        """Draw the mean contributions by tap and predicted class. Without a path, return the figure."""
        classes, means = self.by_class()
        return draw_heat(path, means, [self._class(number) for number in classes], self.columns)

    def _class(self, number: int) -> str:
        return self.class_names[number] if number < len(self.class_names) else str(number)

    def apart(self, other: "ExplainedSet", most: int = 5) -> list[Apart]:
        """The taps whose contributions tell another set from this one, best first."""
        if self.columns != other.columns:
            raise InputError("the two sets were explained by different detectors: their taps differ")
        differences = []
        for column, (member, tap) in enumerate(self.columns):
            here, there = self.contributions[:, column], other.contributions[:, column]
            differences.append(
                Apart(member, tap, auroc(here, there), float(here.mean()), float(there.mean()))
            )
        return sorted(differences, key=lambda difference: -abs(difference.auroc - 0.5))[:most]

    def clusters(self, count: int | None = None, *, flagged: bool = True, seed: int = 0) -> list[Cluster]:
        """Groups of images that are unusual for similar reasons, largest first.

        Images are compared by the shares of their positive contributions. Similar shares mean similar
        reasons, however unusual an image is.

        Args:
            count: how many clusters. By default the number from 2 to 8 with the best silhouette.
            flagged: only images that were flagged.
            seed: of k-means.

        """
        rows = (self.is_ood if flagged else torch.ones_like(self.is_ood)).nonzero().flatten()
        needed = 3 if count is None else count
        if len(rows) < needed:
            what = "flagged images" if flagged else "images"
            raise InputError(
                f"{len(rows)} {what} cannot make {count or 2} clusters: at least {needed} are needed"
            )
        shares = self.contributions[rows].clamp_min(0)
        shares = shares / shares.sum(1, keepdim=True).clamp_min(1e-12)
        labels, distances = _grouped(shares, count, seed)
        clusters = [self._cluster(rows, labels == label, distances) for label in labels.unique().tolist()]
        return sorted(clusters, key=len, reverse=True)

    def _cluster(self, rows: Tensor, inside: Tensor, distances: Tensor) -> Cluster:
        order = distances[inside].argsort()
        own = self.contributions[rows[inside]].mean(0)
        others = rows[~inside]
        above = own - (self.contributions[others].mean(0) if len(others) else 0)
        taps = [(*self.columns[c], float(own[c])) for c in above.argsort(descending=True).tolist()[:3]]
        return Cluster(rows[inside][order].tolist(), taps)


def _grouped(shares: Tensor, count: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """The cluster of each row, and its distance from the middle of that cluster."""
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    points = shares.double().numpy()
    tried = [count] if count else range(2, min(MOST_CLUSTERS, len(points) - 1) + 1)
    best: tuple[float, Any] | None = None
    for number in tried:
        model = KMeans(number, n_init=10, random_state=seed).fit(points)
        distinct = len(set(model.labels_.tolist()))
        quality = silhouette_score(points, model.labels_) if 1 < distinct < len(points) else -1.0
        if best is None or quality > best[0]:
            best = (quality, model)
    assert best is not None
    return torch.from_numpy(best[1].labels_).long(), torch.from_numpy(best[1].transform(points)).amin(1)


def explain_set(detector: Detector, loader: Iterable[Any], *, progress: bool = True) -> ExplainedSet:
    """Explain all images of a loader: contributions by member, tap and class, without maps.

    Images that are not finite are left out.

    Args:
        detector: a calibrated guard or another detector.
        loader: as for `fit`.
        progress: show a progress bar (on a terminal only).

    """
    detector.calibration()
    parts: list[Explained] = []
    for _, inputs, _ in detector.network.numbered(loader, "explaining", progress):
        count = count_examples(inputs)
        for start in range(0, count, AT_ONCE):
            piece = mapped(inputs, lambda t: t[start : start + AT_ONCE] if len(t) == count else t)  # noqa: B023
            explanation = detector.explain_inputs(piece, places=False)
            parts.append(explanation[explanation.finite])
    parts = [part for part in parts if len(part)]
    if not parts:
        raise InputError("the loader yielded no finite example: there is nothing to explain")
    return _joined(parts)


def _joined(parts: Sequence[Explained]) -> ExplainedSet:
    first = parts[0]

    def column(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value.cpu() for value in values])

    columns, rows = [], []
    for number, member in enumerate(first.parts):
        if member.terms is None:
            columns.append((member.name, ""))
            rows.append(column([part.parts[number].total for part in parts]).unsqueeze(1))
        else:
            columns += [(member.name, tap.name) for tap in member.taps]
            terms = [part.parts[number].terms for part in parts]
            rows.append(column([term[:, :-1] for term in terms if term is not None]))
    return ExplainedSet(
        contributions=torch.cat(rows, 1),
        columns=tuple(columns),
        members=column([part.members for part in parts]),
        member_names=first.member_names,
        score=column([part.detection.score for part in parts]),
        p_value=column([part.detection.p_value for part in parts]),
        is_ood=column([part.detection.is_ood for part in parts]),
        predicted=column([part.detection.predicted for part in parts]),
        class_names=first.class_names,
    )
