"""The generated blocks of every page: `BLOCKS`, and pages that are generated as a whole: `WHOLE`."""

import re
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

from gramwatch.detect.measurement import calibration_needs
from gramwatch.detect.threshold import range_of_rates
from gramwatch_lab.figures import across
from gramwatch_lab.figures.calibration import IMAGES
from gramwatch_lab.methods.table import methods_table
from gramwatch_lab.paper import false_alarms
from lab.benchmarks import (
    calibrations,
    cancellation,
    claims,
    defaults,
    end_to_end,
    explain,
    explain_cases,
    fog,
    image,
    monitor,
    photographs,
    react,
    rehearsal,
    sample_sizes,
    scale,
    tables,
    third_rule,
)
from lab.benchmarks.cells import DOCS, cell, data, rows, text_of


def results_of(kind: str) -> list[Any]:
    """The results of a benchmark in docs/data, CPU first."""
    names = sorted(path.name for path in (DOCS / "data").glob(f"{kind}-c*.json"))
    return [data(f"data/{name}") for name in names or [f"{kind}-cpu.json"]]


def performance() -> dict[str, str]:
    """docs/performance.md."""
    ways, runs, growths = (results_of(kind) for kind in ("ways", "overhead", "growth"))
    parts: dict[str, list[str]] = {"overhead": ["![Extra cost of scoring](images/performance_overhead.png)"]}
    parts |= {"breakdown": [], "kernels": [], "growth": []}
    for run in runs:
        caption = f"**{tables.where(run)}**; reads {run['read_bytes_per_second'] / 1e9:,.0f} GB/s"
        if run["kernels_given_up"]:
            caption += "; the kernels could not be used: *ours* is PyTorch's form"
        for name, table in (("overhead", tables.overhead), ("breakdown", tables.breakdown)):
            parts[name] += [f"{caption}:\n\n{table(run)}"] if table(run) else []
        parts["kernels"] += [f"{caption}:\n\n{tables.kernels(run)}"] if run["kernels"] else []
    for growth in growths:
        picture = f"![Growth of the cost](images/performance_growth_{growth['device']}.png)"
        parts["growth"].append(f"**{tables.where(growth)}**:\n\n{picture}\n\n{tables.growth(growth)}")
    where = "\n".join(f"- {tables.where(result)}" for result in ways)
    return {
        "ways": f"{tables.ways_table(ways)}\n\n{where}",
        "targets": f"{tables.targets(runs)}\n\n{by_default(runs, results_of('guard'))}".rstrip(),
        **{name: "\n\n".join(part) for name, part in parts.items()},
    }


BY_DEFAULT = """\
The plain pass takes longer without TF32, so the extra looks smaller. PyTorch's default is TF32 for
convolutions (`python -m lab.benchmarks.guard --device cuda --rounds 40`). The two runs were not made
together, and hosts differ in speed. The GPU's own time does not depend on the host:"""


def by_default(runs: list[Any], guards: list[Any]) -> str:
    """Scoring with and without TF32, as long as `lab.benchmarks.overhead` has been run without it only."""
    strict = [run for run in runs if run["device"] == "cuda" and run["strict"]]
    default = [guard for guard in guards if guard["device"] == "cuda"]
    if len(strict) != 1 or not default or any(run["device"] == "cuda" and not run["strict"] for run in runs):
        return ""
    return f"{BY_DEFAULT}\n\n{tables.by_default(strict[0], default[0])}"


def guard_costs() -> str:
    """What a guard costs, with quartiles."""
    parts = []
    for result in results_of("guard"):
        rounds = max(row["gram"]["rounds"] for row in result["rows"])
        parts.append(f"**{tables.where(result)}, {rounds} rounds**:\n\n{tables.guard_costs(result)}")
    return "\n\n".join(parts)


def guard() -> dict[str, str]:
    """docs/guard.md."""
    measured = data("data/calibrations.json")
    return {
        "costs": tables.guard_medians(results_of("guard")),
        "calibrations": calibrations.alarms_table(measured["alarms"]),
        "time of calibrate": calibrations.time_told(measured["seconds"]),
        "weights of three networks": rehearsal.chosen_weights(rehearsal.kept_figures(DOCS / "results")[1]),
    }


def study() -> dict[str, str]:
    """docs/guard-study.md, but for photographs and the rehearsal."""
    page, simulated = text_of("results/false_alarms-resnet20.md"), data("data/false_alarms.json")
    return {
        "costs": guard_costs(),
        "third rule": third_rule.means(),
        "third rule in short": third_rule.outcomes(),
        "simulated false alarms": false_alarms.table(simulated, "classes"),
        "simulated rare classes": false_alarms.table(simulated, "groups"),
        "false alarms": "\n".join(re.findall(r"^\|.*$", page, re.MULTILINE)),
    }


def demo() -> dict[str, str]:
    """The table of `gramwatch demo` in README.md."""
    name, methods = "data/demo.csv", ("Guard", "Gram", "MSP")
    lines = [f"| | {' | '.join(f'{method}: TNR / AUROC' for method in methods)} |", "| --- |" + " ---: |" * 3]
    for ood in dict.fromkeys(row["ood"] for row in rows(name)):
        cells = [
            " / ".join(
                f"{100 * cell(name, metric, ood=ood, method=method):.1f}" for metric in ("tnr", "auroc")
            )
            for method in methods
        ]
        lines.append(f"| {ood} | {' | '.join(cells)} |")
    return {"demo": "\n".join(lines)}


def planted_sign() -> dict[str, str]:
    """The explanation in README.md."""
    sentences = data("data/explain_cases.json")["resnet18"]["artefact"]["sentences"]
    return {"planted sign": f"> {' '.join(sentences)}"}


def cases() -> dict[str, str]:
    """The cases of docs/explain.md."""
    kept = data("data/explain_cases.json")
    return {"cases": explain_cases.case_list(kept), "clusters": explain_cases.cluster_table(kept)}


def exports() -> dict[str, str]:
    """docs/howto/export.md."""
    from lab.benchmarks import export, exported

    results = (data("data/export-cpu.json"), data("data/exported.json"))
    return {result["kind"]: at.page(result) for result, at in zip(results, (export, exported), strict=True)}


def reliability() -> dict[str, str]:
    """docs/reliability.md."""
    from tests import on_gpu, stress

    return {"stress": stress.table(data("data/stress.json")), "cuda": on_gpu.record(data("data/on_gpu.json"))}


def share(counts: Mapping[str, int]) -> str:
    """Which part of the images is flagged."""
    return f"{100 * counts['flagged'] / counts['images']:.1f} %"


def tutorial() -> dict[str, str]:
    """The answer in docs/tutorial.md: what is flagged, and what is in the groups of the report."""
    kept = data("data/tutorial.json")
    titles = {"clean": "clean", "blurred": "out of focus", "normalised": "normalised before saving"}
    lines = [
        [
            title,
            counts["flagged"],
            f"{counts['images']:,}",
            share(counts),
            share(kept["earlier"]["flagged"][kind]),
        ]
        for kind, title in {**titles, "foreign": "other places"}.items()
        for counts in [kept["flagged"][kind]]
    ]
    lines += [
        [f"a first mix: {kind}", counts["flagged"], counts["images"], "", share(counts)]
        for kind, counts in kept["milder"].items()
        if kind != "about"
    ]
    kinds = {
        "blurred": "out of focus",
        "normalised": "normalised",
        "foreign": "other places",
        "clean": "clean",
    }
    groups = [[group["images"], *(group.get(kind, 0) for kind in kinds)] for group in kept["groups"]]
    return {
        "flagged": claims.table(["photographs", "flagged", "of", "", "earlier network and guard"], lines),
        "groups": claims.table(["photographs in the group", *kinds.values()], groups, 0),
    }


def texts() -> dict[str, str]:
    """docs/howto/text.md: means over the networks."""
    runs = data("data/text.json")
    sets = list(runs[0]["auroc"]["Guard"])
    lines: list[list[object]] = []
    for method in runs[0]["auroc"]:
        of = [100 * fmean(run["auroc"][method][name] for run in runs) for name in sets]
        lines.append([method, *of, fmean(of)])
    flagged = [100 * fmean(run["flagged"][name] for run in runs) for name in ("test", *sets)]
    planted = []
    for name, title in (("all", "all"), ("flagged because of it", "flagged because of them")):
        parts = [run["planted"][name] for run in runs]
        count = sum(part["texts"] for part in parts)
        of = [
            sum(100 * part[key] * part["texts"] for part in parts) / count
            for key in ("auroc", "top", "chance")
        ]
        planted.append([title, f"{count:,}", *of])
    return {
        "texts": claims.table(["AUROC, percent", *sets, "mean"], lines),
        "flagged texts": claims.table(["percent", "test sentences", *sets], [["flagged", *flagged]]),
        "planted words": claims.table(
            ["sentences", "number", "AUROC of the tokens", "highest token is planted", "by chance"], planted
        ),
    }


def workers() -> dict[str, str]:
    """docs/howto/large_data.md: least and most of three rounds."""
    kept = data("data/stream.json")
    lines = []
    for name, case in kept["workers"].items():
        costs = [f"{kept['costs'][name][part]:.2f}" for part in ("decode_ms", "judge_ms")]
        rates = [f"{min(rates):,.0f} to {max(rates):,.0f}" for rates in case["rounds"].values()]
        lines.append([case["about"], *costs, *rates])
    head = ["", "decode, ms", "judge, ms", "0 workers", "1 worker", "2 workers", "3 workers"]
    return {"workers": claims.table(head, lines)}


def ranges() -> dict[str, str]:
    """docs/howto/calibration.md: what the picture shows."""
    lines = []
    for images in IMAGES:
        rates = range_of_rates(images - images // 2, 0.95)
        lines.append([f"{images:,}", *(f"{100 * rate:.1f} %" for rate in rates)])
    return {"ranges": claims.table(["calibration images", "lowest", "highest"], lines, 0)}


def fewest() -> dict[str, str]:
    """docs/howto/level.md: the fewest calibration images."""
    lines = [
        [level, f"{calibration_needs(float(level), split=True):,}"]
        for level in ("0.9", "0.95", "0.99", "0.999")
    ]
    return {"fewest": claims.table(["level", "the fewest calibration images"], lines, 0)}


def held_out() -> dict[str, str]:
    """docs/cli.md: what a guard flags that was calibrated on images that the network was trained on."""
    kept = data("data/held_out.json")
    drawn = f"({kept['calibration']} training images held out)"
    titles = {
        "held out": f"`gramwatch fit resnet20 train --weights resnet20_cifar10.pth` {drawn}",
        "other": f"the same with `--calibrate`, {kept['calibration']} other test images",
    }
    lines = [[title, f"{kept[name]['flagged']}, {share(kept[name])}"] for name, title in titles.items()]
    return {
        "held out": claims.table(["command", f"flagged, of {kept['other']['images']:,} test images"], lines)
    }


def across_networks() -> str:
    """docs/results/across.md, as `python -m gramwatch_lab.figures.across` writes it."""
    return f"# Across networks\n\n{across.tables_of(photographs.studies_of(DOCS / 'results', 'scenes'))}"


BLOCKS: dict[str, list[Callable[[], dict[str, str]]]] = {
    "README.md": [rehearsal.in_short, demo, planted_sign],
    "docs/performance.md": [performance],
    "docs/guard.md": [guard, rehearsal.in_short],
    "docs/guard-study.md": [study, photographs.blocks, rehearsal.blocks],
    "docs/method.md": [lambda: {"cancellation": cancellation.page(data("data/cancellation.json"))}],
    "docs/methods/react.md": [lambda: {"react": react.page(data("data/react.json"))}],
    "docs/methods/defaults.md": [lambda: {"defaults": defaults.page(data("data/defaults.json"))}],
    "docs/cli.md": [held_out],
    "docs/methods/README.md": [lambda: {"methods": methods_table()}],
    "docs/methods/image.md": [lambda: {"image costs": image.table()}],
    "docs/howto/calibration.md": [lambda: sample_sizes.page(rows("results/sample_sizes.csv")), ranges],
    "docs/howto/large_data.md": [workers, end_to_end.page],
    "docs/howto/level.md": [fewest],
    "docs/howto/text.md": [texts],
    "docs/tutorial.md": [tutorial],
    "docs/howto/export.md": [exports],
    "docs/monitor.md": [
        lambda: monitor.pages(data("data/monitor.json")),
        lambda: {"fog": fog.page(data("data/fog.json"))},
    ],
    "docs/scale.md": [lambda: scale.pages(data("data/scale.json"))],
    "docs/explain.md": [lambda: explain.blocks(data("data/explain.json")["networks"]), cases],
    "docs/reliability.md": [reliability],
    "docs/results/README.md": [claims.blocks],
}
"""By page: functions that return blocks by name."""
WHOLE: dict[str, Callable[[], str]] = {"docs/results/across.md": across_networks}
"""Pages without a word by hand."""
