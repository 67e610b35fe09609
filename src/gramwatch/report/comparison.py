"""One picture of several methods on several sets: how well each tells them apart, and where it is worst."""

from os import PathLike

import numpy as np

from gramwatch.evaluate import Evaluation
from gramwatch.report import pyplot, write_picture

MARK = "#b3261e"


def draw_comparison(
    path: str | PathLike[str], evaluation: Evaluation, title: str, metric: str = "auroc"
) -> None:
    """Draw a table of methods x sets, darker where the metric is higher, each method's worst set framed.

    Methods are ordered by their mean over the sets, which stands in the last column.
    """
    plt = pyplot()
    figures = 100 * evaluation.figures(metric)
    order = np.argsort(-figures.mean(1), kind="stable")
    figures = figures[order]
    methods = [evaluation.methods[i] for i in order]
    shown = np.column_stack([figures, figures.mean(1)])
    columns = [*evaluation.sets, "mean"]
    figure, axes = plt.subplots(
        figsize=(2.6 + 1.25 * len(columns), 1.9 + 0.36 * len(methods)), dpi=110, layout="constrained"
    )
    image = axes.imshow(shown, cmap="Blues", vmin=min(50.0, float(shown.min())), vmax=108, aspect="auto")
    for row, values in enumerate(shown):
        for column, value in enumerate(values):
            weight = "bold" if column == len(columns) - 1 else "normal"
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.55 else "black"
            axes.text(
                column, row, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=9, weight=weight
            )
        worst = int(figures[row].argmin())
        axes.add_patch(
            plt.Rectangle((worst - 0.46, row - 0.42), 0.92, 0.84, fill=False, edgecolor=MARK, linewidth=1.8)
        )
    axes.axvline(len(columns) - 1.5, color="white", linewidth=4)
    axes.set_xticks(range(len(columns)), [_wrapped(name) for name in columns], fontsize=9)
    axes.set_yticks(range(len(methods)), methods, fontsize=10)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, weight="bold")
    names = {"auroc": "AUROC", "tnr": "TNR at 95 % TPR", "dtacc": "detection accuracy"}
    figure.supxlabel(
        f"{names.get(metric, metric)} in percent; framed: the method's worst set. {evaluation.protocol}",
        x=0.01,
        ha="left",
        fontsize=8,
        color="#555555",
        wrap=True,
    )
    write_picture(figure, path)


def _wrapped(name: str, width: int = 14) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(name, width))
