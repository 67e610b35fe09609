"""A page about scored images: one HTML file that needs nothing else and asks for nothing from the network.

Jinja2 escapes every text. A content security policy lets the page run its own two scripts only, named by
their checksums, so a path or a class name that looks like code stays text.
"""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gramwatch.errors import DataError
from gramwatch.explain.thumbnails import thumbnail
from gramwatch.files import __version__
from gramwatch.inputs.readers import Opener
from gramwatch.report import charts
from gramwatch.report.charts import Chart, percent
from gramwatch.report.scores import Numbers, Scores, Truths

TEMPLATES = Path(__file__).parent / "templates"
MOST_GROUPS, IN_A_GROUP = 12, 8
MOST_CLASSES = 20
"""The most classes in a heat map: those with most flagged images."""
MOST_LAYERS = 20
"""The most layers in a heat map: those with the largest values."""
MOST_ERRORS = 20


@dataclass(frozen=True)
class About:
    """The facts in the guard's file."""

    facts: Sequence[tuple[str, str]] = ()
    """Names and values, such as the network and what it was fitted on."""
    level: float | None = None
    threshold: float | None = None
    """The score above which an image is flagged."""
    calibration: Numbers | None = None
    """The scores of the calibration images that rank."""
    rates: tuple[float, float] | None = None
    """The rates of false alarms between which nine of ten calibrations of this size lie."""


@dataclass(frozen=True)
class Group:
    """Images that were flagged for similar reasons."""

    title: str
    images: Sequence[int]
    """Their numbers in the table. The most typical are first."""
    about: str = ""
    details: str = ""
    """Details for readers who know the network: members and layers. They are folded away."""


@dataclass(frozen=True)
class Reasons:
    """The explanations on the page."""

    sentences: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """By the number of the image in the table."""
    maps: Mapping[int, str] = field(default_factory=dict)
    """Data URIs of maps."""
    groups: Sequence[Group] = ()
    grouped: str = ""
    """How the groups were found."""
    cells: Sequence[tuple[str, str, str, float]] = ()
    """Mean contributions of flagged images: class, member, tap, value."""
    apart: Sequence[tuple[str, str, str, float]] = ()
    """The layers that separate a set from the first one: set, member, tap, AUROC."""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Card:
    """An image with its verdict."""

    path: str
    set_name: str
    predicted: str
    score: str
    p_value: str
    flagged: bool
    members: Sequence[tuple[str, str, bool]]
    """Name, p-value, and whether it is at most that of the threshold."""
    image: str | None
    map: str | None
    sentences: Sequence[str]


def page(
    scores: Scores,
    about: About | None = None,
    reasons: Reasons | None = None,
    *,
    opener: Opener | None = None,
    images: int = 24,
    title: str = "Out-of-distribution report",
) -> str:
    """The HTML of a page.

    Args:
        scores: the table.
        about: what the guard's file says, if it is there.
        reasons: explanations of some images.
        opener: opens an image by its path. Without it there are no pictures.
        images: the number of the most suspicious images that are shown.
        title: the heading.

    """
    about, reasons = about or About(), reasons or Reasons()
    builder = _Builder(scores, about, reasons, opener)
    data = json_text({"charts": {c.name: c.spec for c in builder.charts}, "table": table(scores)})
    library, own = (_script(text) for text in (charts.scripts(), _template("page.js")))
    return str(
        _environment()
        .get_template("page.html")
        .render(
            title=title,
            version=__version__,
            policy=_policy(library, own),
            style=_template("page.css"),
            library=library,
            script=own,
            data=data,
            scores=scores,
            about=about,
            reasons=reasons,
            counts=builder.counts(),
            charts={chart.name: chart for chart in builder.charts},
            groups=builder.groups(),
            cards=[builder.card(i) for i in scores.by_score[:images]] if opener else [],
            sets=builder.sets(),
            errors=[(path, error) for path, error in zip(scores.paths, scores.errors, strict=True) if error],
            most_errors=MOST_ERRORS,
            several_folders=len(set(scores.folders)) > 1,
        )
    )


# --- safe text ---------------------------------------------------------------------------------------


def _environment() -> Any:
    charts.altair()  # raises the error that names the extra
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template(name: str) -> Any:
    from markupsafe import Markup

    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def json_text(values: Any) -> Any:
    """JSON that can stand inside a script element: it has no `<`, so it cannot end the element."""
    from markupsafe import Markup

    text = json.dumps(values, separators=(",", ":"), allow_nan=False)  # ASCII only
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _script(text: str) -> Any:
    """A script that can stand inside a script element."""
    from markupsafe import Markup

    return Markup(text.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def _policy(*texts: str) -> str:
    checksums = [base64.b64encode(hashlib.sha256(str(text).encode()).digest()).decode() for text in texts]
    allowed = " ".join(f"'sha256-{checksum}'" for checksum in checksums)
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}; "
        "base-uri 'none'; form-action 'none'"
    )


# --- the table ---------------------------------------------------------------------------------------


def table(scores: Scores) -> dict[str, Any]:
    """The columns of the table, compact: texts that occur often are numbers into a list of texts."""
    folders, names = [], []
    for path in scores.paths:
        folder, slash, name = path.replace("\\", "/").rpartition("/")
        folders.append(folder + slash)
        names.append(name)
    remarks = [error or note for error, note in zip(scores.errors, scores.notes, strict=True)]
    columns = {
        "folders": _indexed(folders),
        "names": names,
        "sets": {"texts": scores.names, "of": scores.set_of.tolist()},
        "classes": _indexed(scores.predicted),
        "remarks": _indexed(remarks),
        "score": _short(scores.score),
        "p": _short(scores.p_value),
        "flagged": scores.is_ood.astype(int).tolist(),
        "members": {name: _short(values) for name, values in scores.parts.items()},
    }
    if scores.selected is not None:
        columns["selected"] = scores.selected.astype(int).tolist()
    return columns


def _indexed(texts: Sequence[str]) -> dict[str, Any]:
    known = {text: number for number, text in enumerate(sorted(set(texts)))}
    return {"texts": list(known), "of": [known[text] for text in texts]}


def _short(values: Numbers) -> list[Any]:
    """Numbers of four digits. An infinite one is a text, a missing one None."""
    numbers: list[Any] = []
    for value in values.tolist():
        if value != value:
            numbers.append(None)
        elif abs(value) == float("inf"):
            numbers.append("inf")
        else:
            short = float(f"{value:.4g}")
            numbers.append(int(short) if short == int(short) else short)
    return numbers


# --- what is on the page -----------------------------------------------------------------------------


class _Builder:
    """Counts, charts, groups and cards of one page."""

    def __init__(self, scores: Scores, about: About, reasons: Reasons, opener: Opener | None) -> None:
        self.scores, self.about, self.reasons, self._opener = scores, about, reasons, opener
        flagged = scores.p_value[scores.is_ood]
        self.alpha = (
            1 - about.level if about.level is not None else float(flagged.max()) if len(flagged) else None
        )
        self._pictures: dict[int, str | None] = {}
        self.charts = list(self._charts())

    def counts(self) -> dict[str, Any]:
        """The figures at the top."""
        scores, alpha = self.scores, self.alpha
        readable, flagged = int(scores.readable.sum()), int((scores.readable & scores.is_ood).sum())
        return {
            "images": len(scores),
            "readable": readable,
            "flagged": flagged,
            "share": percent(flagged / readable) if readable else "none",
            "expected": None if alpha is None else alpha * readable,
            "alpha": alpha,
            "range": None if self.about.rates is None else [rate * readable for rate in self.about.rates],
            "unreadable": len(scores) - readable,
            "selected": None if scores.selected is None else int(scores.selected.sum()),
        }

    def sets(self) -> list[dict[str, Any]]:
        """The sets with their counts."""
        entries = []
        for number, name in enumerate(self.scores.names):
            inside = self.scores.of_set(number)
            flagged = int((inside & self.scores.is_ood).sum())
            count = int(inside.sum())
            values = self.scores.score[inside & np.isfinite(self.scores.score)]
            entries.append(
                {
                    "name": name,
                    "images": count,
                    "flagged": flagged,
                    "share": percent(flagged / count) if count else "none",
                    "median": f"{float(np.median(values)):.3g}" if len(values) else "none",
                }
            )
        return entries

    # --- charts --------------------------------------------------------------------------------------

    def _charts(self) -> Any:
        scores = self.scores
        if np.isfinite(scores.score).any():
            yield charts.score_chart(scores, self.about.threshold, self.about.calibration)
        if scores.readable.any():
            yield charts.p_value_chart(scores, self.alpha)
        if len(scores.names) > 1:
            yield self._by_set()
        if scores.parts and self.alpha is not None and scores.is_ood.any():
            yield self._members_by_class()
            if len(scores.names) > 1:
                yield self._members_by_set()
        yield from self._layers()
        if 1 < len(set(scores.folders)) <= max(200, len(scores) // 10):
            yield self._by_folder()

    def _by_set(self) -> Chart:
        rows = [(row["name"], row["flagged"], row["images"]) for row in self.sets()]
        about = "The share of images that were flagged, set by set."
        return charts.share_chart("sets", "Flagged by set", about, rows, self.alpha, "set")

    def _by_folder(self) -> Chart:
        count: Counter[str] = Counter()
        flagged: Counter[str] = Counter()
        for folder, readable, is_ood in zip(
            self.scores.folders, self.scores.readable, self.scores.is_ood, strict=True
        ):
            count[folder] += bool(readable)
            flagged[folder] += bool(readable and is_ood)
        names = sorted((name for name in count if count[name]), key=lambda name: -flagged[name] / count[name])
        rows = [(name or ".", flagged[name], count[name]) for name in names]
        about = "The share of images that were flagged, folder by folder, the largest first."
        return charts.share_chart("folders", "Flagged by folder", about, rows, self.alpha, "folder")

    def _shares(self, chosen: Truths) -> list[tuple[str, float]]:
        """The share of the chosen images whose p-value of a member is at most that of the threshold."""
        alpha, count = self.alpha or 0.0, max(1, int(chosen.sum()))
        return [
            (name, float((values[chosen] <= alpha * (1 + 1e-9)).sum()) / count)
            for name, values in self.scores.parts.items()
        ]

    def _members_by_class(self) -> Chart:
        predicted = np.array(self.scores.predicted, dtype=object)
        groups = [(name, self.scores.readable & (predicted == name)) for name in self._classes()]
        return self._members("members", "predicted class", "images of a predicted class", groups)

    def _members_by_set(self) -> Chart:
        groups = [(name, self.scores.of_set(number)) for number, name in enumerate(self.scores.names)]
        return self._members("member-sets", "set", "the images of a set", groups)

    def _members(self, name: str, by: str, images: str, groups: Sequence[tuple[str, Truths]]) -> Chart:
        """The share of images in each group that a member finds unusual by itself."""
        cells = [(group, member, share) for group, chosen in groups for member, share in self._shares(chosen)]
        about = (
            f"Which members of the guard find {images} unusual by themselves: the share of images whose "
            f"p-value of the member is at most {self.alpha:.4g}."
        )
        axes = (by.split()[-1], "member")
        return charts.heat_chart(name, f"Members by {by}", about, axes, cells, shares=True)

    def _classes(self) -> list[str]:
        """The predicted classes with most flagged images, sorted by name."""
        flagged = Counter(
            name for name, is_ood in zip(self.scores.predicted, self.scores.is_ood, strict=True) if is_ood
        )
        return sorted(name for name, _ in flagged.most_common(MOST_CLASSES))

    def _layers(self) -> Any:
        """A heat map for each member that has parts."""
        classes = set(self._classes())
        members = dict.fromkeys(member for _, member, _, _ in self.reasons.cells)
        for number, member in enumerate(members):
            every = [
                (name, tap, value)
                for name, whose, tap, value in self.reasons.cells
                if whose == member and name in classes
            ]
            cells = _largest(every)
            about = (
                f"What each layer adds to the scores of flagged images, according to {member}: means by "
                "predicted class. Red adds to a score, blue takes away from it. The colours are of square "
                f"roots. {_how_many(len({tap for _, tap, _ in cells}), len({tap for _, tap, _ in every}))}"
            )
            title = f"Layers and classes: {member}"
            yield charts.heat_chart(f"layers-{number}", title, about, ("class", "layer"), cells, shares=False)

    # --- images --------------------------------------------------------------------------------------

    def groups(self) -> list[dict[str, Any]]:
        """The groups with their pictures: those of explanations, or else groups by unusual members."""
        every_group = self.reasons.groups or by_members(self.scores, self.alpha)
        everyone = max(1, sum(len(group.images) for group in every_group))
        return [
            {
                "title": group.title,
                "about": group.about,
                "details": group.details,
                "total": len(group.images),
                "share": percent(len(group.images) / everyone),
                "classes": _most_common(self.scores.predicted, group.images),
                "folders": _most_common(self.scores.folders, group.images),
                "cards": [self.card(i) for i in group.images[:IN_A_GROUP]] if self._opener else [],
            }
            for group in every_group[:MOST_GROUPS]
        ]

    def card(self, i: int) -> Card:
        """One image."""
        scores, alpha = self.scores, self.alpha or 0.0
        return Card(
            path=scores.paths[i],
            set_name=scores.names[scores.set_of[i]] if len(scores.names) > 1 else "",
            predicted=scores.predicted[i],
            score=f"{scores.score[i]:.4g}",
            p_value=f"{scores.p_value[i]:.2g}",
            flagged=bool(scores.is_ood[i]),
            members=[(n, f"{v[i]:.2g}", bool(v[i] <= alpha * (1 + 1e-9))) for n, v in scores.parts.items()],
            image=self._picture(i),
            map=self.reasons.maps.get(i),
            sentences=self.reasons.sentences.get(i, ()),
        )

    def _picture(self, i: int) -> str | None:
        if i not in self._pictures:
            self._pictures[i] = None if self._opener is None else _shown(self._opener, self.scores.paths[i])
        return self._pictures[i]


def _largest(cells: Sequence[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    """The cells of the layers with the largest values, in the order of the network."""
    most: dict[str, float] = {}
    for _, tap, value in cells:
        most[tap] = max(most.get(tap, 0.0), abs(value))
    largest = set(sorted(most, key=lambda tap: -most[tap])[:MOST_LAYERS])
    return [cell for cell in cells if cell[1] in largest]


def _how_many(shown: int, layers: int) -> str:
    if shown < layers:
        return (
            f"The {shown} of {layers} layers with the largest values are shown, in the order of the network."
        )
    return "Layers are in the order of the network."


def _shown(opener: Opener, path: str) -> str | None:
    """The thumbnail of an image. None if it cannot be read."""
    try:
        return thumbnail(opener(path)[0])
    except DataError:
        return None


def _most_common(texts: Sequence[str], images: Sequence[int]) -> str:
    """The three most frequent texts of some images, with their shares."""
    count = Counter(texts[i] or "." for i in images)
    total = sum(count.values())
    return ", ".join(f"{text} {100 * n / total:.0f} %" for text, n in count.most_common(3))


def by_members(scores: Scores, alpha: float | None) -> list[Group]:
    """Groups of flagged images by the members that find them unusual by themselves, largest first."""
    if alpha is None or not scores.parts:
        return []
    groups: dict[tuple[str, ...], list[int]] = {}
    for i in scores.by_score:
        if scores.is_ood[i]:
            key = tuple(name for name, values in scores.parts.items() if values[i] <= alpha * (1 + 1e-9))
            groups.setdefault(key, []).append(i)
    named = [
        Group(
            " and ".join(key) if key else "only all members together",
            images,
            "The p-value of these members is small by itself; that of the others is not."
            if key
            else "No member finds these images unusual by itself.",
        )
        for key, images in groups.items()
    ]
    return sorted(named, key=lambda group: -len(group.images))
