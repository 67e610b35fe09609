"""What explanations add to a page: sentences, maps, groups, layers by class, what tells sets apart."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gramwatch.detector import Detector
from gramwatch.errors import InputError
from gramwatch.explained_set import Cluster, ExplainedSet, explain_set
from gramwatch.preprocessing import Preprocessing
from gramwatch.readers import Images, Opener, Tally
from gramwatch.report.page import Group, Reasons
from gramwatch.report.scores import Scores, Truths
from gramwatch.report.thumbnails import network_input, over, thumbnail

MOST = 600
"""The most flagged images that are explained for groups and layers. More are drawn at random."""
OF_A_SET = 200
"""The images of each set that are compared, if there are several sets."""
FEWEST = 10
"""The fewest flagged images that make groups."""
GROUPS = 6
"""The most groups. A group has five images or more on average."""
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
        """Everything that explanations add. `images` of the most suspicious get sentences and a map."""
        sentences, maps = self._each(self.scores.by_score[:images])
        finite = np.isfinite(self.scores.score)
        rows, explained = self._set(self._drawn(finite & self.scores.is_ood, MOST))
        flagged = int((finite & self.scores.is_ood).sum())
        notes = [] if explained is None else list(self._differences(rows, explained))
        return Reasons(
            sentences,
            maps,
            [] if explained is None or len(rows) < FEWEST else self._groups(rows, explained),
            _how_grouped(len(rows), flagged),
            [] if explained is None else self._cells(explained),
            self._apart(finite),
            notes,
        )

    # --- one by one ----------------------------------------------------------------------------------

    def _each(self, rows: Sequence[int]) -> tuple[dict[int, list[str]], dict[int, str]]:
        sentences: dict[int, list[str]] = {}
        maps: dict[int, str] = {}
        for batch_rows, inputs in self._batches(rows, AT_ONCE):
            explained = self.detector.explain(inputs)
            for place, row in enumerate(batch_rows):
                sentences[row] = explained.sentences(place)[1:]  # the verdict stands beside them
                heat = None if explained.map is None else explained.map[place].cpu()
                if heat is not None and heat.ndim == 2 and bool(heat.isfinite().all()):
                    maps[row] = thumbnail(over(network_input(inputs[place], self.preprocessing), heat))
        return sentences, maps

    def _batches(self, rows: Sequence[int], size: int) -> Any:
        """The rows of the readable images, and their inputs."""
        start = 0
        for batch in self._images(rows, size):
            found = rows[start : start + len(batch.images)]
            start += len(batch.images)
            if batch.inputs is not None:
                readable = [row for row, image in zip(found, batch.images, strict=True) if not image.error]
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
            explained = explain_set(self.detector, self._images(rows, 64).inputs(tally), progress=False)
        except InputError:  # no image can be read, or none is finite now
            return [], None
        read = [row for row in rows if self.scores.paths[row] not in tally.unreadable]
        return (read, explained) if len(read) == len(explained) else ([], None)

    def _differences(self, rows: list[int], explained: ExplainedSet) -> Iterator[str]:
        """Say if images score otherwise now than in the table."""
        then, now = self.scores.score[rows], explained.score.double().numpy()
        count = int((np.abs(then - now) > 0.01 * (1 + np.abs(then))).sum())
        if count:
            yield (
                f"{count:,} of {len(rows):,} images score otherwise now than in the table: the images, their "
                "preprocessing or the guard have changed since. Explanations are of the images as they are."
            )

    def _groups(self, rows: list[int], explained: ExplainedSet) -> list[Group]:
        found = explained.clusters(min(GROUPS, len(rows) // 5), flagged=False, seed=self.seed)
        return [
            Group(
                self._title(explained, cluster), [rows[i] for i in cluster.examples], _layers_of(cluster.taps)
            )
            for cluster in found
        ]

    def _title(self, explained: ExplainedSet, cluster: Cluster) -> str:
        """The member that adds most to the scores of a group, and what it looks at."""
        positive = explained.members[cluster.examples].clamp_min(0).mean(0)
        share, number = (positive / positive.sum().clamp_min(1e-12)).max(0)
        name = explained.member_names[int(number)]
        members = getattr(self.detector, "members", {name: self.detector})
        sees = getattr(members.get(name), "sees", "")
        what = f"{name} ({sees})" if sees else name
        return f"{'Mostly ' if share > 0.5 else ''}{what}, {100 * float(share):.0f} % of the score"

    def _cells(self, explained: ExplainedSet) -> list[tuple[str, str, str, float]]:
        """Mean contributions of flagged images: class, member, tap, value."""
        classes, means = explained.by_class()
        names = explained.class_names
        return [
            (names[number] if number < len(names) else str(number), member, tap, float(means[row, column]))
            for row, number in enumerate(classes)
            for column, (member, tap) in enumerate(explained.columns)
            if tap
        ]

    def _apart(self, finite: Truths) -> list[tuple[str, str, str, float]]:
        """The layers that tell each set from the first one."""
        if len(self.scores.names) < 2:
            return []
        sets = [
            self._set(self._drawn(finite & self.scores.of_set(number), OF_A_SET))[1]
            for number in range(len(self.scores.names))
        ]
        first, found = sets[0], []
        for name, other in zip(self.scores.names[1:], sets[1:], strict=True):
            if first is not None and other is not None:
                found += [(name, each.member, each.tap, each.auroc) for each in first.apart(other, 3)]
        return found


def _how_grouped(explained: int, flagged: int) -> str:
    """How the groups were found."""
    which = f"All {flagged:,} flagged images"
    if explained < flagged:
        which = f"{explained:,} of {flagged:,} flagged images, drawn at random,"
    return f"{which} were explained. Images whose scores come from the same members and layers are a group."


def _layers_of(taps: Sequence[tuple[str, str, float]]) -> str:
    """The layers that are further above those of other groups than any."""
    named = [f"{tap} ({member})" if tap else member for member, tap, value in taps if value > 0]
    return f"More than elsewhere comes from {', '.join(named)}." if named else ""
