"""Results as Markdown: the tables that the benchmarks print and the documents hold."""

from typing import Any

TARGETS: dict[str, Any] = {
    "score": {
        "ResNet-34 (CIFAR)": {"cpu": 0.15, "cuda": 0.08},
        "DenseNet-BC-100-12": {"cpu": 0.25, "cuda": 0.10},
        "ViT-B/16 at 224": {"cpu": 0.10, "cuda": 0.05},
    },
    "fit": {"cpu": 1.3, "cuda": 1.15},
    "released": {"cpu": 20.0, "cuda": 15.0},
    "memory": 0.05,
    "kernels": {"cuda": 0.25},
}
"""What was aimed at: the extra of scoring over the plain forward pass; fitting in times the plain forward
pass; how many times faster than fitting by the released algorithm; extra peak memory beside one batch of
statistics; the least share of the one-read limit."""

VARIANTS = ("plain", "released", "pytorch-ood", "eager", "ours", "ours, no verdict")


def where(result: dict[str, Any]) -> str:
    """One line on where a result comes from, as far as the result says."""
    parts = [result["device_name"]]
    if result["device"] == "cuda":
        parts.append("TF32 convolutions" if result["tf32"] else "float32 without TF32")
    elif "threads" in result:
        parts.append(f"{result['threads']} threads")
    parts += [f"{name} {result[name]}" for name in ("torch", "gramwatch") if name in result]
    parts += [result["date"]] if "date" in result else []
    return ", ".join(parts)


def ratio(value: dict[str, float]) -> str:
    """A median with its quartiles."""
    digits = 2 if value["median"] < 10 else 1
    text = f"{value['median']:.{digits}f}"
    if value["rounds"] > 1:
        text += f" ({value['low']:.{digits}f} to {value['high']:.{digits}f})"
    return text


def overhead(result: dict[str, Any]) -> str:
    """Every variant of every network: the table of the run."""
    lines = [
        "| network | variant | score, times plain | score, images/s | share of the read limit "
        "| fit, times plain | fit, images/s | images fitted | peak memory, MB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["networks"]:
        if "left_out" in row:
            lines.append(f"| {row['network']} | left out: {row['left_out']} | | | | | | | |")
            continue
        name = f"{row['network']}, batch {row['batch']}, {row['taps']} taps"
        for variant in VARIANTS:
            lines.append(f"| {name} | {variant} | " + " | ".join(_cells(result, row, variant)) + " |")
            name = ""
    return "\n".join(lines)


def _cells(result: dict[str, Any], row: dict[str, Any], variant: str) -> list[str]:
    score, fit = row["score"].get(variant), row["fit"].get(variant)
    absent = variant == "pytorch-ood" and not result["pytorch_ood"]
    none = "not installed" if absent else "not run"
    cells = [none, "", "", "" if variant == "ours, no verdict" else none, "", "", ""]
    if score:
        cells[0] = "1" if variant == "plain" else ratio(score["ratio"])
        cells[1] = f"{score['images_per_second']:,.1f}"
        if "share_of_read_limit" in score:
            cells[2] = f"{score['share_of_read_limit']:.1%}"
    if fit:
        cells[3] = "1" if variant == "plain" else ratio(fit["ratio"])
        cells[4] = f"{fit['images_per_second']:,.1f}"
        cells[5] = f"{fit['images']:,}"
    if variant in row.get("memory", {}):
        cells[6] = f"{row['memory'][variant] / 1e6:,.1f}"
    return cells


COSTS = {
    "gram": "Gram alone",
    "guard": "Guard",
    "recorded": "Guard, pass recorded",
    "full": "Guard, full effort",
    "full_recorded": "full effort, pass recorded",
}
BUSY = {
    "busy_gram": "of the GPU's time: Gram alone",
    "busy_guard": "of the GPU's time: Guard",
    "busy_full": "of the GPU's time: Guard, full effort",
}


def guard_costs(result: dict[str, Any]) -> str:
    """What Gram and Guard cost over the plain pass, with quartiles; on a GPU also its own time.

    A column that was never measured is left out.
    """
    rows = result["rows"]
    columns, busy = (
        {name: title for name, title in every.items() if any(name in row for row in rows)}
        for every in (COSTS, BUSY)
    )
    head = [*columns.values(), *busy.values()]
    lines = [f"| extra over the plain pass | {' | '.join(head)} |", "| --- |" + " ---: |" * len(head)]
    for row in rows:
        cells = [ratio(row[name]) if name in row else "" for name in columns]
        cells += [f"{row[name]:.3f}" if name in row else "" for name in busy]
        lines.append(f"| {row['network']}, batch {row['batch']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def guard_medians(results: list[dict[str, Any]]) -> str:
    """The same in short: medians only, all devices in one table."""
    names = [name for name in COSTS if any(name in row for result in results for row in result["rows"])]
    lines = [
        f"| network | device | {' | '.join(COSTS[name] for name in names)} |",
        "| --- | --- |" + " ---: |" * len(names),
    ]
    for result in results:
        device = result["device_name"].removeprefix("NVIDIA ")
        for row in result["rows"]:
            cells = [f"{row[name]['median']:.2f}" if name in row else "" for name in names]
            lines.append(f"| {row['network']}, batch {row['batch']} | {device} | {' | '.join(cells)} |")
    return "\n".join(lines)


WAYS = {
    "float32": "float32",
    "bfloat16": "bfloat16, channels last",
    "compiled": "bfloat16, compiled",
}


def ways_table(results: list[dict[str, Any]]) -> str:
    """What a guard costs over the plain pass in the ways people run networks: medians, way by way.

    The time by the clock has its quartiles beside it: it depends on the host.
    """
    columns = {
        "guard": "Guard",
        "recorded": "pass recorded",
        "recorded_over_graph": "pass recorded, over the plain CUDA graph",
        "busy_guard": "of the GPU's time: Guard",
        "fit": "fit, times plain",
        "fit_further": "fit: a further batch",
        "fit_further_recorded": "fit: a further batch, pass recorded",
    }
    rows = [
        (result["device_name"].removeprefix("NVIDIA "), row)
        for result in results
        for row in sorted(result["rows"], key=lambda row: list(WAYS).index(row["way"]))
    ]
    names = [name for name in columns if any(name in row for _, row in rows)]
    head = ["network", "run as", "on", "members", "plain pass, ms", *(columns[name] for name in names)]
    lines = [f"| {' | '.join(head)} |", "| --- | --- | --- |" + " ---: |" * (len(head) - 3)]
    for device, row in rows:
        threads = f", {row['threads']} thread{'s' * (row['threads'] > 1)}" if "threads" in row else ""
        name = f"{row['network']}, batch {row['batch']}"
        cells = [name, WAYS[row["way"]], f"{device}{threads}", f"{row['members']}"]
        cells.append(f"{1e3 * row['plain_seconds']['median']:.1f}")
        for name in names:
            value = row.get(name, "")
            if name == "guard" and value:
                cells.append(ratio(value))
                continue
            cells.append(
                f"{value['median'] if isinstance(value, dict) else value:.2f}" if name in row else ""
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def by_default(strict: dict[str, Any], guard: dict[str, Any]) -> str:
    """Scoring on a GPU without TF32, and with TF32 convolutions as PyTorch has them by default."""
    lines = [
        "| score on a GPU, extra over plain | without TF32 | by default "
        "| GPU's own time, without TF32 | by default |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    default = {(row["network"], row["batch"]): row for row in guard["rows"]}
    for row in strict["networks"]:
        other, parts = default.get((row["network"], row.get("batch"))), row.get("breakdown")
        if other and parts:
            busy = sum(parts[name] for name in ("statistics", "deviations", "other")) / parts["network"]
            extra = row["score"]["ours"]["ratio"]["median"] - 1
            cells = (extra, other["gram"]["median"], busy, other["busy_gram"])
            cells_in_words = " | ".join(f"{cell:.2f}" for cell in cells)
            lines.append(f"| {row['network']}, batch {row['batch']} | {cells_in_words} |")
    return "\n".join(lines)


def extra_memory(row: dict[str, Any]) -> tuple[float, float] | None:
    """Peak memory of ours over the plain forward pass's: beside one batch of statistics, and with it.

    Where the worst moment comes before all statistics are written, the first is less than nothing.
    """
    peaks = row.get("memory", {})
    if "ours" not in peaks or "plain" not in peaks:
        return None
    ours, plain = peaks["ours"], peaks["plain"]
    return (ours - row["statistics_bytes"]) / plain - 1, ours / plain - 1


def breakdown(result: dict[str, Any]) -> str:
    """Where the extra time of scoring a batch goes, in milliseconds."""
    columns = ("plain", "ours", "network", "statistics", "deviations", "other", "idle")
    lines = [
        "| network | read once | " + " | ".join(columns) + " |",
        "| --- |" + " ---: |" * (len(columns) + 1),
    ]
    for row in result["networks"]:
        parts = row.get("breakdown")
        if parts:
            cells = [row["read_once_seconds"], *(parts[name] for name in columns)]
            lines.append(f"| {row['network']} | " + " | ".join(f"{1000 * cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def kernels(result: dict[str, Any]) -> str:
    """The statistics alone, against reading their map once."""
    lines = ["| map (N x C x pixels) | dtype | layout | statistic | ms | share of one read |"]
    lines.append("| --- | --- | --- | --- | ---: | ---: |")
    lines += [
        f"| {' x '.join(map(str, row['shape']))} | {row['dtype']} | {row['layout']} | {row['statistic']} | "
        f"{1000 * row['seconds']:.3f} | {row['share_of_one_read']:.0%} |"
        for row in result["kernels"]
    ]
    return "\n".join(lines)


def targets(results: list[dict[str, Any]]) -> str:
    """What was aimed at and what was reached."""
    lines = ["| | device | aim | reached | |", "| --- | --- | ---: | ---: | --- |"]
    for result in results:
        kind = result["device"]
        device = kind.upper() + (", no TF32" if result["strict"] else "")
        for what, aim, reached, form, met in _compared(result, kind):
            verdict = "met" if met else "missed"
            lines.append(f"| {what} | {device} | {form.format(aim)} | {form.format(reached)} | {verdict} |")
    return "\n".join(lines)


def _compared(result: dict[str, Any], kind: str) -> list[tuple[str, float, float, str, bool]]:
    rows: list[tuple[str, float, float, str, bool]] = []

    def at_most(what: str, aim: float, reached: float, form: str) -> None:
        rows.append((what, aim, reached, form, reached <= aim))

    def at_least(what: str, aim: float, reached: float, form: str) -> None:
        rows.append((what, aim, reached, form, reached >= aim))

    measured = [row for row in result["networks"] if "left_out" not in row]
    for row in measured:
        aim = TARGETS["score"].get(row["network"], {}).get(kind)
        if aim is not None:
            reached = row["score"]["ours"]["ratio"]["median"] - 1
            at_most(f"score, extra over plain: {row['network']}", aim, reached, "{:.2f}")
    for row in measured:
        if kind in TARGETS["fit"]:
            reached = row["fit"]["ours"]["ratio"]["median"]
            images = row["fit"]["ours"]["images"]
            at_most(
                f"fit, times plain: {row['network']}, {images:,} images",
                TARGETS["fit"][kind],
                reached,
                "{:.2f}",
            )
    for row in measured:
        if "released" in row["fit"] and kind in TARGETS["released"]:
            reached = row["fit"]["released"]["over_ours"]["median"]
            what = f"fit, times faster than the released algorithm: {row['network']}"
            at_least(what, TARGETS["released"][kind], reached, "{:.1f}")
    for row in measured:
        extra = extra_memory(row)
        if extra is not None:
            what = f"peak memory over plain, beside one batch of statistics ({extra[1]:+.1%} with it): "
            at_most(what + row["network"], TARGETS["memory"], extra[0], "{:.1%}")
    if kind in TARGETS["kernels"]:
        for statistic in dict.fromkeys(row["statistic"] for row in result["kernels"]):
            least = min(r["share_of_one_read"] for r in result["kernels"] if r["statistic"] == statistic)
            what = f"kernel, share of one read, least of all maps: {statistic}"
            at_least(what, TARGETS["kernels"][kind], least, "{:.0%}")
    return rows


def growth(result: dict[str, Any]) -> str:
    """The exponent of each curve."""
    lines = ["| against | curve | from | to | exponent over the upper half |"]
    lines.append("| --- | --- | ---: | ---: | ---: |")
    lines += [
        f"| {curve['panel']} | {curve['name']} | {curve['x'][0]:,} | {curve['x'][-1]:,} | "
        f"{curve['exponent']:.2f} |"
        for curve in result["curves"]
    ]
    return "\n".join(lines)
