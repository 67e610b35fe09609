"""The figures that stand inside sentences, by name: `<!--=NAME-->...<!--/-->`."""

from collections.abc import Callable

from lab.benchmarks.cells import data


def ways_on_gpu() -> str:
    """The GPU of the figures on cost, and their last day."""
    kept = data("data/ways-cuda.json")
    return f"{kept['device_name']}, last on {kept['date']}"


FIGURES: dict[str, Callable[[], str]] = {"ways gpu": ways_on_gpu}
