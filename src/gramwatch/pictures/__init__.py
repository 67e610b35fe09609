"""Pictures and pages."""

import io
from os import PathLike
from typing import Any

from gramwatch.errors import MissingExtraError
from gramwatch.files.writing import replacing


def pyplot() -> Any:
    """Matplotlib's pyplot with a backend that needs no screen, or an error that names the extra."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError(
            "pictures need matplotlib: install it with pip install 'gramwatch[plot]'"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def write_picture(figure: Any, path: str | PathLike[str]) -> None:
    """Write a figure as a PNG of 256 colours, a third as large as one of all colours, and close it."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    pyplot().close(figure)
    picture = Image.open(drawn).convert("RGB")
    with replacing(path) as beside:
        picture.quantize(256, dither=Image.Dither.NONE).save(beside, "PNG", optimize=True)
