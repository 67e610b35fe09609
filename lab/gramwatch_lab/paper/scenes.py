"""Photographs of scenes as in-distribution: their images, and the facts and tables of their sets.

Images that are smaller than the network's images are enlarged. The accuracy of the network is measured on
controls and faults. Controls, and faults that cost no accuracy, are shown apart.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from gramwatch.evaluation.evaluate import Measured, Row
from gramwatch_lab import datasets
from gramwatch_lab.datasets.faults import FAULTS, NORMALISATIONS
from gramwatch_lab.datasets.images import made_grey, resized, through
from gramwatch_lab.datasets.scenes import CLASSES
from gramwatch_lab.figures.table import APART
from gramwatch_lab.paper.beside import markdown
from gramwatch_lab.paper.sets import CONTROL, FAR, FAULT, NEAR, SCENES, OodSet, SceneSet, scene_sets
from gramwatch_lab.paper.subject import Batches, Subject

COUNT = 800
"""The largest number of images of a set."""
MILD = 1.0
"""A fault that costs at most this many points of accuracy is shown apart."""


class SceneSubject(Subject):
    """A network trained on scenes, or on some of their classes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.classes = self.loaded.class_names or CLASSES
        self.left_out = tuple(name for name in CLASSES if name not in self.classes)
        without = f" without {' and '.join(self.left_out)}" if self.left_out else ""
        self._inside = OodSet(f"{SCENES}{without}", SCENES)

    @property
    def label(self) -> str:
        """The name of files: the network, the set, and the classes that were left out."""
        return "-without-".join([super().label, *self.left_out])

    def load(
        self, name: str, split: str = "test", reduce: str | None = None, count: int | None = None
    ) -> datasets.ImageSet:
        """A set in three channels and the network's size. Scenes: only the classes that the network knows."""
        classes = self.classes if name == SCENES else None
        return self._loaded(name, split, count, classes, self._size, reduce)

    def is_outlying(self, which: OodSet) -> bool:
        """Whether a set is out-of-distribution for this network. A class that the network knows is not."""
        return not (isinstance(which, SceneSet) and which.kind == NEAR and which.name not in self.left_out)

    def present(self, which: OodSet) -> bool:
        """Whether a set is out-of-distribution and can be loaded."""
        return self.is_outlying(which) and super().present(which)

    def test_batches(self, which: OodSet) -> Batches:
        """The images to be judged. A fault of the normalisation normalises them in the wrong way."""
        batches = super().test_batches(which)
        if which.name in NORMALISATIONS:
            mean, std = NORMALISATIONS[which.name][1](self.loaded.mean, self.loaded.std)
            batches.loaded = replace(self.loaded, mean=mean, std=std)
        return batches

    def clean(self) -> datasets.ImageSet:
        """The test photographs from which controls and faults are made, with their labels."""
        return self.load(SCENES, count=self._count)

    # --- images --------------------------------------------------------------------------------------

    @cached_property
    def _size(self) -> int:
        return self.loaded.record.shape[1]

    @property
    def _count(self) -> int:
        return min(self.subset or COUNT, COUNT)

    def _images(self, which: OodSet) -> Tensor:
        if not isinstance(which, SceneSet):
            return super()._images(which)
        if which.kind == NEAR:  # the network never saw the training images of this class
            return self._loaded(SCENES, "train", self._count, (which.name,), self._size).images
        if which.kind == FAR:
            size = self._size if which.side is None else None
            return resized(self._loaded(which.name, "test", self._count, None, size).images, self._size)
        images = self.clean().images
        if which.side is not None:
            return through(_grey(images) if which.grey else images, which.side)
        return FAULTS[which.fault].apply(images, which.strength, 0) if which.fault else images

    def _loaded(
        self,
        name: str,
        split: str,
        count: int | None,
        classes: Sequence[str] | None,
        size: int | None,
        reduce: str | None = None,
    ) -> datasets.ImageSet:
        return datasets.load(
            name,
            self.root,
            split=split,
            size=size,
            reduce=reduce,
            grey=False,
            count=count,
            classes=classes,
        )

    def _shared_settings(self) -> dict[str, Any]:
        return {**super()._shared_settings(), "classes": list(self.classes), "count": self._count}


def _grey(images: Tensor) -> Tensor:
    return made_grey(images).expand(-1, 3, -1, -1).contiguous()


# --- the kind of each set, and the accuracy on it ------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """One set: its kind and, if its images have labels, the accuracy of the network."""

    title: str
    name: str
    kind: str
    images: int
    accuracy: float | None
    """In percent."""
    lost: float | None
    """The points of accuracy that the fault costs, on the same images."""

    @property
    def apart(self) -> bool:
        """Whether the set is shown apart: a control, or a fault that costs at most `MILD` points."""
        return self.kind == CONTROL or (self.lost is not None and self.lost <= MILD)


def facts_of(subject: SceneSubject, measured: Mapping[str, Measured]) -> list[Facts]:
    """The facts of every set that was measured, from the logits in the cells."""
    test = subject.clean()
    assert test.labels is not None
    clean = 100 * subject.accuracy_on(test)
    facts = []
    for which in scene_sets():
        if which.title not in measured:
            continue
        logits = next(iter(measured[which.title].values())).logits
        labelled = which.kind in (CONTROL, FAULT)
        accuracy = _accuracy(logits, test.labels) if labelled else None
        lost = None if accuracy is None else clean - accuracy
        facts.append(Facts(which.title, which.name, which.kind, len(logits), accuracy, lost))
    return facts


def apart_of(facts: Sequence[Facts]) -> set[str]:
    """The titles of the sets that are shown apart. If no other set is left, none is shown apart."""
    apart = {fact.title for fact in facts if fact.apart}
    return apart if len(apart) < len(facts) else set()


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return 100 * float((logits.argmax(1).cpu() == labels).double().mean())


def write_facts(path: Path, facts: Sequence[Facts]) -> None:
    """Write the facts as CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["ood", "name", "kind", "images", "accuracy", "lost", "apart"])
        for fact in facts:
            figures = ["" if value is None else f"{value:.4f}" for value in (fact.accuracy, fact.lost)]
            writer.writerow([fact.title, fact.name, fact.kind, fact.images, *figures, int(fact.apart)])


def tables_of(
    facts: Sequence[Facts], rows: Sequence[Row], titles: Sequence[str], between: Sequence[str]
) -> list[str]:
    """The table by kind, then the tables `between`, then the accuracy; in Markdown, without empty tables."""
    by_kind = [table_by_kind(rows, facts, titles)] if any(not fact.apart for fact in facts) else []
    accuracy = [accuracy_table(facts)] if any(fact.accuracy is not None for fact in facts) else []
    return [*by_kind, *between, *accuracy]


def accuracy_table(facts: Sequence[Facts]) -> str:
    """The accuracy on controls and faults, in Markdown."""
    rows = [["controls and faults", "accuracy, percent", "points lost", ""]]
    for fact in facts:
        if fact.accuracy is not None and fact.lost is not None:
            shown = APART if fact.apart else ""
            rows.append([fact.title, f"{fact.accuracy:.2f}", f"{fact.lost:+.2f}", shown])
    return markdown(rows)


def table_by_kind(rows: Sequence[Row], facts: Sequence[Facts], titles: Sequence[str]) -> str:
    """The mean AUROC of each kind of outlier, and the mean over kinds, in Markdown. The best method is first.

    Sets that are shown apart do not count.
    """
    kinds = {fact.title: fact.kind for fact in facts if not fact.apart}
    shown = [kind for kind in (NEAR, FAR, FAULT) if kind in kinds.values()]
    figures: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.ood in kinds:
            figures.setdefault((row.method, kinds[row.ood]), []).append(100 * row.mean["auroc"])
    means = {key: sum(values) / len(values) for key, values in figures.items()}
    whole = {title: sum(means[title, kind] for kind in shown) / len(shown) for title in titles}
    counts = [f"{kind} ({list(kinds.values()).count(kind)})" for kind in shown]
    best_first = sorted(titles, key=lambda title: -whole[title])
    figures_of = {title: [*(means[title, kind] for kind in shown), whole[title]] for title in best_first}
    body = [[title, *(f"{figure:.2f}" for figure in row)] for title, row in figures_of.items()]
    return markdown([["mean AUROC, percent", *counts, "mean of kinds"], *body])
