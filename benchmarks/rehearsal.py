"""What a rehearsal is worth on networks as people have them: AUROC of rules and single methods.

    python -m benchmarks.rehearsal --data DIR --weights DIR --pretrained DIR
    python -m benchmarks.rehearsal --data DIR --pretrained DIR --networks "Lite0, scenes"
    python -m benchmarks.rehearsal --page             # table and picture again, from docs/results

A guard with many members is fitted to each network. It measures every set once. All rules and single methods
are computed from these measurements. When a fault is judged, the weights are learned without the self-made
outliers that resemble it.

`--data` holds the sets of `gramwatch data`, and Imagenette as folders: imagenette/{train,val}/CLASS.
`--weights` holds resnet20_cifar10.pth, `--pretrained` efficientnet_lite0.safetensors under timm's names. A
linear head for scenes is trained here. A further run adds to docs/results/rehearsal.csv and .json: other
networks are kept.
"""

import argparse
import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.document import DOCS, filled
from benchmarks.subjects import NETWORKS, Places, Subject
from gramwatch import Guard
from gramwatch.datasets.faults import FAULTS, NORMALISATIONS
from gramwatch.guard import MEMBERS
from gramwatch.measurement import Measurement
from gramwatch.methods import METHODS
from gramwatch.metrics import auroc
from gramwatch.rehearsal import AT_ONCE, BUDGET, Maker, families_of, learned_weights
from gramwatch.report.frame import TEXT, Words, framed, key, plain
from gramwatch.report.palette import FAINT, Look, look_of
from gramwatch.split import MOST_KEPT, halves

BEFORE = ("gram", "profile", "class_ratio", "energy")
"""The members of the rule before, which all count the same."""
SINGLE = (
    *("msp", "max_logit", "gen", "knn", "nnguide", "vim", "fdbd", "nci", "relative_mahalanobis"),
    *("unit_mahalanobis", "early_mahalanobis", "react", "cadref", "relative_mahalanobis_pp"),
)
"""The single methods beside the members of a guard that rehearses."""
RULES = {"before": "rule before", "equal": "equal weights", "learned": "learned weights"}
FAULTY = 200
"""The test images with each fault."""
KINDS = ("far", "near", "fault")
DARK = ("contrast changed", "brightness changed", "normalised otherwise")
SAME = {
    "sensor_noise": ("noisy", "nothing but noise"),
    "blur": ("blurred", "low resolution", "zoomed"),
    "motion_blur": ("blurred", "low resolution", "zoomed"),
    "nearest": ("blurred", "low resolution", "zoomed"),
    "jpeg": ("in blocks",),
    "overexposed": DARK,
    "underexposed": DARK,
    "dead_rows": ("dead rows",),
    "occlusion": ("occluded",),
    "channels_swapped": ("channels permuted",),
    "inverted": ("inverted",),
    "grey": ("grey",),
    "rotated": ("rotated",),
    "upside_down": ("upside down",),
    "normalisation_left_out": DARK,
    "normalisation_done_twice": DARK,
}
"""The families of self-made outliers that resemble a fault."""


# --- measuring ---------------------------------------------------------------------------------------


def faults_of(subject: Subject) -> Iterator[tuple[str, str, Iterator[Tensor]]]:
    """The name, the title and the inputs of each fault. Faults have their middle strength."""
    images = subject.test[:FAULTY]
    for name, fault in FAULTS.items():
        strength = fault.strengths[len(fault.strengths) // 2]
        if name == "nearest":
            strength = images.shape[-1] // 2
        yield name, fault.title.format(strength), subject.inputs(fault.apply(images, strength, 0))
    grey = images.float().mean(1, keepdim=True).round().to(torch.uint8).expand_as(images)
    yield "grey", "grey", subject.inputs(grey)
    yield "rotated", "rotated", subject.inputs(torch.rot90(images, 1, (2, 3)))
    yield "upside_down", "upside down", subject.inputs(images.flip(2))
    for name, (title, change) in NORMALISATIONS.items():
        yield name, title, subject.inputs(images, *change(subject.mean, subject.std))


def rehearsal_of(subject: Subject, standard: Tensor) -> Iterator[tuple[str, Iterator[Tensor]]]:
    """Self-made outliers of calibration images that standardise, by family, as a guard makes them."""
    kept = torch.cat(list(subject.inputs(subject.calibrate[standard[:MOST_KEPT]])))
    maker = Maker(kept.amin((0, 2, 3)), kept.amax((0, 2, 3)), seed=0)
    families = families_of(kept[:1], maker)
    each = min(len(kept), BUDGET // len(families))
    for place, family in enumerate(families):
        chosen = kept.roll(-place * each, 0)[:each]
        yield family, (maker.images(batch, family) for batch in chosen.split(AT_ONCE))


@dataclass(frozen=True)
class Measured:
    """What all members say of all sets of one network: the scores that every rule is computed from."""

    members: list[str]
    usual: Tensor
    """The standardised scores of calibration images that standardise, `(N, members)`."""
    families: dict[str, Tensor]
    """Those of self-made outliers, by family."""
    test: dict[str, Tensor]
    """The scores of test images: `raw` and `standard`."""
    sets: list[dict[str, Any]]
    """The outlier sets: `title`, `kind`, `fault`, and their `raw` and `standard` scores."""
    sizes: dict[str, int]

    @staticmethod
    def of(name: str, subject: Subject) -> "Measured":
        """Fit a guard with many members, and measure every set once."""
        guard = Guard(subject.network, members=(*MEMBERS, *SINGLE))
        guard.fit(subject.inputs(subject.fit))

        def measured(inputs: Iterator[Tensor]) -> Measurement:
            return Measurement.joined([guard.measure(batch) for batch in inputs])

        calibration = measured(subject.inputs(subject.calibrate))
        fitting, _ = halves(len(calibration), 0)
        rule = guard.rule().fit(calibration[fitting])

        def scores(measured: Measurement, left_out: bool = False) -> dict[str, Tensor]:
            raw = rule.member_scores(measured, left_out)
            standard = torch.where(measured.finite.unsqueeze(1), rule.standard(raw), torch.inf)
            return {"raw": torch.where(measured.finite.unsqueeze(1), raw, torch.inf), "standard": standard}

        test = scores(measured(subject.inputs(subject.test)))
        families = {}
        for family, inputs in rehearsal_of(subject, fitting):
            outliers = measured(inputs)
            families[family] = scores(outliers[outliers.finite])["standard"]
        sets: list[dict[str, Any]] = []

        def add(title: str, kind: str, inputs: Iterator[Tensor], fault: str = "") -> None:
            found = scores(measured(inputs))
            sets.append({"title": title, "kind": kind, "fault": fault, **found})
            print(f"{name}: {title}", flush=True)

        for title, (kind, images) in subject.others.items():
            add(title, kind, subject.inputs(images))
        for fault, title, inputs in faults_of(subject):
            add(title, "fault", inputs, fault)
        sizes = {"fit": len(subject.fit), "calibrate": len(subject.calibrate), "test": len(subject.test)}
        usual = scores(calibration[fitting], left_out=True)["standard"]
        return Measured(list(guard.members), usual, families, test, sets, sizes)

    def weights(self, members: Sequence[str], without: Sequence[str] = ()) -> Tensor:
        """The weights that a rehearsal learns for some members, without some families of outliers."""
        columns = self.columns(members)
        known = {f: s[:, columns] for f, s in self.families.items() if f not in without}
        return learned_weights(self.usual[:, columns], known)

    def columns(self, members: Sequence[str]) -> list[int]:
        """The places of members."""
        return [self.members.index(member) for member in members if member in self.members]


def measured_once(name: str, places: Places) -> Measured:
    """The measurements of a network, from an earlier run if there was one."""
    path = places.kept / f"{name}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(vars(Measured.of(name, NETWORKS[name](places))), path)
    return Measured(**torch.load(path, weights_only=True))


def study(name: str, measured: Measured) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of one network, and the weights that its rehearsal learned."""
    shipped, before = measured.columns(MEMBERS), measured.columns(BEFORE)
    titles = ["Gram" if member == "gram" else METHODS[member].title for member in measured.members]
    rows: list[dict[str, Any]] = []
    for of in measured.sets:
        learned = measured.weights(MEMBERS, SAME.get(of["fault"], ()))
        pairs = {
            RULES["before"]: [s["standard"][:, before].sum(1) for s in (measured.test, of)],
            RULES["equal"]: [s["standard"][:, shipped].sum(1) for s in (measured.test, of)],
            RULES["learned"]: [joined(s["standard"][:, shipped], learned) for s in (measured.test, of)],
            **{title: [s["raw"][:, i] for s in (measured.test, of)] for i, title in enumerate(titles)},
        }
        for method, pair in pairs.items():
            value = round(100 * auroc(*pair), 2)
            rows.append(
                {"network": name, "set": of["title"], "kind": of["kind"], "method": method, "auroc": value}
            )
    learned = measured.weights(MEMBERS)
    of_members = zip([measured.members[i] for i in shipped], learned.tolist(), strict=True)
    return rows, {**measured.sizes, "weights": {member: round(weight, 3) for member, weight in of_members}}


def joined(standard: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum, infinite for inputs that are not finite."""
    return torch.where(standard.isfinite().all(1), (standard * weights).sum(1), torch.inf)


# --- files, table and picture ------------------------------------------------------------------------


def write(rows: list[dict[str, Any]], facts: Mapping[str, Any], results: Path) -> None:
    """Write the rows and the weights, networks in their usual order."""
    order = list(NETWORKS)
    with (results / "rehearsal.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ("network", "set", "kind", "method", "auroc"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: order.index(row["network"])))
    kept = {name: facts[name] for name in order if name in facts}
    (results / "rehearsal.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def held(results: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows and the weights that are written already."""
    if not (results / "rehearsal.csv").is_file():
        return [], {}
    with (results / "rehearsal.csv").open(encoding="utf-8", newline="") as file:
        rows = [{**row, "auroc": float(row["auroc"])} for row in csv.DictReader(file)]
    return rows, json.loads((results / "rehearsal.json").read_text(encoding="utf-8"))


class Figures:
    """The figures of one network: AUROC by method and set, in percent."""

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        mine = [row for row in rows if row["network"] == name]
        self.kinds = {row["set"]: row["kind"] for row in mine}
        self.of = {(row["method"], row["set"]): row["auroc"] for row in mine}
        methods = dict.fromkeys(row["method"] for row in mine)
        self.singles = [method for method in methods if method not in RULES.values()]

    def best(self, kinds: Sequence[str] = KINDS) -> str:
        """The single method with the highest mean over the sets of some kinds."""
        return max(self.singles, key=lambda method: self.mean(method, kinds))

    def mean(self, method: str, kinds: Sequence[str] = KINDS) -> float:
        """The mean over the sets of some kinds."""
        return mean(self.of[method, title] for title, kind in self.kinds.items() if kind in kinds)

    def gain(self, draws: int = 2000) -> tuple[float, float, float]:
        """The mean gain of learned weights over the rule before, with its 95 % interval over sets."""
        learned, before = RULES["learned"], RULES["before"]
        gains = torch.tensor(
            [self.of[learned, t] - self.of[before, t] for t, kind in self.kinds.items() if kind in KINDS]
        )
        chosen = torch.randint(len(gains), (draws, len(gains)), generator=torch.Generator().manual_seed(0))
        low, high = gains[chosen].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
        return float(gains.mean()), low, high

    @property
    def behind(self) -> dict[str, tuple[float, str]]:
        """How far learned weights are behind the best single method of each set, and its name."""
        titles = [title for title, kind in self.kinds.items() if kind in KINDS]
        best = {title: max(self.singles, key=lambda method: self.of[method, title]) for title in titles}
        return {t: (self.of[best[t], t] - self.of[RULES["learned"], t], best[t]) for t in titles}


def table(figures: Mapping[str, Figures]) -> str:
    """The means over kinds of sets of the rules and of the best single method."""
    lines = ["| network | method | mean | far | near | faults | controls |", "| --- | --- |" + " ---: |" * 5]
    for name, of in figures.items():
        for method in (*RULES.values(), of.best()):
            cells = [of.mean(method), *(of.mean(method, (kind,)) for kind in KINDS)]
            controls = [f"{of.mean(method, ('control',)):.2f}" if "control" in of.kinds.values() else ""]
            title = method if method in RULES.values() else f"best single: {method}"
            numbers = [*(f"{cell:.2f}" for cell in cells), *controls]
            lines.append(f"| {name} | {title} | {' | '.join(numbers)} |")
        best = [of.best((kind,)) for kind in KINDS]
        named = [f"{of.mean(m, (kind,)):.2f} ({m})" for m, kind in zip(best, KINDS, strict=True)]
        lines.append(f"| {name} | best single of a kind |  | {' | '.join(named)} |  |")
    return "\n".join(lines)


def gains(figures: Mapping[str, Figures]) -> str:
    """The gain over the rule before, by network."""
    lines = ["| network | gain over the rule before | 95 % interval over sets |", "| --- | ---: | ---: |"]
    for name, of in figures.items():
        gain, low, high = of.gain()
        lines.append(f"| {name} | {gain:+.2f} | {low:+.2f} to {high:+.2f} |")
    return "\n".join(lines)


def weights_table(facts: Mapping[str, Any]) -> str:
    """What the rehearsal found out about each network."""
    lines = ["| network | " + " | ".join(MEMBERS) + " |", "| --- |" + " ---: |" * len(MEMBERS)]
    for name, of in facts.items():
        cells = [f"{of['weights'].get(member, 0):.2f}" for member in MEMBERS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def losses(figures: Mapping[str, Figures], limit: float = 2.0) -> str:
    """Where the rule with learned weights is behind a single method, or behind the rule before."""
    behind = [gap for of in figures.values() for gap, _ in of.behind.values()]
    close, far = sum(gap <= 0.5 for gap in behind), sum(gap > limit for gap in behind)
    lines = [
        f"Over {len(behind)} pairs of a network and a set, learned weights are at most 0.5 points behind the "
        f"best single method of the set on {close}, and more than {limit:g} points behind on {far}:",
        "",
        f"| network | set | {RULES['before']} | {RULES['learned']} | best single method |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, of in figures.items():
        for title, (gap, best) in sorted(of.behind.items(), key=lambda item: -item[1][0]):
            if gap > limit:
                rules = [f"{of.of[RULES[rule], title]:.2f}" for rule in ("before", "learned")]
                lines.append(
                    f"| {name} | {title} | {' | '.join(rules)} | {of.of[best, title]:.2f} ({best}) |"
                )
    worse = [
        f"{name}: {title} ({of.of[RULES['learned'], title] - of.of[RULES['before'], title]:+.2f})"
        for name, of in figures.items()
        for title in of.behind
        if of.of[RULES["learned"], title] < of.of[RULES["before"], title] - 0.5
    ]
    told = "; ".join(worse) or "none"
    return "\n".join([*lines, "", f"Sets that lose more than 0.5 points against the rule before: {told}."])


def picture(figures: Mapping[str, Figures], path: Path) -> None:
    """Networks x kinds: the rule before, learned weights, and the best single method of each kind."""
    looks = {
        RULES["before"]: Look("#9AA0A8", "o"),
        RULES["learned"]: look_of("Guard"),
        "best single method of the kind": Look("#D55E00", "D"),
    }
    words = Words(
        "Rehearsal on networks as people have them",
        protocol="AUROC in percent, mean over the sets of a kind. The best single method of a kind, on each "
        "network, is known only afterwards. Weights are learned without the families that resemble a fault.",
    )
    frame = framed(
        words,
        0.7 + 0.4 * len(figures),
        columns=len(KINDS),
        sharey=True,
        legend=[key(look, title) for title, look in looks.items()],
    )
    for axes, kind in zip(frame.axes[0], KINDS, strict=True):
        for place, of in enumerate(figures.values()):
            for (title, look), up in zip(looks.items(), (-0.18, 0, 0.18), strict=True):
                value = of.mean(title if title in RULES.values() else of.best((kind,)), (kind,))
                axes.plot(value, place + up, look.mark, color=look.colour, ms=5.5)
            axes.axhline(place + 0.5, color=FAINT, lw=0.6)
        axes.set_title({"fault": "faults"}.get(kind, kind), fontsize=TEXT, loc="left")
        axes.set_yticks(range(len(figures)), list(figures))
        axes.set_ylim(len(figures) - 0.5, -0.5)
        axes.grid(axis="x", color=FAINT, lw=0.6)
        axes.set_axisbelow(True)
        plain(axes)
    frame.write(path)


def write_page(docs: Path) -> None:
    """The picture, and the parts of docs/guard-study.md between the markers."""
    results, page = docs / "results", docs / "guard-study.md"
    rows, facts = held(results)
    figures = {name: Figures(name, rows) for name in facts}
    picture(figures, results / "rehearsal.png")
    sizes = "; ".join(f"{n}: {f['fit']:,}, {f['calibrate']:,}, {f['test']:,}" for n, f in facts.items())
    generated = {
        "rehearsal": f"Images that fit, calibrate and test: {sizes}.\n\n{table(figures)}\n\n{gains(figures)}",
        "rehearsal weights": weights_table(facts),
        "rehearsal losses": losses(figures),
    }
    page.write_text(filled(page.read_text(encoding="utf-8"), generated), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of the sets")
    parser.add_argument("--weights", type=Path, help="the folder of the CIFAR network")
    parser.add_argument("--pretrained", type=Path, help="the folder of the ImageNet network")
    parser.add_argument(
        "--kept", type=Path, default=Path("rehearsal"), help="the folder of trained networks and measurements"
    )
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the pages")
    parser.add_argument("--page", action="store_true", help="only write the table and the picture again")
    args = parser.parse_args()
    nowhere = Path()
    places = Places(args.data or nowhere, args.weights or nowhere, args.pretrained or nowhere, args.kept)
    for name in [] if args.page else args.networks:
        new, facts_of = study(name, measured_once(name, places))
        rows, facts = held(args.docs / "results")
        others = [row for row in rows if row["network"] != name]
        write([*others, *new], {**facts, name: facts_of}, args.docs / "results")
    write_page(args.docs)


if __name__ == "__main__":
    main()
