"""The explanations on a page: sentences, maps, groups, layers by class, and layers that separate sets."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gramwatch.detect.detector import Detector
from gramwatch.errors import InputError
from gramwatch.explain.explained_set import ExplainedSet, explain_set
from gramwatch.explain.thumbnails import network_input, over, pixels_of, thumbnail
from gramwatch.inputs.preprocessing import Preprocessing
from gramwatch.inputs.readers import Images, Opener, Tally
from gramwatch.report.causes import Cause, Ordinary, statistics
from gramwatch.report.page import Group, Reasons
from gramwatch.report.scores import Scores, Truths

MOST = 600
"""The most flagged images that are explained for groups and layers. More are drawn at random."""
OF_A_SET = 200
"""The images of each set that are compared, if there are several sets."""
FEWEST = 10
"""The fewest flagged images that make groups."""
GROUPS = 6
"""The most groups of images without a plain cause. A group has five images or more on average."""
OF_A_CAUSE, SHARE_OF_A_CAUSE = 5, 0.05
"""The fewest images that make a group of a cause, and their smallest share of all that are explained."""
ORDINARY = 200
"""The images that are not flagged, with which flagged images are compared."""
KINDS = {
    "the nearest class": "Unlike every class of the training",
    "texture": "Unusual texture",
    "the logits": "The network is unsure",
    "features": "Unusual features",
    "the image itself": "Unusual images, whatever they show",
    "the course of the features": "Unusual features on the way through the network",
}
"""The title of a group, by the member with the largest contribution."""
AT_ONCE = 8
"""Images that are explained together with their maps."""


@dataclass(frozen=True)
class Explainer:
    """Explains images of a table."""

    detector: Detector
    preprocessing: Preprocessing
    scores: Scores
    opener: Opener
    workers: int = 0
    seed: int = 0

    def reasons(self, images: int) -> Reasons:
        """All explanations for a page. The `images` most suspicious images get sentences and a map."""
        sentences, maps = self._sentences_and_maps(self.scores.by_score[:images])
        finite = np.isfinite(self.scores.score)
        rows, explanation = self._set(self._drawn(finite & self.scores.is_ood, MOST))
        flagged = int((finite & self.scores.is_ood).sum())
        notes = [] if explanation is None else list(self._differences(rows, explanation))
        return Reasons(
            sentences,
            maps,
            [] if explanation is None or len(rows) < FEWEST else self._groups(rows, explanation),
            _how_grouped(len(rows), flagged),
            [] if explanation is None else self._cells(explanation),
            self._apart(finite),
            notes,
        )

    # --- one by one ----------------------------------------------------------------------------------

    def _sentences_and_maps(self, rows: Sequence[int]) -> tuple[dict[int, list[str]], dict[int, str]]:
        sentences: dict[int, list[str]] = {}
        maps: dict[int, str] = {}
        for batch_rows, inputs in self._batches(rows, AT_ONCE):
            explanation = self.detector.explain(inputs)
            for place, row in enumerate(batch_rows):
                sentences[row] = explanation.sentences(place)[1:]  # the verdict stands beside them
                heat = None if explanation.map is None else explanation.map[place].cpu()
                if heat is not None and heat.ndim == 2 and bool(heat.isfinite().all()):
                    maps[row] = thumbnail(over(network_input(inputs[place], self.preprocessing), heat))
        return sentences, maps

    def _batches(self, rows: Sequence[int], size: int) -> Any:
        """The rows of the readable images, and their inputs."""
        start = 0
        for batch in self._images(rows, size):
            batch_rows = rows[start : start + len(batch.images)]
            start += len(batch.images)
            if batch.inputs is not None:
                readable = [
                    row for row, image in zip(batch_rows, batch.images, strict=True) if not image.error
                ]
                yield readable, batch.inputs

    def _images(self, rows: Sequence[int], size: int) -> Images:
        keys = [self.scores.paths[row] for row in rows]
        return Images(keys, self.preprocessing, opener=self.opener, batch_size=size, workers=self.workers)

    # --- sets ----------------------------------------------------------------------------------------

    def _drawn(self, chosen: Truths, most: int) -> list[int]:
        rows = np.flatnonzero(chosen)
        if len(rows) > most:
            rows = np.sort(np.random.default_rng(self.seed).choice(rows, most, replace=False))
        return [int(row) for row in rows]

    def _set(self, rows: list[int]) -> tuple[list[int], ExplainedSet | None]:
        """The explanation of a set, and the rows that it is of: those that can be read."""
        if not rows:
            return [], None
        tally = Tally()
        try:
            explanation = explain_set(self.detector, self._images(rows, 64).inputs(tally), progress=False)
        except InputError:  # no image can be read, or none is finite now
            return [], None
        read = [row for row in rows if self.scores.paths[row] not in tally.unreadable]
        return (read, explanation) if len(read) == len(explanation) else ([], None)

    def _differences(self, rows: list[int], explanation: ExplainedSet) -> Iterator[str]:
        """Say if the scores of images differ from those in the table."""
        then, now = self.scores.score[rows], explanation.score.double().numpy()
        count = int((np.abs(then - now) > 0.01 * (1 + np.abs(then))).sum())
        if count:
            yield (
                f"{count:,} of {len(rows):,} images score otherwise now than in the table: the images, their "
                "preprocessing or the guard have changed since. Explanations are of the images as they are."
            )

    def _groups(self, rows: list[int], explanation: ExplainedSet) -> list[Group]:
        """Images with a plain cause, by cause. Then the others, alike in members and layers."""
        causes = self._causes(rows)
        common = Counter(cause for cause in causes if cause is not None).most_common()
        fewest = max(OF_A_CAUSE, SHARE_OF_A_CAUSE * len(rows))
        named = [cause for cause, images in common if images >= fewest]
        groups = [self._of_cause(rows, explanation, causes, cause) for cause in named]
        others = [i for i, cause in enumerate(causes) if cause not in named]
        if not others:
            return groups
        rest = explanation[others]
        count = max(1, min(GROUPS, len(others) // OF_A_CAUSE))
        titles: Counter[str] = Counter()
        for cluster in rest.clusters(count, flagged=False, seed=self.seed):
            title, share = self._kind(rest[cluster.examples])
            titles[title] += 1
            if titles[title] > 1:
                title = f"{title} ({titles[title]})"
            images = [rows[others[i]] for i in cluster.examples]
            groups.append(Group(title, images, "", f"{share} {_layers_of(cluster.taps)}".strip()))
        return groups

    def _of_cause(
        self, rows: list[int], explanation: ExplainedSet, causes: Sequence[Cause | None], cause: Cause
    ) -> Group:
        """The images with a cause. Those whose score is most like that of the group are first."""
        inside = [i for i, other in enumerate(causes) if other == cause]
        middle = float(explanation.score[inside].median())
        inside.sort(key=lambda i: abs(float(explanation.score[i]) - middle))
        about = f"They {cause.about} than nearly all images that were not flagged."
        return Group(cause.name, [rows[i] for i in inside], about, self._kind(explanation[inside])[1])

    def _causes(self, rows: list[int]) -> list[Cause | None]:
        """The first cause of each image. None: nothing plain is odd about it, or it cannot be told."""
        scores = self.scores
        fine = np.isfinite(scores.score) & ~scores.is_ood
        typical = fine & (scores.p_value >= np.median(scores.p_value[fine])) if fine.any() else fine
        ordinary = Ordinary.of(self._statistics(self._drawn(typical, ORDINARY)))
        values = {} if ordinary is None else self._statistics(rows)
        if ordinary is None or len(next(iter(values.values()), ())) != len(rows):
            return [None] * len(rows)
        return [next(iter(causes), None) for causes in ordinary.causes(values)]

    def _statistics(self, rows: list[int]) -> dict[str, torch.Tensor]:
        """The statistics of the images as the network sees them. What cannot be read is left out."""
        measured = [
            statistics(pixels_of(inputs, self.preprocessing)) for _, inputs in self._batches(rows, 64)
        ]
        names = measured[0] if measured else ()
        return {name: torch.cat([part[name] for part in measured]) for name in names}

    def _kind(self, explanation: ExplainedSet) -> tuple[str, str]:
        """The largest contribution to the scores of images: in plain words, and the member with its share."""
        positive = explanation.members.clamp_min(0).mean(0)
        share, number = (positive / positive.sum().clamp_min(1e-12)).max(0)
        name = explanation.member_names[int(number)]
        members = getattr(self.detector, "members", {name: self.detector})
        sees = getattr(members.get(name), "sees", "")
        what = f"{name} ({sees})" if sees else name
        return (
            KINDS.get(sees, f"Unusual for {name}"),
            f"{100 * float(share):.0f} % of the score comes from {what}.",
        )

    def _cells(self, explanation: ExplainedSet) -> list[tuple[str, str, str, float]]:
        """Mean contributions of flagged images: class, member, tap, value."""
        classes, means = explanation.by_class()
        names = explanation.class_names
        return [
            (names[number] if number < len(names) else str(number), member, tap, float(means[row, column]))
            for row, number in enumerate(classes)
            for column, (member, tap) in enumerate(explanation.columns)
            if tap
        ]

    def _apart(self, finite: Truths) -> list[tuple[str, str, str, float]]:
        """The layers that separate each set from the first one."""
        if len(self.scores.names) < 2:
            return []
        sets = [
            self._set(self._drawn(finite & self.scores.of_set(number), OF_A_SET))[1]
            for number in range(len(self.scores.names))
        ]
        first, differences = sets[0], []
        for name, other in zip(self.scores.names[1:], sets[1:], strict=True):
            if first is not None and other is not None:
                differences += [
                    (name, difference.member, difference.tap, difference.auroc)
                    for difference in first.apart(other, 3)
                ]
        return differences


def _how_grouped(explained_count: int, flagged: int) -> str:
    """The way in which groups were made, in words."""
    which = f"All {flagged:,} flagged images"
    if explained_count < flagged:
        which = f"{explained_count:,} of {flagged:,} flagged images, drawn at random,"
    return (
        f"{which} were explained. Images with the same plain cause are a group. In the other "
        "groups, scores come from the same members and layers."
    )


def _layers_of(taps: Sequence[tuple[str, str, float]]) -> str:
    """The layers whose contributions exceed those of other groups most, in words."""
    named = [f"{tap} ({member})" if tap else member for member, tap, value in taps if value > 0]
    return f"More than elsewhere comes from {', '.join(named)}." if named else ""
