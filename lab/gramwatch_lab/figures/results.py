"""The picture of an experiment, from its files: `python -m gramwatch_lab.figures.results NAME.csv ...`.

Each CSV has its page beside it, `NAME.md`, with the words that stand above the picture.
"""

import sys
from os import PathLike
from pathlib import Path

from gramwatch.evaluation.comparison import draw_shades
from gramwatch_lab.figures.curves import draw_curves
from gramwatch_lab.figures.dots import draw_dots
from gramwatch_lab.figures.table import APART, by_method, read_cells, read_words
from gramwatch_lab.figures.why import draw_why, read_figures

NO_PICTURE = ("false_alarms", "networks", "sample_sizes", "sets")
"""Tables that have no picture."""
MOST_DOTS = 6
"""More methods than this are drawn as a table of shades."""


def draw(path: str | PathLike[str]) -> None:
    """Draw `NAME.png` beside `NAME.csv`; of the study of Guard `NAME-why.png`, too."""
    path = Path(path)
    kind = path.stem.partition("-")[0]
    if kind in NO_PICTURE:
        return
    page, picture = path.with_suffix(".md"), path.with_suffix(".png")
    words = read_words(page)
    cells = [cell for cell in read_cells(path) if cell.note != APART]
    if kind in ("depth", "order"):
        draw_curves(picture, cells, words)
    elif kind == "ablation":
        draw_shades(picture, by_method(cells, "tnr"), words, "tnr", page.name)
    elif len({cell.method for cell in cells}) > MOST_DOTS:
        draw_shades(picture, by_method(cells, "auroc"), words, "auroc", page.name)
    else:
        draw_dots(picture, cells, words)
    if kind == "guard":
        draw_why(path.with_name(f"{path.stem}-why.png"), dict([read_figures(path)]))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(name)
