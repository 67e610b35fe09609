"""Pictures and pages."""

from typing import Any

from gramwatch.errors import MissingExtraError


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
