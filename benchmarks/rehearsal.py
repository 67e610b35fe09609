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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.document import DOCS, filled
from gramwatch import Guard
from gramwatch.datasets import load
from gramwatch.datasets.faults import FAULTS, NORMALISATIONS
from gramwatch.datasets.resize import resized, through
from gramwatch.datasets.scenes import CLASSES
from gramwatch.guard import MEMBERS
from gramwatch.joint import JointRule
from gramwatch.measurement import Measurement
from gramwatch.metrics import auroc
from gramwatch.networks import load as load_network
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
FIT, CALIBRATE, TEST, OUTLIERS, FAULTY = 1500, 800, 400, 200, 200
HEAD = 3000
"""The training images of a linear head. The guard is fitted to the first `FIT` of them."""
BATCH = 50
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


@dataclass(frozen=True)
class Subject:
    """A network, the normalisation of its input, and images, uint8."""

    network: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: Tensor
    calibrate: Tensor
    test: Tensor
    others: Mapping[str, tuple[str, Tensor]]
    """The kind and the images of each outlier set, and of each control."""

    def inputs(self, images: Tensor, mean: Any = None, std: Any = None) -> Iterator[Tensor]:
        """Batches of the network's input."""
        for batch in images.split(BATCH):
            yield normalised(batch, mean or self.mean, std or self.std)


@dataclass(frozen=True)
class Places:
    """The folders that are given."""

    data: Path
    weights: Path
    pretrained: Path


def normalised(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The network's input of uint8 images."""
    channels = (torch.tensor(c)[:, None, None] for c in (mean, std))
    return (images.float() / 255 - next(channels)) / next(channels)


def images_of(name: str, data: Path, side: int, count: int, **how: Any) -> Tensor:
    """Images of a set in one size. Small ones are enlarged, not padded."""
    if name not in ("imagenette/train", "imagenette/val"):
        return resized(load(name, data, grey=False, count=count, **how).images, side)
    return load(str(data / name), data, grey=False, count=count, size=side).images


# --- networks ----------------------------------------------------------------------------------------


def resnet20(places: Places) -> Subject:
    """ResNet-20 for CIFAR-10."""
    loaded = load_network("resnet20", places.weights / "resnet20_cifar10.pth")
    known = images_of("cifar10", places.data, 32, CALIBRATE + TEST)
    others = {
        "CIFAR-100": ("near", "cifar100_subset"),
        "Tiny ImageNet": ("near", "tiny_imagenet"),
        "SVHN": ("far", "svhn_subset"),
        "iSUN": ("far", "isun"),
        "MiniPlaces": ("far", "miniplaces"),
        "textures": ("far", "dtd_10_classes"),
        "digits": ("far", "mnist"),
    }
    return Subject(
        loaded.network,
        loaded.mean,
        loaded.std,
        images_of("cifar10", places.data, 32, FIT, split="train"),
        known[:CALIBRATE],
        known[CALIBRATE:],
        {title: (kind, images_of(n, places.data, 32, OUTLIERS)) for title, (kind, n) in others.items()},
    )


def lite0(places: Places) -> tuple[nn.Module, tuple[float, ...], tuple[float, ...]]:
    """EfficientNet-Lite0 with 1,000 classes of ImageNet, and its normalisation."""
    from safetensors.torch import load_file

    network = load_network("timm:tf_efficientnet_lite0").record.build(1000)
    network.load_state_dict(load_file(places.pretrained / "efficientnet_lite0.safetensors"))
    return network.eval(), (127 / 255,) * 3, (128 / 255,) * 3


def scenes(places: Places, left_out: str = "") -> Subject:
    """EfficientNet-Lite0 with a new head for scenes."""
    network, *normalisation = lite0(places)
    classes, side = [name for name in CLASSES if name != left_out], 128
    train = load("scenes", places.data, split="train", classes=classes, count=HEAD)
    assert train.labels is not None
    with_head(network, train.images, train.labels, normalisation)
    known = images_of("scenes", places.data, side, CALIBRATE + TEST, classes=classes)
    test = known[CALIBRATE:]
    near = {"MiniPlaces without scenes": "miniplaces_without_scenes"}
    others = {title: ("near", images_of(n, places.data, side, OUTLIERS)) for title, n in near.items()}
    if left_out:
        images = images_of("scenes", places.data, side, OUTLIERS, classes=[left_out])
        others[f"{left_out}, left out"] = ("near", images)
    others["Imagenette"] = ("far", images_of("imagenette/val", places.data, side, OUTLIERS))
    return Subject(
        network, *normalisation, train.images[:FIT], known[:CALIBRATE], test, others | small(places, test)
    )


def imagenette(places: Places) -> Subject:
    """EfficientNet-Lite0 as it is, with photographs of ten of its classes."""
    side = 160
    train = images_of("imagenette/train", places.data, side, FIT + CALIBRATE)
    test = images_of("imagenette/val", places.data, side, TEST)
    fitted = len(train) * FIT // (FIT + CALIBRATE)
    others = {
        "MiniPlaces": ("near", images_of("miniplaces", places.data, side, OUTLIERS)),
        "scenes": ("near", images_of("scenes", places.data, side, OUTLIERS)),
        "control: through 128 pixels": ("control", through(test[:OUTLIERS], 128)),
    }
    return Subject(*lite0(places), train[:fitted], train[fitted:], test, others | small(places, test))


def small(places: Places, test: Tensor) -> dict[str, tuple[str, Tensor]]:
    """Sets of small images, enlarged, and known images that were reduced to their size: the controls."""
    side = test.shape[-1]
    sets = {"Tiny ImageNet": "tiny_imagenet", "textures": "dtd_10_classes", "SVHN": "svhn_subset"}
    sets["digits"] = "mnist"
    others = {title: ("far", images_of(n, places.data, side, OUTLIERS)) for title, n in sets.items()}
    for reduced in (64, 32):
        others[f"control: through {reduced} pixels"] = ("control", through(test[:OUTLIERS], reduced))
    return others


def with_head(network: Any, images: Tensor, labels: Tensor, normalisation: Sequence[Any]) -> None:
    """Give the network a linear head that knows these classes. The body stays as it is."""
    torch.manual_seed(0)
    width = network.classifier.in_features
    network.classifier = nn.Identity()
    with torch.no_grad():
        features = torch.cat([network(normalised(b, *normalisation)) for b in images.split(BATCH)])
    head = nn.Linear(width, int(labels.max()) + 1)
    optimiser = torch.optim.AdamW(head.parameters(), 2e-3, weight_decay=1e-2)
    for _ in range(30):
        for chosen in torch.randperm(len(features)).split(128):
            optimiser.zero_grad()
            F.cross_entropy(head(features[chosen]), labels[chosen]).backward()
            optimiser.step()
    network.classifier = head


NETWORKS: Mapping[str, Callable[[Places], Subject]] = {
    "ResNet-20, CIFAR-10": resnet20,
    "Lite0, scenes": scenes,
    "Lite0, scenes without forest": partial(scenes, left_out="forest"),
    "Lite0, Imagenette": imagenette,
}


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
class Scores:
    """The scores of all members on one set, `(N, members)`, as measured and standardised."""

    raw: Tensor
    standard: Tensor
    finite: Tensor

    @staticmethod
    def of(rule: JointRule, measured: Measurement, left_out: bool = False) -> "Scores":
        """The scores of a measurement."""
        raw = rule.member_scores(measured, left_out)
        return Scores(raw, rule.standard(raw), measured.finite)

    def joined(self, columns: Sequence[int], weights: Tensor | None = None) -> Tensor:
        """The joint score of some members, `(N,)`."""
        chosen = self.standard[:, columns]
        return self._finite((chosen if weights is None else chosen * weights).sum(1))

    def single(self, column: int) -> Tensor:
        """The score of one member, `(N,)`."""
        return self._finite(self.raw[:, column])

    def _finite(self, scores: Tensor) -> Tensor:
        return torch.where(self.finite, scores, torch.inf)


def study(name: str, subject: Subject) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of one network, and the weights that its rehearsal learned."""
    guard = Guard(subject.network, members=(*MEMBERS, *SINGLE))
    guard.fit(subject.inputs(subject.fit))

    def measured(inputs: Iterator[Tensor]) -> Measurement:
        return Measurement.joined([guard.measure(batch) for batch in inputs])

    calibration = measured(subject.inputs(subject.calibrate))
    fitting, _ = halves(len(calibration), 0)
    rule = guard.rule().fit(calibration[fitting])
    usual = Scores.of(rule, calibration[fitting], left_out=True)
    test = Scores.of(rule, measured(subject.inputs(subject.test)))
    print(f"{name}: fitted and calibrated", flush=True)
    outliers = {
        family: Scores.of(rule, measured(inputs)) for family, inputs in rehearsal_of(subject, fitting)
    }
    print(f"{name}: rehearsed", flush=True)
    members, titles = list(guard.members), [member.title for member in guard.members.values()]
    shipped = [members.index(member) for member in MEMBERS if member in members]
    before = [members.index(member) for member in BEFORE]

    def weights(without: Sequence[str] = ()) -> Tensor:
        known = {f: s.standard[s.finite][:, shipped] for f, s in outliers.items() if f not in without}
        return learned_weights(usual.standard[:, shipped], known)

    rows: list[dict[str, Any]] = []

    def judge(title: str, kind: str, inputs: Iterator[Tensor], learned: Tensor) -> None:
        found = Scores.of(rule, measured(inputs))
        of = {
            RULES["before"]: (test.joined(before), found.joined(before)),
            RULES["equal"]: (test.joined(shipped), found.joined(shipped)),
            RULES["learned"]: (test.joined(shipped, learned), found.joined(shipped, learned)),
            **{title: (test.single(i), found.single(i)) for i, title in enumerate(titles)},
        }
        for method, pair in of.items():
            value = round(100 * auroc(*pair), 2)
            rows.append({"network": name, "set": title, "kind": kind, "method": method, "auroc": value})
        print(f"{name}: {title}, {rows[-len(of)]['auroc']} -> {rows[2 - len(of)]['auroc']}", flush=True)

    learned = weights()
    for title, (kind, images) in subject.others.items():
        judge(title, kind, subject.inputs(images), learned)
    for fault, title, inputs in faults_of(subject):
        judge(title, "fault", inputs, weights(without=SAME[fault]))
    numbers = {"fit": len(subject.fit), "calibrate": len(subject.calibrate), "test": len(subject.test)}
    of_members = zip([members[i] for i in shipped], learned.tolist(), strict=True)
    return rows, {**numbers, "weights": {member: round(weight, 3) for member, weight in of_members}}


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
    parser.add_argument("--networks", nargs="*", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of the pages")
    parser.add_argument("--page", action="store_true", help="only write the table and the picture again")
    args = parser.parse_args()
    nowhere = Path()
    places = Places(args.data or nowhere, args.weights or nowhere, args.pretrained or nowhere)
    for name in [] if args.page else args.networks:
        new, facts_of = study(name, NETWORKS[name](places))
        rows, facts = held(args.docs / "results")
        others = [row for row in rows if row["network"] != name]
        write([*others, *new], {**facts, name: facts_of}, args.docs / "results")
    write_page(args.docs)


if __name__ == "__main__":
    main()
