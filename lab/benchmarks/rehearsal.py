"""What a rehearsal is worth on networks as people have them: AUROC of rules and single methods.

    python -m lab.benchmarks.rehearsal --data DIR --weights DIR --pretrained DIR
    python -m lab.benchmarks.rehearsal --data DIR --pretrained DIR --networks "Lite0, scenes"

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
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from gramwatch import Guard
from gramwatch.detect.measurement import Measurement
from gramwatch.detect.split import MOST_KEPT, halves
from gramwatch.explain.frame import FAINT, TEXT, Words, plain
from gramwatch.guard import rehearsal
from gramwatch.guard.guard import MEMBERS
from gramwatch.guard.rehearsal import AT_ONCE, BUDGET, Maker, families_of, learned_weights
from gramwatch.methods import METHODS
from gramwatch.numerics.metrics import auroc
from gramwatch_lab.datasets.faults import FAULTS, NORMALISATIONS
from gramwatch_lab.figures.looks import Look, framed_with_legend, key, look_of
from lab.benchmarks import document
from lab.benchmarks.cells import DOCS, Cells, MissingCellError, named
from lab.benchmarks.subjects import FAMILIES, NETWORKS, OPENOOD, Places, Subject

BEFORE = ("gram", "profile", "class_ratio", "energy")
"""The members of the rule before, which all count the same."""
SINGLE = (
    *("msp", "max_logit", "gen", "knn", "nnguide", "vim", "fdbd", "nci", "relative_mahalanobis"),
    *("unit_mahalanobis", "early_mahalanobis", "react", "cadref", "relative_mahalanobis_pp"),
)
"""The single methods beside the members of a guard that rehearses."""
RULES = {"before": "rule before", "equal": "equal weights", "learned": "learned weights"}
IN_USE = "weights in use"
"""Learned with all families of outliers, as a guard learns them, although some resemble the fault."""
FAULTY = 200
"""The test images with each fault."""
KINDS = ("far", "near", "fault")
ALL = {**NETWORKS, **OPENOOD}
"""The networks of the study, and those by a benchmark's recipe, which have a table of their own."""
OPENOOD_FAR = ("SVHN", "textures", "digits", "MiniPlaces")
"""Our far sets that are like those of OpenOOD's benchmark for CIFAR-10. The near sets are alike."""
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


@dataclass(frozen=True)
class Variant:
    """A rule that might have been chosen."""

    members: tuple[str, ...] = MEMBERS
    penalty: float = rehearsal.PENALTY
    contents: float = rehearsal.CONTENTS_COUNT
    learns: bool = True


def without(name: str) -> tuple[str, ...]:
    return tuple(member for member in MEMBERS if member != name)


SHIPPED = "the rule"
VARIANTS = {
    SHIPPED: Variant(),
    "equal weights": Variant(learns=False),
    "four members, learned weights": Variant(BEFORE),
    **{f"without {name}": Variant(without(name)) for name in MEMBERS},
    "with NNGuide": Variant((*MEMBERS, "nnguide")),
    "with CADRef": Variant((*MEMBERS, "cadref")),
    "with unit Mahalanobis": Variant((*MEMBERS, "unit_mahalanobis")),
    "penalty 0.03": Variant(penalty=0.03),
    "penalty 0.3": Variant(penalty=0.3),
    "contents once": Variant(contents=1),
    "contents threefold": Variant(contents=3),
}
DRAWS = 200
"""The draws of a bootstrap over images."""
COSTLY = 0.1
"""A fault is costly if it changes at least this share of the predictions."""


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
    of_family = min(len(kept), BUDGET // len(families))
    for place, family in enumerate(families):
        chosen = kept.roll(-place * of_family, 0)[:of_family]
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
            member_scores = scores(measured(inputs))
            sets.append({"title": title, "kind": kind, "fault": fault, **member_scores})
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
        torch.save(vars(Measured.of(name, ALL[name](places))), path)
    return Measured(**torch.load(path, weights_only=True))


def changed_once(name: str, places: Places) -> dict[str, float]:
    """The share of test images whose prediction each fault changes, from an earlier run if there was one."""
    path = places.kept / f"{name}.json"
    if not path.is_file():
        subject = ALL[name](places)

        @torch.inference_mode()
        def predicted(inputs: Iterator[Tensor]) -> Tensor:
            return torch.cat([subject.network(batch.to(places.device)).argmax(1).cpu() for batch in inputs])

        plain = predicted(subject.inputs(subject.test[:FAULTY]))
        shares = {
            title: float((predicted(inputs) != plain).double().mean())
            for _, title, inputs in faults_of(subject)
        }
        path.write_text(json.dumps(shares), encoding="utf-8")
    return dict(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def settings_of(variant: Variant) -> Iterator[None]:
    """Learn weights with the settings of a variant."""
    before = rehearsal.PENALTY, rehearsal.CONTENTS_COUNT
    rehearsal.PENALTY, rehearsal.CONTENTS_COUNT = variant.penalty, variant.contents
    try:
        yield
    finally:
        rehearsal.PENALTY, rehearsal.CONTENTS_COUNT = before


def kinds_of(measured: Measured, variant: Variant) -> dict[str, float]:
    """The mean AUROC of a variant, by kind of outliers."""
    columns = measured.columns(variant.members)
    by_kind: dict[str, list[float]] = {}
    with settings_of(variant):
        for of in measured.sets:
            weights = torch.ones(len(columns), dtype=torch.float64)
            if variant.learns:
                weights = measured.weights(variant.members, SAME.get(of["fault"], ()))
            pair = [joined(s["standard"][:, columns], weights) for s in (measured.test, of)]
            by_kind.setdefault(of["kind"], []).append(100 * auroc(*pair))
    return {kind: round(mean(by_kind[kind]), 3) for kind in KINDS}


def gain_interval(measured: Measured) -> tuple[float, float]:
    """The 95 % interval of the mean gain over the rule before, by a bootstrap over images."""
    shipped, before = measured.columns(MEMBERS), measured.columns(BEFORE)
    random = torch.Generator().manual_seed(0)
    draws = torch.zeros(DRAWS, dtype=torch.float64)
    sets = [of for of in measured.sets if of["kind"] in KINDS]
    for of in sets:
        weights = measured.weights(MEMBERS, SAME.get(of["fault"], ()))
        new, old = (
            [joined(s["standard"][:, columns], w) for s in (measured.test, of)]
            for columns, w in ((shipped, weights), (before, torch.ones(len(before), dtype=torch.float64)))
        )
        for draw in range(DRAWS):
            chosen = [torch.randint(len(s), (len(s),), generator=random) for s in new]
            gain = auroc(*(s[i] for s, i in zip(new, chosen, strict=True)))
            gain -= auroc(*(s[i] for s, i in zip(old, chosen, strict=True)))
            draws[draw] += 100 * gain / len(sets)
    low, high = draws.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return round(low, 3), round(high, 3)


def study(name: str, measured: Measured) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of one network, and the weights that its rehearsal learned."""
    shipped, before = measured.columns(MEMBERS), measured.columns(BEFORE)
    titles = ["Gram" if member == "gram" else METHODS[member].record.title for member in measured.members]
    rows: list[dict[str, Any]] = []
    in_use = measured.weights(MEMBERS)
    for of in measured.sets:
        learned = measured.weights(MEMBERS, SAME.get(of["fault"], ()))
        pairs = {
            RULES["before"]: [s["standard"][:, before].sum(1) for s in (measured.test, of)],
            RULES["equal"]: [s["standard"][:, shipped].sum(1) for s in (measured.test, of)],
            RULES["learned"]: [joined(s["standard"][:, shipped], learned) for s in (measured.test, of)],
            IN_USE: [joined(s["standard"][:, shipped], in_use) for s in (measured.test, of)],
            **{title: [s["raw"][:, i] for s in (measured.test, of)] for i, title in enumerate(titles)},
        }
        for method, pair in pairs.items():
            value = round(100 * auroc(*pair), 2)
            rows.append(
                {"network": name, "set": of["title"], "kind": of["kind"], "method": method, "auroc": value}
            )
    of_members = zip([measured.members[i] for i in shipped], in_use.tolist(), strict=True)
    facts = {
        **measured.sizes,
        "weights": {member: round(weight, 3) for member, weight in of_members},
        "gain over images": gain_interval(measured),
        "variants": {title: kinds_of(measured, variant) for title, variant in VARIANTS.items()},
    }
    return rows, facts


def joined(standard: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum, infinite for inputs that are not finite."""
    return torch.where(standard.isfinite().all(1), (standard * weights).sum(1), torch.inf)


# --- files, table and picture ------------------------------------------------------------------------


def write(rows: list[dict[str, Any]], facts: Mapping[str, Any], results: Path) -> None:
    """Write the rows and the weights, networks in their usual order."""
    order = list(ALL)
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
        aurocs = {(row["method"], row["set"]): row["auroc"] for row in mine}
        self.of = Cells(aurocs, f"docs/results/rehearsal.csv, {name}")
        methods = dict.fromkeys(row["method"] for row in mine)
        self.singles = [method for method in methods if method not in (*RULES.values(), IN_USE)]

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


def family_of(name: str) -> str:
    """The family of a network."""
    return next(f for f, starts in FAMILIES.items() if name.startswith(starts))


def over_families(by_network: Mapping[str, float]) -> float:
    """The mean over families of networks, which weigh the same."""
    families: dict[str, list[float]] = {}
    for name, value in by_network.items():
        families.setdefault(family_of(name), []).append(value)
    return mean(map(mean, families.values()))


def overall_table(figures: Mapping[str, Figures], most: int = 6) -> str:
    """The means over families of the rules, and of the best single methods."""

    def cells(method: str) -> list[float]:
        kinds: list[Sequence[str]] = [KINDS, *((kind,) for kind in KINDS)]
        return [over_families({n: of.mean(method, kind) for n, of in figures.items()}) for kind in kinds]

    singles = [
        m for m in next(iter(figures.values())).singles if all(m in of.singles for of in figures.values())
    ]
    best = sorted(singles, key=lambda method: -cells(method)[0])[:most]
    lines = ["| | mean | far | near | faults |", "| --- |" + " ---: |" * 4]
    methods = (*RULES.values(), IN_USE, *best)
    lines += [f"| {method} | {' | '.join(f'{cell:.2f}' for cell in cells(method))} |" for method in methods]
    return "\n".join(lines)


def overall_gain(figures: Mapping[str, Figures], draws: int = 2000) -> tuple[float, float, float]:
    """The gain over the rule before, over families, with its 95 % interval over networks."""
    gains: dict[str, list[float]] = {}
    for name, of in figures.items():
        gains.setdefault(family_of(name), []).append(of.gain()[0])
    families, random = list(gains.values()), torch.Generator().manual_seed(0)

    def draw() -> float:
        chosen = torch.randint(len(families), (len(families),), generator=random).tolist()
        drawn = [families[i] for i in chosen]
        return mean(mean(f[i] for i in torch.randint(len(f), (len(f),), generator=random)) for f in drawn)

    drawn = torch.tensor([draw() for _ in range(draws)])
    low, high = drawn.quantile(torch.tensor([0.025, 0.975])).tolist()
    return mean(map(mean, families)), low, high


def summary(figures: Mapping[str, Figures]) -> str:
    """On how many networks the rule is ahead, and what it gains over the rule before."""
    learned = RULES["learned"]
    ahead = [name for name, of in figures.items() if of.mean(learned) > of.mean(of.best())]
    gain, low, high = overall_gain(figures)
    lowest = min(figures, key=lambda name: figures[name].gain()[0])
    behind = "; ".join(f"{n}: {of.best()}" for n, of in figures.items() if n not in ahead)
    return (
        f"On {len(ahead)} of {len(figures)} networks the mean with learned weights is ahead of every single "
        "method's"
        + (f" (not on {behind}). " if behind else ". ")
        + f"The gain over the rule before is {gain:+.2f} on average over families of networks (95 % interval "
        f"by a bootstrap over families and networks: {low:+.2f} to {high:+.2f}). It is lowest on {lowest}: "
        f"{figures[lowest].gain()[0]:+.2f}."
    )


def gains(figures: Mapping[str, Figures], facts: Mapping[str, Any]) -> str:
    """The gain over the rule before, by network."""
    lines = [
        "| network | gain over the rule before | 95 % interval over sets | over images |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name, of in figures.items():
        gain, *over_sets = of.gain()
        intervals = [over_sets, facts[name]["gain over images"]]
        cells = [f"{low:+.2f} to {high:+.2f}" for low, high in intervals]
        lines.append(f"| {name} | {gain:+.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def criterion(facts: Mapping[str, Any], variant: str, kinds: Sequence[str] = KINDS) -> float:
    """By what a rule is chosen: the mean over kinds of outliers, over families of networks."""
    return over_families(
        {n: mean(of["variants"][variant][kind] for kind in kinds) for n, of in facts.items()}
    )


def left_out(facts: Mapping[str, Any]) -> str:
    """What would be chosen without a family of networks or a kind of outliers, and its mean there."""

    def row(title: str, known: Mapping[str, Any], rest: Mapping[str, Any], kinds: Any, others: Any) -> str:
        chosen = max(VARIANTS, key=lambda variant: criterion(known, variant, kinds))
        here, shipped = criterion(rest, chosen, others), criterion(rest, SHIPPED, others)
        return f"| {title} | {chosen} | {here:.2f} | {shipped:.2f} |"

    ranked = sorted(VARIANTS, key=lambda variant: -criterion(facts, variant))
    lines = ["| rule | mean over kinds and families | far | near | faults |", "| --- |" + " ---: |" * 4]
    for variant in ranked:
        cells = [criterion(facts, variant), *(criterion(facts, variant, (kind,)) for kind in KINDS)]
        lines.append(f"| {variant} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    lines += ["", "| left out | chosen on the rest | its mean on what was left out | the rule's |"]
    lines.append("| --- | --- | ---: | ---: |")
    gained = []
    for family in dict.fromkeys(map(family_of, facts)):
        mine = {name: of for name, of in facts.items() if family_of(name) == family}
        others = {name: of for name, of in facts.items() if name not in mine}
        if others:
            lines.append(row(f"networks: {family}", others, mine, KINDS, KINDS))
            chosen = max(VARIANTS, key=lambda variant, known=others: criterion(known, variant))
            gained.append(criterion(mine, chosen) - criterion(mine, SHIPPED))
    for kind in KINDS:
        rest = [other for other in KINDS if other != kind]
        lines.append(row(f"outliers: {kind}", facts, facts, rest, (kind,)))
    place = ranked.index(SHIPPED) + 1
    lead = criterion(facts, ranked[0]) - criterion(facts, SHIPPED)
    told = (
        f"By the criterion the rule is number {place} of {len(ranked)}, {lead:.2f} behind the first. What "
        f"would be chosen without a family of networks gains {mean(gained):+.2f} on that family, on average."
    )
    return f"{told}\n\n" + "\n".join(lines)


def costly(figures: Mapping[str, Figures], facts: Mapping[str, Any]) -> str:
    """Faults that change many predictions."""
    pairs = [
        (of, title)
        for n, of in figures.items()
        for title, share in facts[n]["changed"].items()
        if share >= COSTLY
    ]
    groups = {"all that change a tenth of the predictions or more": pairs}
    titles = dict.fromkeys(title.split(",")[0] for _, title in pairs)
    groups |= {title: [pair for pair in pairs if pair[1].split(",")[0] == title] for title in titles}
    methods = (*RULES.values(), IN_USE)
    lines = [
        f"| fault | networks | {' | '.join(methods)} | best single of each, known afterwards |",
        "| --- | ---: |" + " ---: |" * (len(methods) + 1),
    ]
    for title, chosen in groups.items():
        cells = [mean(of.of[method, fault] for of, fault in chosen) for method in methods]
        cells.append(mean(max(of.of[single, fault] for single in of.singles) for of, fault in chosen))
        lines.append(f"| {title} | {len(chosen)} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def weights_table(facts: Mapping[str, Any]) -> str:
    """What the rehearsal found out about each network."""
    lines = ["| network | " + " | ".join(MEMBERS) + " |", "| --- |" + " ---: |" * len(MEMBERS)]
    for name, of in facts.items():
        cells = [f"{of['weights'].get(member, 0):.2f}" for member in MEMBERS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def losses(figures: Mapping[str, Figures], limit: float = 2.0, shown: float = 7.5) -> str:
    """Where the rule with learned weights is behind a single method, or behind the rule before."""
    behind = [gap for of in figures.values() for gap, _ in of.behind.values()]
    close, far = sum(gap <= 0.5 for gap in behind), sum(gap > limit for gap in behind)
    lines = [
        f"Over {len(behind)} pairs of a network and a set, learned weights are at most 0.5 points behind the "
        f"best single method of the set on {close}, and more than {limit:g} points behind on {far}. These "
        f"are the pairs with more than {shown:g}:",
        "",
        f"| network | set | {RULES['before']} | {RULES['learned']} | best single method |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, of in figures.items():
        for title, (gap, best) in sorted(of.behind.items(), key=lambda item: -item[1][0]):
            if gap > shown:
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


def short_table(figures: Mapping[str, Figures]) -> str:
    """Means over families of networks: the rules, and the best single methods of all and of a kind."""
    first, *others = figures.values()
    singles = [method for method in first.singles if all(method in of.singles for of in others)]

    def cell(method: str, kinds: Sequence[str]) -> float:
        return over_families({name: of.mean(method, kinds) for name, of in figures.items()})

    columns: list[Sequence[str]] = [KINDS, *((kind,) for kind in KINDS)]
    rows = {
        "Guard until now: four members": [f"{cell(RULES['before'], kinds):.1f}" for kinds in columns],
        "Guard": [f"{cell(RULES['learned'], kinds):.1f}" for kinds in columns],
        "the best single method": [],
    }
    for kinds in columns:
        best = max(singles, key=lambda method: cell(method, kinds))
        rows["the best single method"].append(f"{cell(best, kinds):.1f} ({best})")
    lines = ["| mean AUROC | all sets | far | near | faults |", "| --- |" + " ---: |" * 4]
    return "\n".join([*lines, *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items())])


def behind_in_short(figures: Mapping[str, Figures]) -> str:
    """How often the rule is close to the best single method of a set, and where it is not."""
    behind = [(gap, of.kinds[title]) for of in figures.values() for title, (gap, _) in of.behind.items()]
    close = sum(gap <= 0.5 for gap, _ in behind)
    by_kind = {kind: mean(gap for gap, of_kind in behind if of_kind == kind) for kind in KINDS}
    names = {"far": "far sets", "near": "near sets", "fault": "faults"}
    told = ", ".join(f"{gap:.1f} on {names[kind]}" for kind, gap in by_kind.items())
    return (
        f"Guard is at most 0.5 points behind the best single method of a set on {close} of {len(behind)} "
        f"pairs of a network and a set. On average it is behind by this much: {told}. Which method is best "
        "is known only afterwards."
    )


def openood_table(figures: Mapping[str, Figures], most: int = 8) -> str:
    """Means and deviations over seeds, on sets like OpenOOD's: rules, and the best single methods."""

    def values(method: str) -> list[list[float]]:
        near = [of.mean(method, ("near",)) for of in figures.values()]
        far = [mean(of.of[method, title] for title in OPENOOD_FAR) for of in figures.values()]
        return [near, far]

    def cells(method: str) -> str:
        return " | ".join(f"{mean(v):.2f} ± {stdev(v) if len(v) > 1 else 0:.2f}" for v in values(method))

    singles = next(iter(figures.values())).singles
    best = sorted(singles, key=lambda method: -sum(map(mean, values(method))))[:most]
    lines = ["| method | near | far |", "| --- | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {method} | {cells(method)} |" for method in (*RULES.values(), *best))])


def chosen_weights(facts: Mapping[str, Any]) -> str:
    """The weights of three networks of different kinds."""
    chosen = ("ResNet-20, CIFAR-10", "ResNet-50, Imagenette", "ViT, scenes")
    return weights_table({name: facts[name] for name in chosen if name in facts})


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
    frame = framed_with_legend(
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


def kept_figures(results: Path) -> tuple[dict[str, Figures], dict[str, Any], dict[str, Figures]]:
    """The figures and the facts of the networks that are written already, and the figures of OpenOOD's."""
    rows, facts = held(results)
    if not rows:
        raise MissingCellError("docs/results/rehearsal.csv is missing")
    openood = {name: Figures(name, rows) for name in OPENOOD if name in facts}
    facts = {name: named(of, f"docs/results/rehearsal.json, {name}") for name, of in facts.items()}
    facts = {name: of for name, of in facts.items() if name in NETWORKS}
    return {name: Figures(name, rows) for name in facts}, facts, openood


def blocks(results: Path = DOCS / "results") -> dict[str, str]:
    """The blocks of docs/guard-study.md."""
    figures, facts, openood = kept_figures(results)
    sizes = "; ".join(f"{n}: {f['fit']:,}, {f['calibrate']:,}, {f['test']:,}" for n, f in facts.items())
    return {
        "rehearsal": "\n\n".join(
            [summary(figures), overall_table(figures), gains(figures, facts), table(figures)]
        ),
        "rehearsal sizes": f"Images that fit, calibrate and test: {sizes}.",
        "rehearsal left out": left_out(facts),
        "rehearsal faults": costly(figures, facts),
        "rehearsal weights": weights_table(facts),
        "rehearsal losses": losses(figures),
        "rehearsal openood": openood_table(openood),
    }


def in_short(results: Path = DOCS / "results") -> dict[str, str]:
    """The block that README.md and docs/guard.md share."""
    figures = kept_figures(results)[0]
    told = f"{summary(figures)} {behind_in_short(figures)}"
    return {"rehearsal in short": f"{short_table(figures)}\n\n{told}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of the sets")
    parser.add_argument("--weights", type=Path, help="the folder of the CIFAR network")
    parser.add_argument("--pretrained", type=Path, help="the folder of the ImageNet network")
    parser.add_argument(
        "--kept", type=Path, default=Path("rehearsal"), help="the folder of trained networks and measurements"
    )
    parser.add_argument("--networks", nargs="*", choices=list(ALL), default=list(ALL))
    parser.add_argument("--device", default="cpu", help="where networks run, such as cuda")
    args = parser.parse_args()
    given = (args.data, args.weights, args.pretrained, args.kept)
    places = Places(*(path or Path() for path in given), args.device)
    for name in args.networks:
        new, facts_of = study(name, measured_once(name, places))
        facts_of["changed"] = changed_once(name, places)
        rows, facts = held(DOCS / "results")
        others = [row for row in rows if row["network"] != name]
        write([*others, *new], {**facts, name: facts_of}, DOCS / "results")
    picture(kept_figures(DOCS / "results")[0], DOCS / "results" / "rehearsal.png")
    document.write()


if __name__ == "__main__":
    main()
