"""The generated blocks of every page: `BLOCKS`, and pages that are generated as a whole: `WHOLE`."""

import re
from collections.abc import Callable
from typing import Any

from gramwatch_lab.figures import across
from gramwatch_lab.paper import false_alarms
from lab.benchmarks import (
    calibrations,
    cancellation,
    claims,
    defaults,
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
    return [data(f"data/{path.name}") for path in sorted((DOCS / "data").glob(f"{kind}-c*.json"))]


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
    page = text_of("results/false_alarms-resnet20.md")
    return {
        "costs": guard_costs(),
        "third rule": third_rule.means(),
        "third rule in short": third_rule.outcomes(),
        "simulated false alarms": false_alarms.table(),
        "simulated rare classes": false_alarms.groups_table(),
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
    "docs/methods/image.md": [lambda: {"image costs": image.table()}],
    "docs/howto/calibration.md": [lambda: sample_sizes.page(sample_sizes.read())],
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
