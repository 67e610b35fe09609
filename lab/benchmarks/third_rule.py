"""The two tables of docs/guard-study.md on Guard's third rule, from docs/results/guard-*."""

import re

from lab.benchmarks.cells import MissingCellError, rows, text_of

NETWORKS = {
    "densenet": ("DenseNet", "DenseNet-BC-100-12", "chosen on"),
    "resnet20": ("ResNet-20", "ResNet-20", "chosen on"),
    "resnet34": ("ResNet-34", "ResNet-34", "chosen on"),
    "resnet32": ("ResNet-32", "ResNet-32", "known"),
    "resnet56": ("ResNet-56", "ResNet-56", "known"),
    "wrn40_2": ("WRN-40-2", "WRN-40-2", "known"),
    "mnist_convnet": ("MNIST ConvNet", "MNIST ConvNet", "known"),
    "resnet34-new": ("new ResNet-34", "ResNet-34, seed 2", "**new**"),
    "wrn40_2-new": ("new WRN-40-2", "WRN-40-2, seed 1", "**new**"),
    "densenet-new": ("new DenseNet", "DenseNet-BC-100-12, seed 1", "**new**"),
}
"""By the name of a page: the two titles of its network, and what was known of it."""
TINY = ("densenet", "resnet20", "resnet34")
"""Networks whose mean over the Tiny ImageNet sets has a column of its own."""


def means() -> str:
    """The mean AUROC of every rule and every single method, over all sets and over Tiny ImageNet's."""
    aurocs: dict[str, dict[str, dict[str, float]]] = {}
    for name in NETWORKS:
        aurocs[name] = {}
        for row in rows(f"results/guard-{name}.csv"):
            if row["auroc"]:
                aurocs[name].setdefault(row["method"], {})[row["ood"]] = float(row["auroc"])
    first, *others = aurocs.values()
    columns = [(name, "Tiny ImageNet") for name in TINY] + [(name, "") for name in NETWORKS]
    head = [f"{NETWORKS[name][0]}{', Tiny' * bool(start)}" for name, start in columns]
    lines = [f"| mean AUROC, percent | {' | '.join(head)} |", "| --- |" + " ---: |" * len(head)]
    for method in (method for method in first if all(method in of for of in others)):
        cells = []
        for name, start in columns:
            own = [value for ood, value in aurocs[name][method].items() if ood.startswith(start)]
            cells.append(f"{sum(own) / len(own):.2f}")
        lines.append(f"| {'**Guard**' if method == 'Guard' else method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def outcomes() -> str:
    """What each network's page says of Guard beside the methods that others have published."""
    lines = [
        "| network | | ahead / within 0.1 / behind / saturated | mean AUROC: Guard, best single "
        "| distance to 100 closed | mean TNR: Guard, best single "
        "| near set, against the best single (95 %) |",
        "| --- | --- | --- | --- | ---: | --- | --- |",
    ]
    for name, (_, title, known) in NETWORKS.items():
        page = f"results/guard-{name}.md"
        told = re.search(r"^- Against all but .*: of 16 sets (.*)$", text_of(page), re.MULTILINE)
        sentence = told[1] if told else ""
        counts = re.findall(r"(\d+) (?:ahead|within 0.1|behind|saturated)\b", sentence.partition(":")[0])
        figures = re.search(
            r"mean AUROC ([\d.]+), of the best single method \((.*?)\) ([\d.]+): (-?\d+) % .*?"
            r"mean TNR ([\d.]+), of the best single method \((.*?)\) ([\d.]+)",
            sentence,
        )
        if figures is None or len(counts) != 4:
            raise MissingCellError(f"docs/{page} has no line 'Against all but ...: of 16 sets ...'")
        auroc, best, its_auroc, closed, tnr, other, its_tnr = figures.groups()
        near = re.search(r"below (.*?) by paired bootstrap \((.*?)\)", sentence)
        cells = [" / ".join(counts), f"{auroc}, {best} {its_auroc}", f"{closed} %"]
        cells += [f"{float(tnr):.1f}, {other} {float(its_tnr):.1f}", f"{near[1]}: {near[2]}" if near else ""]
        lines.append(f"| {title} | {known} | {' | '.join(cells)} |")
    return "\n".join(lines)
