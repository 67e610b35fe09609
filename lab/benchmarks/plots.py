"""Results as pictures."""

from pathlib import Path
from typing import Any

from gramwatch.explain.frame import DPI, FAINT, INK, SMALL, SOFT, TEXT, TITLE, WIDTH, pyplot, write_picture
from gramwatch_lab.figures.looks import SPARE, looks_of
from lab.benchmarks.cells import DOCS, data

_GRAM = [look.colour for look in looks_of(("row_sums", "diagonal", "off_diagonal")).values()]
COLOURS = {
    "ours": _GRAM[0],
    "eager": _GRAM[1],
    "pytorch-ood": SPARE[6].colour,
    "released": SPARE[3].colour,
}
"""Shades of Gram's colour for our code, others for other people's."""
LABELS = {
    "ours": "gramwatch",
    "eager": "gramwatch without kernels",
    "pytorch-ood": "pytorch-ood",
    "released": "released algorithm",
}
_CURVES = _GRAM
_MARKS = "os^"
_AXES = {
    "channels": "channels",
    "pixels": "pixels",
    "orders": "highest order",
    "classes": "classes",
}


def overhead(results: list[dict[str, Any]], path: Path) -> None:
    """Bars: what scoring costs over the plain forward pass, a panel for each run."""
    plt = pyplot()
    figure, axes = plt.subplots(
        len(results), 1, figsize=(WIDTH, 3.4 * len(results)), squeeze=False, layout="constrained"
    )
    for axis, result in zip(axes[:, 0], results, strict=True):
        rows = [row for row in result["networks"] if "left_out" not in row]
        present = [v for v in COLOURS if any(v in row["score"] for row in rows)]
        heights = [
            row["score"][v]["ratio"]["median"] - 1 for row in rows for v in present if v in row["score"]
        ]
        positive = [h for h in heights if h > 0] or [1.0]
        floor = min(positive) / 2
        width = 0.8 / max(1, len(present))
        for k, variant in enumerate(present):
            at, extra, spread = [], [], ([], [])
            for n, row in enumerate(rows):
                if variant in row["score"]:
                    ratio = row["score"][variant]["ratio"]
                    value = max(ratio["median"] - 1, floor)
                    at.append(n + (k - (len(present) - 1) / 2) * width)
                    extra.append(value)
                    spread[0].append(max(0.0, value - max(ratio["low"] - 1, floor)))
                    spread[1].append(max(0.0, ratio["high"] - 1 - value))
            bars = axis.bar(
                at, extra, width * 0.92, color=COLOURS[variant], label=LABELS[variant], yerr=spread,
                error_kw={"elinewidth": 0.8, "ecolor": INK},
            )  # fmt: skip
            axis.bar_label(bars, [f"{value:.2g}" for value in extra], fontsize=SMALL, padding=2)
        axis.set_yscale("log")
        axis.set_ylim(floor, max(positive) * 2.5)
        axis.set_xticks(
            range(len(rows)), [f"{row['network']}\nbatch {row['batch']}" for row in rows], fontsize=SMALL
        )
        axis.axhline(1, color=SOFT, linewidth=0.8, linestyle=":")
        axis.set_ylabel("extra over the plain\nforward pass (1 = as much again)", fontsize=TEXT, color=INK)
        precision = ", no TF32" if result["strict"] else ""
        axis.set_title(
            f"scoring on {result['device_name']}{precision}", fontsize=TEXT, weight="bold", loc="left", pad=22
        )
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", labelsize=SMALL)
        axis.legend(fontsize=TEXT, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(-0.01, 0.99))
    _write(figure, path)


def growth(result: dict[str, Any], path: Path) -> None:
    """Four panels, logarithmic both ways, with a line of linear growth in each."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(WIDTH, 6.6), layout="constrained")
    for axis, panel in zip(axes.flat, _AXES, strict=True):
        curves = [curve for curve in result["curves"] if curve["panel"] == panel]
        axis.set_xscale("log")
        axis.set_yscale("log")
        for curve, colour, mark in zip(curves, _CURVES, _MARKS, strict=False):
            label = f"{curve['name']} (exponent {curve['exponent']:.2f})"
            ms = [1000 * v for v in curve["seconds"]]
            axis.plot(curve["x"], ms, color=colour, marker=mark, markersize=4, linewidth=1.4, label=label)
        if curves:
            x, top = curves[0]["x"], max(1000 * c["seconds"][-1] for c in curves) * 1.6
            lowest = min(1000 * min(c["seconds"]) for c in curves) / 2
            guide = [(v, top * v / x[-1]) for v in (max(x[0], x[-1] * lowest / top), x[-1])]
            axis.plot(*zip(*guide, strict=True), color=SOFT, linestyle="--", linewidth=1, label="slope 1")
            axis.set_ylim(lowest, 8 * max(top, *(1000 * v for c in curves for v in c["seconds"])))
            axis.set_xticks(x, [f"{v:,}" for v in x], fontsize=SMALL, rotation=30 if len(x) > 6 else 0)
            axis.minorticks_off()
        axis.set_xlabel(_AXES[panel], fontsize=TEXT, color=INK)
        axis.set_ylabel("milliseconds", fontsize=TEXT, color=INK)
        axis.tick_params(axis="y", labelsize=SMALL)
        axis.set_title(result["fixed"].get(panel, ""), fontsize=TEXT, loc="left", color=INK)
        axis.grid(color=FAINT, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=SMALL, frameon=False, loc="upper left")
    threads = f", {result['threads']} threads" if result["device"] == "cpu" else ""
    figure.suptitle(
        f"growth of the cost on {result['device_name']}{threads}",
        x=0.01,
        ha="left",
        fontsize=TITLE,
        weight="bold",
        color=INK,
    )
    _write(figure, path)


def _write(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.set_dpi(DPI)
    write_picture(figure, path)


def main() -> None:
    """Draw the pictures of the cost and of the rehearsal in docs/."""
    from lab.benchmarks import blocks, explain, rehearsal

    overhead(blocks.results_of("overhead"), DOCS / "images" / "performance_overhead.png")
    for result in blocks.results_of("growth"):
        growth(result, DOCS / "images" / f"performance_growth_{result['device']}.png")
    explain.draw_removal(DOCS / "images" / "explain_removal.png", data("data/explain.json")["networks"])
    rehearsal.picture(rehearsal.kept_figures(DOCS / "results")[0], DOCS / "results" / "rehearsal.png")


if __name__ == "__main__":
    main()
