"""Sentences of a page and their figures: each figure is computed from the file that it comes from.

A check is a sentence with `{}` for every figure, the figures in that order, and what the words claim:

    says("Gram has {} on ResNet-34, ODIN {}.", gram, odin, so=[above(gram, odin)])

A figure is computed when it is looked at, so a missing file fails one check and not all of them.
"""

import csv
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
NUMBER = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
NEAR = {"CIFAR-10": ("CIFAR-100", "CIFAR-100 subset"), "CIFAR-100 (indicative)": ("CIFAR-10",)}
"""The near sets of an in-distribution set."""
SEEN = "auxiliary source seen"  # the note on a set whose source was in training: it counts in no mean


# --- figures -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A number and the place that it comes from."""

    source: str
    compute: Callable[[], float]

    def written(self, like: str) -> str:
        """The figure with as many decimals as the number on the page has."""
        decimals = len(like.partition(".")[2])
        return f"{round(self.compute(), decimals) + 0.0:,.{decimals}f}"  # never -0.0


@functools.cache
def rows_of(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Results:
    """A CSV in docs/results."""

    name: str

    def cell(self, method: str, ood: str, column: str) -> Figure:
        return Figure(
            f"{self.name}.csv ({method}, {ood}, {column})", lambda: self._value(method, ood, column)
        )

    def tnr(self, method: str, ood: str) -> Figure:
        return self.cell(method, ood, "tnr")

    def auroc(self, method: str, ood: str) -> Figure:
        return self.cell(method, ood, "auroc")

    def published(self, method: str, ood: str, metric: str = "tnr") -> Figure:
        return self.cell(method, ood, f"{metric}_published")

    def images(self, ood: str) -> Figure:
        return Figure(
            f"{self.name}.csv ({ood}, images)",
            lambda: float(next(row["images"] for row in rows_of(self.name) if row["ood"] == ood)),
        )

    def mean(
        self, method: str, metric: str = "tnr", near: bool = True, shared: "Results | None" = None
    ) -> Figure:
        """The mean over the sets that are there; without those whose source was seen in training."""
        return Figure(
            f"{self.name}.csv (mean of {method} over {_which(near, shared)}, {metric})",
            lambda: _mean(self._value(method, ood, metric) for ood in self.sets(near, shared)),
        )

    def count(self, near: bool = True, shared: "Results | None" = None) -> Figure:
        return Figure(
            f"{self.name}.csv (number of {_which(near, shared)})",
            lambda: float(len(self.sets(near, shared))),
        )

    def best(self, ood: str, metric: str = "tnr", besides: Sequence[str] = ("Gram",)) -> Figure:
        """The best figure of all methods but some."""
        return Figure(
            f"{self.name}.csv (best of {ood} without {', '.join(besides)}, {metric})",
            lambda: max(self._value(m, ood, metric) for m in self.methods() if m not in besides),
        )

    def tally(self, method: str = "Gram", near: bool = False, par: float = 1.0) -> list[Figure]:
        """On how many sets a method is ahead of all others, up to a point behind, further behind."""

        def count(place: int) -> float:
            behind = [
                self.best(ood, besides=(method,)).compute() - self._value(method, ood, "tnr")
                for ood in self.sets(near)
            ]
            return float(sum((0 if b < 0 else 1 if b <= par else 2) == place for b in behind))

        return [
            Figure(f"{self.name}.csv (sets on which {method} is {words})", functools.partial(count, place))
            for place, words in enumerate(("ahead", "up to a point behind", "further behind"))
        ]

    def peak(self, methods: Sequence[str], ood: str = "") -> Figure:
        """Which of the methods, counted from 1, has the highest TNR on a set or on average."""

        def place() -> float:
            found = [(self.tnr(m, ood) if ood else self.mean(m)).compute() for m in methods]
            return float(1 + found.index(max(found)))

        return Figure(f"{self.name}.csv (best of {methods[0]!r} ..., {ood or 'mean'})", place)

    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in rows_of(self.name) if row["tnr"]))

    def sets(self, near: bool = True, shared: "Results | None" = None) -> list[str]:
        """The sets that count in a mean; only those that another file has too, if one is given."""
        rows = rows_of(self.name)
        left_out = {row["ood"] for row in rows if row["note"] == SEEN}
        if not near:
            left_out.update(NEAR.get(rows[0]["in_distribution"], ()))
        there = dict.fromkeys(row["ood"] for row in rows if row["tnr"] and not row["ood"].startswith("mean"))
        both = there if shared is None else shared.sets()
        return [ood for ood in there if ood not in left_out and ood in both]

    def _value(self, method: str, ood: str, column: str) -> float:
        for row in rows_of(self.name):
            if (row["method"], row["ood"]) == (method, ood) and row[column]:
                return float(row[column])
        raise LookupError(f"{self.name}.csv has no {column} of {method} on {ood}")


def on_page(page: str, pattern: str) -> Figure:
    """A number in the text of another page in docs/results."""

    def find() -> float:
        found = re.search(pattern, (RESULTS / page).read_text(encoding="utf-8"))
        if found is None:
            raise LookupError(f"{page} does not have {pattern!r}")
        return float(found[1].replace(",", ""))

    return Figure(f"{page} ({pattern})", find)


def difference(a: Figure, b: Figure) -> Figure:
    return Figure(f"{a.source} less {b.source}", lambda: a.compute() - b.compute())


def least(figures: Iterable[Figure]) -> Figure:
    each = list(figures)
    return Figure(f"least of {each[0].source} ...", lambda: min(f.compute() for f in each))


def most(figures: Iterable[Figure]) -> Figure:
    each = list(figures)
    return Figure(f"most of {each[0].source} ...", lambda: max(f.compute() for f in each))


def gap(a: Figure, b: Figure) -> Figure:
    """By how much two figures differ, whichever is higher."""
    return Figure(f"{a.source} and {b.source}, difference", lambda: abs(a.compute() - b.compute()))


def _which(near: bool, shared: Results | None) -> str:
    return f"{'all' if near else 'far'} sets{f' that {shared.name}.csv has too' if shared else ''}"


def _mean(values: Iterable[float]) -> float:
    each = list(values)
    return sum(each) / len(each)


# --- what words claim --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """What a sentence claims in words."""

    words: Callable[[], str]
    holds: Callable[[], bool]


def above(a: Figure, b: Figure, by: float = 0.0) -> Truth:
    """One figure is above another, by so much at least."""
    return Truth(
        lambda: f"{a.source} = {a.compute():.2f} is not above {b.source} = {b.compute():.2f} by {by}",
        lambda: a.compute() > b.compute() + by,
    )


def within(a: Figure, b: Figure, points: float) -> Truth:
    """Two figures differ by so much at most."""
    return Truth(
        lambda: f"{a.source} = {a.compute():.2f} and {b.source} = {b.compute():.2f} differ by over {points}",
        lambda: abs(a.compute() - b.compute()) <= points,
    )


def without(results: Results, *sets: str) -> Truth:
    """A file does not have these sets."""
    return Truth(
        lambda: f"{results.name}.csv has {', '.join(sets)} now", lambda: not {*sets} & {*results.sets()}
    )


# --- sentences ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sentence:
    text: str
    figures: tuple[Figure, ...]
    so: tuple[Truth, ...]

    def __str__(self) -> str:
        return self.text

    def found(self, page: str) -> re.Match[str]:
        """The place of the sentence; line breaks do not count."""
        words = [re.escape(word).replace(r"\{\}", f"({NUMBER})") for word in self.text.split()]
        places = list(re.finditer(r"\s+".join(words), page))
        assert len(places) == 1, f"the page has this sentence {len(places)} times: {self.text}"
        assert len(places[0].groups()) == len(self.figures), f"figures do not match: {self.text}"
        return places[0]

    def mistakes(self, page: str) -> Iterator[str]:
        """What is wrong with the sentence, in words."""
        said = self.found(page).groups()
        for number, figure in zip(said, self.figures, strict=True):
            right = figure.written(number)
            if number != right:
                yield f"says {number}, should say {right} by {figure.source}"
        yield from (truth.words() for truth in self.so if not truth.holds())


def says(text: str, *figures: Figure, so: Iterable[Truth] = ()) -> Sentence:
    return Sentence(" ".join(text.split()), figures, tuple(so))


def corrected(page: str, sentences: Iterable[Sentence]) -> str:
    """The page with every figure as its file has it."""
    changes = {}
    for sentence in sentences:
        found = sentence.found(page)
        for group, figure in enumerate(sentence.figures, 1):
            changes[found.span(group)] = figure.written(found[group])
    for (begin, end), number in sorted(changes.items(), reverse=True):
        page = page[:begin] + number + page[end:]
    return page


def with_table(page: str, lines: Sequence[str]) -> str:
    """The page with the table that has the same head replaced."""
    assert page.count(lines[0]) == 1, f"the page has no table, or two, with the head {lines[0]}"
    begin = page.index(lines[0])
    end = page.index("\n\n", begin)
    return page[:begin] + "\n".join(lines) + page[end:]


def unchecked(page: str, sentences: Iterable[Sentence], exempt: str) -> list[str]:
    """Numbers of the page outside the figures of the sentences, each with what stands around it.

    What the regular expression `exempt` matches is left out.
    """
    blank = re.sub(exempt, lambda found: " " * len(found[0]), page, flags=re.MULTILINE)
    for sentence in sentences:
        for begin, end in sentence.found(page).regs[1:]:
            blank = blank[:begin] + " " * (end - begin) + blank[end:]
    return [
        page[max(found.start() - 40, 0) : found.end() + 40].replace("\n", " ")
        for found in re.finditer(NUMBER, blank)
    ]
