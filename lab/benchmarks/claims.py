"""The tables of docs/results/README.md: the paper's claims, and the figures behind them."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from lab.benchmarks.cells import MissingCellError, cell, data, rows

NEAR = {"CIFAR-10": "CIFAR-100 subset", "CIFAR-100 (indicative)": "CIFAR-10"}
"""The near set of an in-distribution set."""
SEEN = "auxiliary source seen"
"""The note on a set whose source was in training. It counts in no mean."""
NEAREST, ALIASED, CROPS = (f"Tiny ImageNet, {how}" for how in ("nearest", "anti-aliased", "crops"))
PLACES, TEXTURES, BLOBS = "MiniPlaces, anti-aliased", "DTD, 10 classes", "blobs (normalised)"
ISUN, SVHN = "iSUN", "SVHN, first 1,083 training images"
R34, DENSE, DENSE100, WRN = "resnet34", "densenet", "densenet-cifar100_parts", "wrn40_2"
NETWORKS = {R34: "ResNet-34", DENSE: "DenseNet", DENSE100: "CIFAR-100 DenseNet", WRN: "WRN-40-2"}
NETWORKS |= {"resnet20": "ResNet-20", "resnet32": "ResNet-32"}
THREE, FOUR = (R34, DENSE, DENSE100), (R34, DENSE, DENSE100, WRN)
ORDERS = [f"Min/Max, order {order}" for order in range(1, 11)]
SETTINGS = ["complete, Min/Max", "complete, Mean/Var", "complete, Min/Max (U)"]
PLAIN, EXPOSED = (f"joined-{WRN}-{how}" for how in ("cross_entropy", "outlier_exposure"))
DPN, SEMANTIC = "DPN (reverse KL)", "Semantic (random label codes)"


# --- figures -----------------------------------------------------------------------------------------


def value(name: str, method: str, ood: str, column: str = "tnr") -> float:
    """A cell of a CSV in docs/results."""
    return cell(f"results/{name}.csv", column, method=method, ood=ood)


def near_set(name: str) -> str:
    """The near set of the in-distribution set of a file."""
    return NEAR[rows(f"results/{name}.csv")[0]["in_distribution"]]


def sets(name: str, near: bool = True, shared: str = "") -> list[str]:
    """The sets that count in a mean. With `shared`, those that this file has too."""
    read = rows(f"results/{name}.csv")
    left_out = {row["ood"] for row in read if row["note"] == SEEN} | ({near_set(name)} if not near else set())
    own = dict.fromkeys(row["ood"] for row in read if row["tnr"] and not row["ood"].startswith("mean"))
    return [ood for ood in own if ood not in left_out and (not shared or ood in sets(shared))]


def mean(name: str, method: str, column: str = "tnr", near: bool = True, shared: str = "") -> float:
    """The mean over the sets of a file."""
    return fmean(value(name, method, ood, column) for ood in sets(name, near, shared))


def methods(name: str) -> list[str]:
    """The methods of a file."""
    return list(dict.fromkeys(row["method"] for row in rows(f"results/{name}.csv") if row["tnr"]))


def best(name: str, ood: str) -> float:
    """The TNR of the best method beside Gram."""
    return max(value(name, method, ood) for method in methods(name) if method != "Gram")


def tally(name: str) -> list[int]:
    """Far sets on which Gram is ahead of all other methods, at most a point behind, further behind."""
    behind = [best(name, ood) - value(name, "Gram", ood) for ood in sets(name, near=False)]
    return [
        sum(gap < 0 for gap in behind),
        sum(0 <= gap <= 1 for gap in behind),
        sum(gap > 1 for gap in behind),
    ]


# --- tables ------------------------------------------------------------------------------------------


def table(head: Sequence[str], lines: Iterable[Sequence[object]], words: int = 1) -> str:
    """A table in Markdown. Numbers get one decimal; columns after the first `words` are aligned right."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    cells = [[f"{entry:.1f}" if isinstance(entry, float) else str(entry) for entry in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *cells))


def beside(name: str, method: str, ood: str, column: str = "tnr") -> str:
    """A figure, and in brackets the published one."""
    own = f"{value(name, method, ood, column):.1f}"
    try:
        return f"{own} ({value(name, method, ood, f'{column}_published'):.1f})"
    except MissingCellError:
        return own


def isun() -> str:
    """Every method on iSUN, the same files as published."""
    usual, columns = ("Gram", "MSP", "ODIN", "Mahalanobis"), ("tnr", "auroc", "dtacc")
    parts = [
        *((f"table2-{name}", NETWORKS[name], method) for name in THREE for method in usual),
        *((PLAIN, "WRN-40-2", method) for method in ("Gram", "MSP", "Gram over MSP")),
        *(
            (EXPOSED, "WRN-40-2, Outlier Exposure", method)
            for method in ("Gram", "MSP", "Gram less MSP", "Gram over MSP")
        ),
    ]
    lines = [
        [title, method]
        + [
            " / ".join(f"{value(name, method, ISUN, column + end):{form}}" for column in columns)
            for end, form in (("", ".2f"), ("_published", ".1f"), ("_difference", "+.2f"))
        ]
        for name, title, method in parts
    ]
    return table(["network", "method", "ours", "published", "difference"], lines, 2)


def gram_by_set() -> str:
    """TNR and AUROC of Gram on the sets that the text is about."""
    lines = []
    for ood in (ISUN, NEAREST, CROPS, SVHN, BLOBS, TEXTURES, ALIASED, PLACES, "near set"):
        cells = []
        for network in FOUR:
            name = f"table2-{network}"
            which = near_set(name) if ood == "near set" else ood
            cells.append(" / ".join(beside(name, "Gram", which, column) for column in ("tnr", "auroc")))
        lines.append([ood, *cells])
    return table(["TNR / AUROC", *(NETWORKS[n] for n in FOUR)], lines)


EVEN, ODD, OTHER = "even orders", "odd orders above one", "best other method"
STAGES = [f"Min/Max, stage {stage}" for stage in range(1, 5)]
COMPARED = [
    ("Gram is weak on near outliers", "table2", THREE, "near set", OTHER, "Gram"),
    ("Min/Max is better than Mean/Var", "ablation", THREE, "far sets", *SETTINGS[:2]),
    ("Dividing by the expectation helps (U: not divided)", "ablation", THREE, "far sets", *SETTINGS[::2]),
    ("the same", "ablation", THREE[:2], "near set", *SETTINGS[::2]),
    ("Even orders tell more", "order", THREE, "far sets", EVEN, ODD),
    ("but not of CIFAR-10 on CIFAR-100", "order", [DENSE100], "near set", ODD, EVEN),
    ("Higher orders help", "order", THREE[:2], ISUN, ORDERS[9], ORDERS[0]),
    ("the same", "order", THREE, "far sets", ORDERS[9], ORDERS[0]),
    ("Early layers tell most", "depth", THREE, "far sets", STAGES[0], "last part"),
    ("the same", "depth", THREE, NEAREST, STAGES[0], "last part"),
    ("Near outliers need late layers", "depth", THREE, "near set", "last part", STAGES[0]),
    ("The full triangle is ahead of row sums", "triangle", [DENSE], ISUN, "full triangle", "row sums"),
    ("the same", "triangle", [DENSE], ALIASED, "full triangle", "row sums"),
    ("Gram is ahead of Outlier Exposure", "trained", [WRN], "all sets", "Gram", "OE"),
    ("the same", "trained", [WRN], "AUROC of all sets", "Gram", "OE"),
    ("Gram is ahead of Prior Networks", "trained", [WRN], "all sets", "Gram", DPN),
    ("the same", "trained", [WRN], "AUROC of all sets", "Gram", DPN),
    ("Gram is ahead of Variational Dirichlet", "trained", [WRN], "all sets", "Gram", "VD"),
    ("Gram is ahead of Semantic", "trained", [WRN], "all sets", "Gram", SEMANTIC),
    ("Joining Outlier Exposure and Gram helps", "joined", [WRN], "all sets", "Gram less MSP", "MSP"),
    ("the same", "joined", [WRN], "all sets", "Gram less MSP", "Gram"),
]
"""A claim, the kind of file, networks, where it is looked at, what should be higher, and than what."""


def figure(name: str, method: str, where: str) -> float:
    """The figure of a method, or of what stands for several, on a set or as a mean over sets."""
    if method == "last part":
        method = max(of for of in methods(name) if of in STAGES)
    if method in (EVEN, ODD):
        return fmean(figure(name, of, where) for of in (ORDERS[1::2] if method == EVEN else ORDERS[2::2]))
    if where == "far sets":
        return mean(name, method, near=False)
    if where.endswith("all sets"):
        return mean(name, method, "auroc" if where.startswith("AUROC") else "tnr")
    ood = near_set(name) if where == "near set" else where
    return best(name, ood) if method == OTHER else value(name, method, ood)


def claims() -> str:
    """Claims by network: the figure that should be higher, the other one, and on how many it is."""
    lines = []
    for claim, kind, networks, where, one, other in COMPARED:
        end = "-outlier_exposure" if kind == "joined" else ""
        names = {network: f"{kind}-{network}{end}" for network in networks}
        pairs = {n: (figure(name, one, where), figure(name, other, where)) for n, name in names.items()}
        cells = [f"{pairs[n][0]:.1f}, {pairs[n][1]:.1f}" if n in pairs else "" for n in FOUR]
        so = sum(high > low for high, low in pairs.values())
        lines.append([claim, f"{where}: {one} against {other}", *cells, f"{so} of {len(pairs)}"])
    return table(["claim", "compared", *(NETWORKS[n] for n in FOUR), "holds on"], lines, 2)


def tallies() -> str:
    """Gram beside methods that were tuned, on far sets."""
    lines = [
        [
            NETWORKS[network],
            title,
            len(sets(f"table2-{network}-{kind}", near=False)),
            *tally(f"table2-{network}-{kind}"),
        ]
        for kind, title in (("outliers", "images of each set"), ("fgsm", "FGSM"))
        for network in (R34, DENSE)
    ]
    head = ["network", "others tuned on", "far sets", "ahead", "at most 1.0 behind", "further behind"]
    return table(head, lines, 2)


def by_part(
    kind: str, networks: Sequence[str], parts: Sequence[str], shown: Sequence[str]
) -> list[list[object]]:
    """Rows of a table of one order, or one part of a network, at a time; the last cell is of all together."""
    lines: list[list[object]] = []
    for network in networks:
        name = f"{kind}-{network}"
        own = [part for part in parts if part in methods(name)]
        gap = [""] * (len(parts) - len(own))
        lines.append(
            [
                f"{NETWORKS[network]}, far sets",
                *(mean(name, of, near=False) for of in own),
                *gap,
                mean(name, "Gram", near=False),
            ]
        )
        for ood in (*shown, near_set(name)):
            cells = [beside(name, of, ood) for of in own]
            lines.append([f"{NETWORKS[network]}, {ood}", *cells, *gap, value(name, "Gram", ood)])
    return lines


def orders() -> str:
    """One order at a time."""
    shown = (1, 2, 4, 6, 8, 10)
    lines = by_part("order", (*THREE, "resnet20"), [ORDERS[n - 1] for n in shown], (NEAREST, BLOBS, TEXTURES))
    return table(["order", *map(str, shown), "all ten"], lines)


def depths() -> str:
    """One part of a network at a time."""
    lines = by_part("depth", THREE, STAGES, (NEAREST, CROPS, TEXTURES))
    return table(["part", "1", "2", "3", "4", "all"], lines)


def settings() -> str:
    """The twelve settings, mean over the far sets."""
    of = (*THREE, "resnet20")
    kinds = [
        f"{kind}, {how}"
        for kind in ("diagonal", "off-diagonal", "complete")
        for how in ("Min/Max", "Mean/Var")
    ]
    lines = [
        [kind, "yes" if not end else "no", *(mean(f"ablation-{n}", kind + end, near=False) for n in of)]
        for kind in kinds
        for end in ("", " (U)")
    ]
    return table(["statistics", "divided by the expectation", *(NETWORKS[n] for n in of)], lines, 2)


def chosen(name: str, names: Sequence[str], shown: Sequence[str]) -> str:
    """Methods of a file: their means, and their TNR on a few sets."""
    lines = [
        [of, mean(name, of), mean(name, of, "auroc"), *(value(name, of, ood) for ood in shown)]
        for of in names
    ]
    return table(["TNR", "all sets", "AUROC, all sets", *shown], lines)


def tuned() -> str:
    """ODIN and Mahalanobis: untuned, tuned on FGSM and tuned on outliers."""
    lines: list[list[object]] = []
    for network in (R34, DENSE):
        outliers, fgsm, plain = (f"table2-{network}{end}" for end in ("-outliers", "-fgsm", ""))
        for method in ("ODIN", "Mahalanobis", "Gram", "MSP"):
            shared = [mean(outliers, method, shared=fgsm), mean(fgsm, method, shared=outliers)]
            cells = [beside(name, method, ISUN) for name in (plain, fgsm, outliers) if ISUN in sets(name)]
            cells += [""] * (3 - len(cells))
            lines.append(
                [NETWORKS[network], method, mean(plain, method), mean(fgsm, method), *shared, *cells]
            )
    head = ["network", "method", "all sets: untuned", "FGSM", "sets of both runs: outliers", "FGSM"]
    return table([*head, "iSUN: untuned", "FGSM", "outliers"], lines, 2)


def meaning() -> str:
    """AUROC where meaning counts: near sets and photographs that were reduced properly."""
    names = ("Gram", "fDBD", "NCI", "ODIN", "energy")
    lines = [
        [
            f"{NETWORKS[network]}, {ood}",
            *(value(f"table2-{network}", method, ood, "auroc") for method in names),
        ]
        for network in (R34, DENSE, "resnet20", "resnet32")
        for ood in ("CIFAR-100 subset", ALIASED, PLACES, TEXTURES)
    ]
    return table(["AUROC", *names], lines)


def ahead_of_gram() -> str:
    """The untuned methods whose mean TNR is above Gram's."""
    lines = []
    for network in FOUR:
        name = f"table2-{network}"
        of = {method: mean(name, method) for method in methods(name)}
        higher = sorted((method for method in of if of[method] > of["Gram"]), key=lambda method: -of[method])
        lines.append(
            [
                NETWORKS[network],
                of["Gram"],
                ", ".join(f"{method} {of[method]:.1f}" for method in higher) or "none",
            ]
        )
    return table(["mean TNR", "Gram", "methods ahead of it"], lines)


def mlps() -> str:
    """Fully connected networks for MNIST."""
    lines = [
        [f"MLP {sizes.replace('_', '-')}", method]
        + [
            beside(f"mlp-mlp_{sizes}", method, ood, c)
            for ood in ("KMNIST", "Fashion-MNIST")
            for c in ("tnr", "auroc")
        ]
        for sizes in ("300", "300_150", "300_150_50")
        for method in ("Gram", "MSP")
    ]
    return table(["network", "method", "KMNIST", "AUROC", "Fashion-MNIST", "AUROC"], lines, 2)


def networks() -> str:
    """All networks, with their accuracy."""
    lines = [list(row.values()) for row in rows("results/networks.csv")]
    return table(list(rows("results/networks.csv")[0]), lines, 4)


def last_part() -> str:
    """What changes the last part of ResNet-34: one sentence."""
    kept = data("data/last_stage.json")
    third, last = ([row["tnr"][place] for row in kept["rows"]] for place in (2, 3))
    least = min(one - other for one, other in zip(third, last, strict=True))
    return (
        f"With {kept['train']:,} training images and {kept['test']:,} images of each set, the last part has "
        f"{last[0]:.1f} % of Tiny ImageNet, nearest, as in our tables, and {min(last[1:]):.1f} to "
        f"{max(last[1:]):.1f} % in {len(last) - 1} variants. In every variant it is below the third part, by "
        f"{least:.1f} points or more."
    )


CHOSEN = {
    "triangle": (
        "triangle-densenet",
        ["row sums", "row sums of roots", "full triangle"],
        [ISUN, NEAREST, ALIASED, PLACES, BLOBS, NEAR["CIFAR-10"]],
    ),
    "trained": (
        f"trained-{WRN}",
        [DPN, "Gram", "OE", "VD", SEMANTIC, "MSP"],
        [ISUN, SVHN, PLACES, BLOBS, NEAR["CIFAR-10"], "Gaussian noise"],
    ),
    "joined": (EXPOSED, ["Gram over MSP", "Gram less MSP", "Gram", "MSP"], [ISUN, NEAR["CIFAR-10"]]),
    "mnist": ("outlier_exposure-mnist_convnet", ["MSP", "OE", "Gram"], ["KMNIST", "blobs"]),
}
"""By block: a file, methods and sets."""


def blocks() -> dict[str, str]:
    """The blocks of docs/results/README.md."""
    return {
        "claims": claims(),
        "isun": isun(),
        "gram": gram_by_set(),
        "tallies": tallies(),
        "orders": orders(),
        "depth": depths(),
        "settings": settings(),
        "tuned": tuned(),
        "meaning": meaning(),
        "ahead": ahead_of_gram(),
        "mlps": mlps(),
        "networks": networks(),
        "last part": last_part(),
        **{name: chosen(*given) for name, given in CHOSEN.items()},
    }
